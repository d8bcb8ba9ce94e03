// What the sampling kernel takes: raw pointers, sizes and strides. No torch and no CUDA header, so that any compiler reads it.
#pragma once

#include <cstdint>

namespace albatross {

// All that a slot's draws depend on besides its lists: a row of `records`, with the columns of Field in
// python/albatross/reference/sampling.py.
struct SlotRecord {
  float temperature, top_p, min_p, presence, frequency, repetition, decay;
  int32_t top_k;  // 0: off
  uint32_t seed_low, seed_high, choice;
  int32_t position;  // tokens drawn
  int32_t min_tokens;
  int32_t num_edits;
  uint32_t flags;
  int32_t unused;
};
static_assert(sizeof(SlotRecord) == 64, "a record is 16 words");

constexpr uint32_t kGreedy = 1, kClassic = 2, kPenalties = 4, kLimits = 8;  // SlotRecord::flags
constexpr int32_t kMaxSampledVocab = 1 << 19;

struct SampleParams {
  const float* logits;  // [num_rows, vocab_size], rows logits_stride apart
  int64_t logits_stride;
  const int32_t* slots;      // [num_rows]; negative: padding
  SlotRecord* records;       // [num_slots]
  const int32_t* edit_ids;   // [num_slots, edit_capacity]; sign bit: a ban for the first min_tokens tokens
  const float* edit_values;  // [num_slots, edit_capacity]
  int32_t edit_capacity;
  const uint32_t* forbidden;  // [ceil(vocab_size / 32)] bits
  const uint32_t* allowed;    // [num_rows, ceil(vocab_size / 32)] bits; null: all
  float* counts;              // [num_slots, vocab_size]; null: no row has penalties
  int64_t* last_token;        // [num_slots]
  int64_t* drawn;             // [num_rows]
  bool* is_bad;               // [num_rows]
  int64_t num_slots;
  int32_t num_rows;
  int32_t vocab_size;  // at most kMaxSampledVocab
  bool has_quads;      // rows of logits and counts may be read 16 bytes at a time
};

// Launches on `stream` and returns nullptr, or what the driver refused.
const char* launch_sample(const SampleParams& params, void* stream);

}  // namespace albatross
