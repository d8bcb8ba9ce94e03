// From tensors to pointers for the kernels of time mixing: checks and launch. Called through bindings.cpp.
#include "cuda/tmix.h"

#include "checks.h"
#include "dispatch.h"
#include "ops.h"

namespace albatross {
namespace {

// Checks the tensors of one call, whose rows are all alike: [T, C] of one type, on one device.
class Checker {
 public:
  Checker(const char* op, const char* name, const Tensor& leading) : op_(op), like_(leading), type_(leading.scalar_type()) {
    check_leading_rows(op, name, leading);
    num_tokens_ = leading.size(0);
    num_channels_ = leading.size(1);
  }

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_heads() const { return num_channels_ / kHeadSize; }
  Dtype dtype() const { return dtype_of(like_); }

  Rows rows(const char* name, const Tensor& x) const {
    return checked_rows(op_, name, x, type_, {num_tokens_, num_channels_}, "[T, C]", like_);
  }
  void* output(const char* name, const Tensor& x) const {
    return checked_data(op_, name, x, type_, {num_tokens_, num_channels_}, "[T, C]", like_);
  }
  const float* constant(const char* name, const Tensor& x) const {
    return static_cast<const float*>(checked_data(op_, name, x, ScalarType::Float, {num_channels_}, "[C]", like_));
  }
  TmixProducts products(const Tensor& k, const Tensor& v, const Tensor& w, const Tensor& a, const std::optional<Tensor>& v_gate,
                        const std::optional<Tensor>& v_first) const {
    TmixProducts products{rows("k", k), rows("v", v), rows("w", w), rows("a", a), {}, {}};
    if (v_gate.has_value()) products.v_gate = rows("v_gate", *v_gate);
    if (v_first.has_value()) products.v_first = rows("v_first", *v_first);
    return products;
  }
  TmixConstants constants(const Tensor& w0, const Tensor& a0, const std::optional<Tensor>& v0, const Tensor& k_k,
                          const Tensor& k_a) const {
    return {constant("w0", w0), constant("a0", a0), v0.has_value() ? constant("v0", *v0) : nullptr, constant("k_k", k_k),
            constant("k_a", k_a)};
  }
  void check_gate(const std::optional<Tensor>& v_gate, const std::optional<Tensor>& v_first,
                  const std::optional<Tensor>& v0) const {
    if (v_gate.has_value() == v_first.has_value() && v_gate.has_value() == v0.has_value()) return;
    throw std::runtime_error(std::string(op_) + ": v_gate, v_first and v0 must be given together, or none of them");
  }
  TmixReadout readout(const Tensor& r_k, const Tensor& ln_weight, const Tensor& ln_bias) const {
    const void* const bonus = checked_data(op_, "r_k", r_k, ScalarType::Float, {num_heads(), kHeadSize}, "[H, 64]", like_);
    return {static_cast<const float*>(bonus), constant("ln_weight", ln_weight), constant("ln_bias", ln_bias)};
  }

