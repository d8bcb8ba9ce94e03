// From tensors to pointers for the WKV-7 kernel: checks and launch. Called through bindings.cpp.
#include "checks.h"
#include "cuda/wkv7.h"
#include "dispatch.h"
#include "ops.h"

namespace albatross {
namespace {

struct Vector {
  const char* name;
  const Tensor& tensor;
};

}  // namespace

void wkv7_prefill(const Tensor& state, const Tensor& r, const Tensor& w, const Tensor& k, const Tensor& v, const Tensor& a,
                  const Tensor& b, const Tensor& cu_seqlens, const Tensor& slots, const Tensor& y) {
  constexpr const char* op = "wkv7_prefill";
  check_state(op, state);
  if (!is_float(r)) refuse(op, "r", "float16 or float32", r);
  const int64_t num_tokens = r.dim() ? r.size(0) : 0, num_rows = slots.dim() ? slots.size(0) : 0;
  const Vector vectors[] = {{"r", r}, {"w", w}, {"k", k}, {"v", v}, {"a", a}, {"b", b}, {"y", y}};
  void* data[7];
  for (int i = 0; i < 7; ++i) {
    const auto& [name, x] = vectors[i];
    data[i] = checked_data(op, name, x, r.scalar_type(), {num_tokens, state.size(1), kHeadSize}, "[T, H, 64]", state);
  }
  check_tensor(op, "slots", slots, ScalarType::Int, {num_rows}, "[R]", state);
  check_tensor(op, "cu_seqlens", cu_seqlens, ScalarType::Int, {num_rows + 1}, "[R + 1]", state);
  Wkv7Params params{};
  params.state = state.data_ptr();
  params.state_stride = state.stride(0);
  params.num_slots = state.size(0);
  params.state_dtype = dtype_of(state);
  for (int i = 0; i < 6; ++i) params.vectors[i] = data[i];
  params.y = data[6];
  params.vector_dtype = dtype_of(r);
  params.slots = static_cast<const int32_t*>(slots.data_ptr());
  params.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  params.num_tokens = num_tokens;
  params.num_rows = num_rows;
  params.num_heads = state.size(1);
  launch(op, state, params, launch_wkv7_prefill);
}

}  // namespace albatross
