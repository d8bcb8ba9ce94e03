// From tensors to pointers for the sampling kernel: checks, device guard, current stream, launch. Called through bindings.cpp.
#include "cuda/sampling.h"

#include "checks.h"
#include "ops.h"
#include "stream.h"

namespace albatross {
namespace {

constexpr const char* kOp = "sample";
constexpr int64_t kRecordWords = sizeof(SlotRecord) / sizeof(int32_t);

void check_logits(const Tensor& logits) {
  const bool is_good = logits.dim() == 2 && logits.scalar_type() == ScalarType::Float && logits.is_cuda() && logits.size(1) > 0 &&
                       (logits.size(1) == 1 || logits.stride(1) == 1);
  if (!is_good) refuse(kOp, "logits", "float32 [K, V], contiguous within a row", logits);
  if (logits.size(1) <= kMaxSampledVocab) return;
  refuse(kOp, "logits", "of at most " + std::to_string(kMaxSampledVocab) + " ids a row", logits);
}

bool has_quads(const Tensor& logits) {
  return logits.size(1) % 4 == 0 && logits.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(logits.data_ptr()) % 16 == 0;
}

template <typename T>
T* pointer(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

}  // namespace

void sample(const Tensor& logits, const Tensor& slots, const Tensor& records, const Tensor& edit_ids, const Tensor& edit_values,
            const Tensor& forbidden, const std::optional<Tensor>& allowed, const std::optional<Tensor>& counts,
            const Tensor& last_token, const Tensor& drawn, const Tensor& is_bad) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1), num_words = (vocab_size + 31) / 32;
  const int64_t num_slots = records.dim() ? records.size(0) : 0, num_edits = edit_ids.dim() == 2 ? edit_ids.size(1) : 0;
  check_tensor(kOp, "slots", slots, ScalarType::Int, {num_rows}, "[K]", logits);
  check_tensor(kOp, "records", records, ScalarType::Int, {num_slots, kRecordWords}, "[S, 16]", logits);
  check_tensor(kOp, "edit_ids", edit_ids, ScalarType::Int, {num_slots, num_edits}, "[S, M]", logits);
  check_tensor(kOp, "edit_values", edit_values, ScalarType::Float, {num_slots, num_edits}, "[S, M]", logits);
  check_tensor(kOp, "forbidden", forbidden, ScalarType::Int, {num_words}, "[W]", logits);
  if (allowed) check_tensor(kOp, "allowed", *allowed, ScalarType::Int, {num_rows, num_words}, "[K, W]", logits);
  if (counts) {
    check_tensor(kOp, "counts", *counts, ScalarType::Float, {num_slots, vocab_size}, "[S, V]", logits);
    check_alignment(kOp, "counts", *counts);
  }
  check_tensor(kOp, "last_token", last_token, ScalarType::Long, {num_slots}, "[S]", logits);
  check_tensor(kOp, "drawn", drawn, ScalarType::Long, {num_rows}, "[K]", logits);
  check_tensor(kOp, "is_bad", is_bad, ScalarType::Bool, {num_rows}, "[K]", logits);

  SampleParams params{};
  params.logits = pointer<const float>(logits);
  params.logits_stride = logits.stride(0);
  params.slots = pointer<const int32_t>(slots);
  params.records = pointer<SlotRecord>(records);
  params.edit_ids = pointer<const int32_t>(edit_ids);
  params.edit_values = pointer<const float>(edit_values);
  params.edit_capacity = static_cast<int32_t>(num_edits);
  params.forbidden = pointer<const uint32_t>(forbidden);
  params.allowed = allowed ? pointer<const uint32_t>(*allowed) : nullptr;
  params.counts = counts ? pointer<float>(*counts) : nullptr;
  params.last_token = pointer<int64_t>(last_token);
  params.drawn = pointer<int64_t>(drawn);
  params.is_bad = pointer<bool>(is_bad);
  params.num_slots = num_slots;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(vocab_size);
  params.has_quads = has_quads(logits);
  const DeviceGuard guard(logits.get_device());
  const char* const error = launch_sample(params, current_stream(logits.get_device()));
  if (error != nullptr) throw std::runtime_error(std::string(kOp) + ": the launch failed: " + error);
}

}  // namespace albatross
