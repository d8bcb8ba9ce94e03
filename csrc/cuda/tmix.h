// What the kernels of time mixing take, besides norms (norm.h) and the recurrence over sequences (wkv7.h). No torch and no CUDA
// header. Matrices are [num_tokens, num_heads * 64] of `dtype`; constants are fp32. Pointers are on the device, 16-byte aligned,
// and so is every row.
#pragma once

#include "params.h"

#include <cstdint>

namespace albatross {

// Raw products of the mixed inputs: w, a and v_gate are without their biases. v_gate and v_first are null in layer 0.
struct TmixProducts {
  Rows k, v, w, a, v_gate, v_first;
};

struct TmixConstants {
  const float* w0;  // [C] each; v0 is null where v_gate is
  const float* a0;
  const float* v0;
  const float* k_k;
  const float* k_a;
};

struct TmixReadout {
  const float* r_k;        // [H, 64]
  const float* ln_weight;  // [C]
  const float* ln_bias;    // [C]
};

struct TmixDecodeParams {
  void* state;  // [S, H, 64 value, 64 key], slots state_stride elements apart, contiguous within one
  int64_t state_stride;
  int64_t num_slots;
  Dtype state_dtype;
  TmixProducts products;
  Rows r, g;
  TmixConstants constants;
  TmixReadout readout;
  const int32_t* slots;  // [num_tokens]; negative: padding
  void* out;
  int64_t out_stride;
  Dtype dtype;
  int64_t num_tokens;
  int64_t num_heads;
};

struct TmixPrefillParams {
  void* state;  // as in TmixDecodeParams
  int64_t state_stride;
  int64_t num_slots;
  Dtype state_dtype;
  TmixProducts products;  // fp16
  Rows r, g;
  TmixConstants constants;
  TmixReadout readout;
  const int32_t* slots;       // [num_rows]; negative: padding
  const int32_t* cu_seqlens;  // [num_rows + 1]
  void* out;
  int64_t out_stride;
  float* segments;  // [num_segments, num_heads, 2, 64, 64]: into so many long rows may be split in all; null where it is 0
  int64_t num_segments;
  int64_t num_tokens;
  int64_t num_rows;
  int64_t num_heads;
};

struct TmixPrepareParams {
  TmixProducts products;
  TmixConstants constants;
  void* outputs[5];  // w, k, v, -kk, kk * a gate: contiguous
  Dtype dtype;
  int64_t num_tokens;
  int64_t num_heads;
};

struct TmixReadoutParams {
  Rows y, r, k, v, g;
  TmixReadout readout;
  void* out;
  int64_t out_stride;
  Dtype dtype;
  int64_t num_tokens;
  int64_t num_heads;
};

struct SquaredReluParams {
  void* x;
  int64_t numel;
  Dtype dtype;
};

// All launch on `stream` and return nullptr, or what the driver refused.
const char* launch_tmix_decode(const TmixDecodeParams& params, void* stream);
const char* launch_tmix_prefill(const TmixPrefillParams& params, void* stream);
const char* launch_tmix_prepare(const TmixPrepareParams& params, void* stream);
const char* launch_tmix_readout(const TmixReadoutParams& params, void* stream);
const char* launch_squared_relu(const SquaredReluParams& params, void* stream);

}  // namespace albatross
