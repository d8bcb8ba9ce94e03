// What the layer norm kernels take. No torch and no CUDA header. Pointers are on the device, 16-byte aligned; so is every row.
#pragma once

#include "params.h"

#include <cstdint>

namespace albatross {

constexpr int kMaxNormChannels = 8192;
constexpr int kMaxMixes = 8;

// LN(x + delta), in fp32.
struct NormInput {
  const float* x;          // [num_tokens, C], contiguous
  Rows delta;              // [num_tokens, C] of `dtype`; null for zero
  const float* ln_weight;  // [C]
  const float* ln_bias;    // [C]
  Dtype dtype;
  int64_t num_tokens;
  int num_channels;
};

struct AddNormMixParams {
  NormInput input;
  const void* mix;  // [M, C], contiguous
  int num_mixes;
  void* shift;  // [S, C], slots shift_stride elements apart
  int64_t shift_stride;
  int64_t num_slots;
  const int32_t* cu_seqlens;  // [num_rows + 1]
  const int32_t* token_rows;  // [num_tokens]
  const int32_t* slots;       // [num_rows]; negative: padding
  int64_t num_rows;
  float* x_out;  // [num_tokens, C], contiguous
  void* mixed;   // [M, num_tokens, C], contiguous
};

struct AddNormParams {
  NormInput input;
  const int64_t* index;  // [num_chosen]
  int64_t num_chosen;
  void* out;  // [num_chosen, C], out_stride elements from row to row
  int64_t out_stride;
};

// Both launch on `stream` and return nullptr, or what the driver refused.
const char* launch_add_norm_mix(const AddNormMixParams& params, void* stream);
const char* launch_add_norm(const AddNormParams& params, void* stream);

}  // namespace albatross
