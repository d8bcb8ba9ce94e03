// From tensors to pointers for the WKV-7 kernels: checks, device guard, current stream, launch. Called through bindings.cpp.
#include "checks.h"
#include "constants.h"
#include "cuda/wkv7.h"
#include "ops.h"
#include "stream.h"

#include <torch/csrc/stable/accelerator.h>

namespace albatross {
namespace {

struct Vector {
  const char* name;
  const Tensor& tensor;
};

Dtype dtype_of(const Tensor& x) { return x.scalar_type() == ScalarType::Half ? Dtype::kFloat16 : Dtype::kFloat32; }

void check_state(const char* op, const Tensor& state) {
  constexpr int64_t n = kHeadSize;
  const bool is_good = state.is_cuda() && is_float(state) && state.dim() == 4 && state.size(2) == n && state.size(3) == n &&
                       (state.size(1) == 1 || state.stride(1) == n * n) && state.stride(2) == n && state.stride(3) == 1;
  if (!is_good) refuse(op, "state", "float16 or float32 [S, H, 64, 64], contiguous within a slot", state);
  const int64_t unit = dtype_of(state) == Dtype::kFloat16 ? 8 : 4;
  if (state.stride(0) % unit != 0) refuse(op, "state", "strided by a multiple of 16 bytes from slot to slot", state);
  check_alignment(op, "state", state);
}

// What both ops share; `letters` names the vectors' shape. `vectors` is r, w, k, v, a, b, y.
Wkv7Params checked_params(const char* op, const Tensor& state, const Vector (&vectors)[7], const char* letters, const Tensor& slots) {
  check_state(op, state);
  const Tensor& r = vectors[0].tensor;
  if (!is_float(r)) refuse(op, "r", "float16 or float32", r);
  const int64_t num_tokens = r.dim() ? r.size(0) : 0;
  for (const auto& [name, x] : vectors) {
    check_tensor(op, name, x, r.scalar_type(), {num_tokens, state.size(1), kHeadSize}, letters, state);
    check_alignment(op, name, x);
  }
  Wkv7Params params{};
  params.state = state.data_ptr();
  params.state_stride = state.stride(0);
  params.num_slots = state.size(0);
  params.state_dtype = dtype_of(state);
  for (int i = 0; i < 6; ++i) params.vectors[i] = vectors[i].tensor.data_ptr();
  params.y = vectors[6].tensor.data_ptr();
  params.vector_dtype = dtype_of(r);
  params.num_tokens = num_tokens;
  params.num_rows = slots.dim() ? slots.size(0) : 0;
  params.num_heads = state.size(1);
  return params;
}

void launch(const char* op, const Tensor& state, const Wkv7Params& params, const char* (*launcher)(const Wkv7Params&, void*)) {
  const torch::stable::accelerator::DeviceGuard guard(state.get_device());
  const char* const error = launcher(params, current_stream(state.get_device()));
  if (error != nullptr) throw std::runtime_error(std::string(op) + ": the launch failed: " + error);
}

}  // namespace

void wkv7_decode(const Tensor& state, const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                 const Tensor& b, const Tensor& slots, const Tensor& y) {
  constexpr const char* op = "wkv7_decode";
  const Vector vectors[] = {{"r", r}, {"w", w}, {"k", k}, {"v", v}, {"a", a}, {"b", b}, {"y", y}};
  Wkv7Params params = checked_params(op, state, vectors, "[B, H, 64]", slots);
  check_tensor(op, "slots", slots, ScalarType::Int, {params.num_tokens}, "[B]", state);
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  launch(op, state, params, launch_wkv7_decode);
}

void wkv7_prefill(const Tensor& state, const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                  const Tensor& b, const Tensor& cu_seqlens, const Tensor& slots, const Tensor& y) {
  constexpr const char* op = "wkv7_prefill";
  const Vector vectors[] = {{"r", r}, {"w", w}, {"k", k}, {"v", v}, {"a", a}, {"b", b}, {"y", y}};
  Wkv7Params params = checked_params(op, state, vectors, "[T, H, 64]", slots);
  check_tensor(op, "slots", slots, ScalarType::Int, {params.num_rows}, "[R]", state);
  check_tensor(op, "cu_seqlens", cu_seqlens, ScalarType::Int, {params.num_rows + 1}, "[R + 1]", state);
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  launch(op, state, params, launch_wkv7_prefill);
}

}  // namespace albatross
