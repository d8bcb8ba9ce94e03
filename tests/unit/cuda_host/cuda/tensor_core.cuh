// Stands in for csrc/cuda/tensor_core.cuh: the same functions, by what the PTX manual says of the instructions there.
#pragma once

#include "mma.cuh"
#include "staging.cuh"

#include <algorithm>

namespace albatross {

using emu::arrive;
using emu::init_barrier;
using emu::reduce_max;
using emu::wait_barrier;

ALWAYS_INLINE void load_matrices(uint32_t (&m)[4], SharedAddress row) { emu::load_matrices(m, row, false); }
inline uint32_t transposed(uint32_t matrix) { return emu::transpose(matrix); }
inline void transpose(const uint32_t (&a)[4], uint32_t (&t)[4]) {
  t[0] = transposed(a[0]), t[1] = transposed(a[2]), t[2] = transposed(a[1]), t[3] = transposed(a[3]);
}
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(d, a[0], a[1], a[2], a[3], b0, b1);
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu::multiply_tf32(d, a, b0, b1); }

// .ftz: subnormal numbers are zeros of their sign.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_of(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal_root(float x) { return 1.0f / std::sqrt(flushed(x)); }
inline float reciprocal(float x) { return flushed(1.0f / flushed(x)); }

ALWAYS_INLINE uint4 load_shared(SharedAddress source) {
  uint4 value;
  emu::load_shared(source, &value, 16);
  return value;
}
ALWAYS_INLINE void store_shared(SharedAddress target, const uint4& value) { emu::store_shared(target, &value, 16); }
ALWAYS_INLINE void store_shared_pair(SharedAddress target, float low, float high) {
  const float pair[2] = {low, high};
  emu::store_shared(target, pair, 8);
}

// max.f16x2 of one number and another's absolute: what is not a number loses.
inline uint32_t larger(uint32_t x, uint32_t y) {
  constexpr uint32_t kLargestNumber = 0x7c00;
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t first = x >> shift & 0xffff, second = y >> shift & 0x7fff;
    const uint32_t one = second > kLargestNumber ? first : first > kLargestNumber ? second : std::max(first, second);
    result |= one << shift;
  }
  return result;
}
inline bool any_of_warp(bool value) { return emu::reduce_max(value) != 0; }

ALWAYS_INLINE uint4 load_global(const void* source) { return *static_cast<const uint4*>(source); }

}  // namespace albatross
