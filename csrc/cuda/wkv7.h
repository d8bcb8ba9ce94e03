// What the WKV-7 kernel takes: raw pointers, sizes and strides. No torch and no CUDA header, so that any compiler reads it.
// All strides are in elements. Pointers are on the device and 16-byte aligned.
#pragma once

#include "params.h"

#include <cstdint>

namespace albatross {

struct Wkv7Params {
  void* state;  // [S, H, 64 value, 64 key], slots state_stride apart, contiguous within one
  int64_t state_stride;
  int64_t num_slots;
  Dtype state_dtype;
  const void* vectors[6];  // r, w, k, v, a, b, as y: [num_tokens, H, 64], contiguous, all of vector_dtype
  void* y;
  Dtype vector_dtype;
  const int32_t* slots;       // [num_rows]; negative: padding
  const int32_t* cu_seqlens;  // [num_rows + 1]
  int64_t num_tokens;
  int64_t num_rows;
  int64_t num_heads;
};

// Launches on `stream` and returns nullptr, or what the driver refused.
const char* launch_wkv7_prefill(const Wkv7Params& params, void* stream);

}  // namespace albatross