 private:
  const char* const op_;
  const Tensor& like_;
  const ScalarType type_;
  int64_t num_tokens_, num_channels_;
};

}  // namespace

namespace {

// What tmix_decode and tmix_prefill share, whose parameters name these alike.
template <typename Params>
Checker fill(Params& params, const char* op, const Tensor& state, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& w,
             const Tensor& a, const std::optional<Tensor>& v_gate, const Tensor& g, const std::optional<Tensor>& v_first,
             const Tensor& w0, const Tensor& a0, const std::optional<Tensor>& v0, const Tensor& k_k, const Tensor& k_a,
             const Tensor& r_k, const Tensor& ln_weight, const Tensor& ln_bias, const Tensor& out) {
  check_state(op, state);
  const Checker checker(op, "r", r);
  if (r.get_device() != state.get_device() || checker.num_heads() != state.size(1)) {
    refuse(op, "r", "[T, C] with C = " + std::to_string(state.size(1) * kHeadSize) + " on " + device_name(state), r);
  }
  checker.check_gate(v_gate, v_first, v0);
  params.state = state.data_ptr();
  params.state_stride = state.stride(0);
  params.num_slots = state.size(0);
  params.state_dtype = dtype_of(state);
  params.r = checker.rows("r", r);
  params.products = checker.products(k, v, w, a, v_gate, v_first);
  params.g = checker.rows("g", g);
  params.constants = checker.constants(w0, a0, v0, k_k, k_a);
  params.readout = checker.readout(r_k, ln_weight, ln_bias);
  const Rows rows = checker.rows("out", out);
  params.out = const_cast<void*>(rows.data);
  params.out_stride = rows.stride;
  params.num_tokens = checker.num_tokens();
  params.num_heads = checker.num_heads();
  return checker;
}

}  // namespace

void tmix_decode(const Tensor& state, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& w, const Tensor& a,
                 const std::optional<Tensor>& v_gate, const Tensor& g, const std::optional<Tensor>& v_first, const Tensor& w0,
                 const Tensor& a0, const std::optional<Tensor>& v0, const Tensor& k_k, const Tensor& k_a, const Tensor& r_k,
                 const Tensor& ln_weight, const Tensor& ln_bias, const Tensor& slots, const Tensor& out) {
  constexpr const char* op = "tmix_decode";
  TmixDecodeParams params{};
  const Checker checker = fill(params, op, state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, out);
  check_tensor(op, "slots", slots, ScalarType::Int, {checker.num_tokens()}, "[T]", r);
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.dtype = checker.dtype();
  launch(op, r, params, launch_tmix_decode);
}

void tmix_prefill(const Tensor& state, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& w, const Tensor& a,
                  const std::optional<Tensor>& v_gate, const Tensor& g, const std::optional<Tensor>& v_first, const Tensor& w0,
                  const Tensor& a0, const std::optional<Tensor>& v0, const Tensor& k_k, const Tensor& k_a, const Tensor& r_k,
                  const Tensor& ln_weight, const Tensor& ln_bias, const Tensor& cu_seqlens, const Tensor& slots,
                  const Tensor& out, const std::optional<Tensor>& segments) {
  constexpr const char* op = "tmix_prefill";
  if (r.scalar_type() != ScalarType::Half) refuse(op, "r", "float16 on a CUDA card", r);
  TmixPrefillParams params{};
  fill(params, op, state, r, k, v, w, a, v_gate, g, v_first, w0, a0, v0, k_k, k_a, r_k, ln_weight, ln_bias, out);
  params.num_rows = slots.dim() ? slots.size(0) : 0;
  check_tensor(op, "slots", slots, ScalarType::Int, {params.num_rows}, "[R]", r);
  check_tensor(op, "cu_seqlens", cu_seqlens, ScalarType::Int, {params.num_rows + 1}, "[R + 1]", r);
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  if (segments.has_value()) {
    params.num_segments = segments->dim() ? segments->size(0) : 0;
    void* const room = checked_data(op, "segments", *segments, ScalarType::Float,
                                    {params.num_segments, params.num_heads, 2, kHeadSize, kHeadSize}, "[N, H, 2, 64, 64]", r);
    params.segments = static_cast<float*>(room);
  }
  launch(op, r, params, launch_tmix_prefill);
}

void tmix_prepare(const Tensor& k, const Tensor& v, const Tensor& w, const Tensor& a, const std::optional<Tensor>& v_gate,
                  const std::optional<Tensor>& v_first, const Tensor& w0, const Tensor& a0, const std::optional<Tensor>& v0,
                  const Tensor& k_k, const Tensor& k_a, const Tensor& w_out, const Tensor& k_out, const Tensor& v_out,
                  const Tensor& minus_kk, const Tensor& b) {
  constexpr const char* op = "tmix_prepare";
  const Checker checker(op, "k", k);
  checker.check_gate(v_gate, v_first, v0);
  TmixPrepareParams params{};
  params.products = checker.products(k, v, w, a, v_gate, v_first);
  params.constants = checker.constants(w0, a0, v0, k_k, k_a);
  params.outputs[0] = checker.output("w_out", w_out);
  params.outputs[1] = checker.output("k_out", k_out);
  params.outputs[2] = checker.output("v_out", v_out);
  params.outputs[3] = checker.output("minus_kk", minus_kk);
  params.outputs[4] = checker.output("b", b);
  params.dtype = checker.dtype();
  params.num_tokens = checker.num_tokens();
  params.num_heads = checker.num_heads();
  launch(op, k, params, launch_tmix_prepare);
}

void tmix_readout(const Tensor& y, const Tensor& r, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& r_k,
                  const Tensor& ln_weight, const Tensor& ln_bias, const Tensor& out) {
  constexpr const char* op = "tmix_readout";
  const Checker checker(op, "y", y);
  TmixReadoutParams params{};
  params.y = checker.rows("y", y);
  params.r = checker.rows("r", r);
  params.k = checker.rows("k", k);
  params.v = checker.rows("v", v);
  params.g = checker.rows("g", g);
  params.readout = checker.readout(r_k, ln_weight, ln_bias);
  const Rows rows = checker.rows("out", out);
  params.out = const_cast<void*>(rows.data);
  params.out_stride = rows.stride;
  params.dtype = checker.dtype();
  params.num_tokens = checker.num_tokens();
  params.num_heads = checker.num_heads();
  launch(op, y, params, launch_tmix_readout);
}

void squared_relu(const Tensor& x) {
  constexpr const char* op = "squared_relu";
  if (!x.is_cuda() || !is_float(x) || !x.is_contiguous()) refuse(op, "x", "contiguous float16 or float32", x);
  check_alignment(op, "x", x);
  const SquaredReluParams params{x.data_ptr(), x.numel(), dtype_of(x)};
  launch(op, x, params, launch_squared_relu);
}

}  // namespace albatross
