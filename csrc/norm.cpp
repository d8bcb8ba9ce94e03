// From tensors to pointers for the layer norm kernels: checks and launch. Called through bindings.cpp.
#include "cuda/norm.h"

#include "checks.h"
#include "dispatch.h"
#include "ops.h"

namespace albatross {
namespace {

NormInput checked_input(const char* op, const Tensor& x, const std::optional<Tensor>& delta, const Tensor& ln_weight,
                        const Tensor& ln_bias, ScalarType type) {
  check_leading_rows(op, "x", x);
  const int64_t num_tokens = x.size(0), num_channels = x.size(1);
  if (num_channels > kMaxNormChannels) refuse(op, "x", "of at most " + std::to_string(kMaxNormChannels) + " channels", x);
  NormInput input{};
  input.x = static_cast<const float*>(checked_data(op, "x", x, ScalarType::Float, {num_tokens, num_channels}, "[T, C]", x));
  if (delta.has_value()) input.delta = checked_rows(op, "delta", *delta, type, {num_tokens, num_channels}, "[T, C]", x);
  const auto constant = [&](const char* name, const Tensor& tensor) {
    return static_cast<const float*>(checked_data(op, name, tensor, ScalarType::Float, {num_channels}, "[C]", x));
  };
  input.ln_weight = constant("ln_weight", ln_weight);
  input.ln_bias = constant("ln_bias", ln_bias);
  input.dtype = type == ScalarType::Half ? Dtype::kFloat16 : Dtype::kFloat32;
  input.num_tokens = num_tokens;
  input.num_channels = static_cast<int>(num_channels);
  return input;
}

}  // namespace

void add_norm_mix(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& ln_weight, const Tensor& ln_bias,
                  const Tensor& mix, const Tensor& shift, const Tensor& cu_seqlens, const Tensor& token_rows, const Tensor& slots,
                  const Tensor& x_out, const Tensor& mixed) {
  constexpr const char* op = "add_norm_mix";
  const ScalarType type = mix.scalar_type();
  if (!is_float(mix) || mix.dim() != 2 || mix.size(0) < 1 || mix.size(0) > kMaxMixes) {
    refuse(op, "mix", "float16 or float32 [M, C] with M from 1 to " + std::to_string(kMaxMixes), mix);
  }
  AddNormMixParams params{};
  params.input = checked_input(op, x, delta, ln_weight, ln_bias, type);
  const int64_t num_tokens = x.size(0), num_channels = x.size(1), num_mixes = mix.size(0);
  const int64_t num_slots = shift.dim() ? shift.size(0) : 0, num_rows = slots.dim() ? slots.size(0) : 0;
  params.mix = checked_data(op, "mix", mix, type, {num_mixes, num_channels}, "[M, C]", x);
  params.num_mixes = static_cast<int>(num_mixes);
  const Rows states = checked_rows(op, "shift", shift, type, {num_slots, num_channels}, "[S, C]", x);
  params.shift = const_cast<void*>(states.data);
  params.shift_stride = states.stride;
  params.num_slots = num_slots;
  check_tensor(op, "cu_seqlens", cu_seqlens, ScalarType::Int, {num_rows + 1}, "[R + 1]", x);
  check_tensor(op, "token_rows", token_rows, ScalarType::Int, {num_tokens}, "[T]", x);
  check_tensor(op, "slots", slots, ScalarType::Int, {num_rows}, "[R]", x);
  params.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  params.token_rows = static_cast<const int32_t*>(token_rows.data_ptr());
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.num_rows = num_rows;
  void* const sum = checked_data(op, "x_out", x_out, ScalarType::Float, {num_tokens, num_channels}, "[T, C]", x);
  params.x_out = static_cast<float*>(sum);
  if (params.x_out == params.input.x && num_tokens > 0) refuse(op, "x_out", "another tensor than x", x_out);
  params.mixed = checked_data(op, "mixed", mixed, type, {num_mixes, num_tokens, num_channels}, "[M, T, C]", x);
  launch(op, x, params, launch_add_norm_mix);
}

void add_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& ln_weight, const Tensor& ln_bias,
              const Tensor& index, const Tensor& out) {
  constexpr const char* op = "add_norm";
  if (!is_float(out)) refuse(op, "out", "float16 or float32 [K, C]", out);
  AddNormParams params{};
  params.input = checked_input(op, x, delta, ln_weight, ln_bias, out.scalar_type());
  const int64_t num_chosen = index.dim() ? index.size(0) : 0;
  check_tensor(op, "index", index, ScalarType::Long, {num_chosen}, "[K]", x);
  params.index = static_cast<const int64_t*>(index.data_ptr());
  params.num_chosen = num_chosen;
  const Rows rows = checked_rows(op, "out", out, out.scalar_type(), {num_chosen, x.size(1)}, "[K, C]", x);
  params.out = const_cast<void*>(rows.data);
  params.out_stride = rows.stride;
  launch(op, x, params, launch_add_norm);
}

}  // namespace albatross
