// The gates of time mixing for one channel, the same in decode (tmix_decode.cu) and around prefill (tmix.cu).
#pragma once

#include "common.cuh"
#include "constants.h"
#include "params.h"

namespace albatross {

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// v moved towards layer 0's v.
__device__ __forceinline__ float gated_value(float v, float v_first, float logit) { return fmaf(v_first - v, sigmoid(logit), v); }

// k (1 + (gate - 1) k_a): the key as the state takes it.
__device__ __forceinline__ float gated_key(float k, float gate, float k_a) { return fmaf(k, (gate - 1.0f) * k_a, k); }

// The square of the length by which kk is divided. Squared, the floor is still a normal number in fp32.
__device__ __forceinline__ float squared_length(float sum_of_squares) { return fmaxf(sum_of_squares, kKkNormEps * kKkNormEps); }

template <typename Io>
__device__ __forceinline__ const Io* begin_of(const Rows& rows, int64_t row) {
  return static_cast<const Io*>(rows.data) + row * rows.stride;
}

}  // namespace albatross
