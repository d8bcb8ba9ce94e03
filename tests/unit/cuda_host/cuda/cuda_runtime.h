// A stand-in for CUDA's header: what the kernels use of it, by way of the emulator. Approximate functions are exact here, but for
// what the PTX manual says of their limits.
#pragma once

#include "emulator.h"

#include <cmath>
#include <cstring>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define __host__
#define __device__
#define __global__
#define __shared__  // the dynamic part, declared `extern` by a kernel and defined by the program that runs it
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ ALWAYS_INLINE
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx emu::thread_index()
#define blockIdx emu::block_index()
#define gridDim emu::grid_size()
#define __trap() emu::fail("the kernel stopped itself")
#define __syncthreads() emu::sync_threads()
#define __syncwarp() emu::sync_warp()

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Types that a card moves by one instruction, of all their bytes: a copy is one access.
#define VECTOR(Type)                                                                                             \
  Type() = default;                                                                                              \
  ALWAYS_INLINE Type(const Type& other) { emu::copy(this, &other, sizeof(Type)); }                               \
  ALWAYS_INLINE Type& operator=(const Type& other) {                                                             \
    emu::copy(this, &other, sizeof(Type));                                                                       \
    return *this;                                                                                                \
  }
#define VECTOR_OF_2(Type, Number)                                                                                \
  struct alignas(8) Type {                                                                                       \
    Number x, y;                                                                                                 \
    VECTOR(Type)                                                                                                 \
  };                                                                                                             \
  ALWAYS_INLINE Type make_##Type(Number x, Number y) {                                                           \
    Type vector;                                                                                                 \
    vector.x = x, vector.y = y;                                                                                  \
    return vector;                                                                                               \
  }
#define VECTOR_OF_4(Type, Number)                                                                                \
  struct alignas(16) Type {                                                                                      \
    Number x, y, z, w;                                                                                           \
    VECTOR(Type)                                                                                                 \
  };                                                                                                             \
  ALWAYS_INLINE Type make_##Type(Number x, Number y, Number z, Number w) {                                       \
    Type vector;                                                                                                 \
    vector.x = x, vector.y = y, vector.z = z, vector.w = w;                                                      \
    return vector;                                                                                               \
  }
VECTOR_OF_2(float2, float)
VECTOR_OF_4(float4, float)
VECTOR_OF_2(uint2, uint32_t)
VECTOR_OF_4(uint4, uint32_t)

template <typename T>
ALWAYS_INLINE T __ldg(const T* source) {
  return *source;
}
template <typename T>
ALWAYS_INLINE void __stwb(T* target, const T& value) {
  *target = value;
}

inline int min(int x, int y) { return x < y ? x : y; }  // by value, as CUDA's
inline uint32_t __float_as_uint(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
// Where 2^126 < |y| < 2^128 the quotient is zero.
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::isfinite(y) ? x * 0.0f : x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace emu {

inline float shuffled(unsigned mask, float value, int source_lane) {
  if (mask != 0xffffffffu) fail("a shuffle of part of a warp");
  return __uint_as_float(shuffle(__float_as_uint(value), source_lane));
}
inline int shuffled(unsigned mask, int value, int source_lane) {
  if (mask != 0xffffffffu) fail("a shuffle of part of a warp");
  return static_cast<int>(shuffle(static_cast<uint32_t>(value), source_lane));
}
inline int lane_index() { return static_cast<int>(thread_index().x % kWarp); }

}  // namespace emu

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emu::shuffled(mask, value, lane % emu::kWarp);
}
inline uint32_t __ballot_sync(unsigned mask, bool value) {
  if (mask != 0xffffffffu) emu::fail("a ballot of part of a warp");
  return emu::reduce_or(static_cast<uint32_t>(value) << emu::lane_index());
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emu::shuffled(mask, value, emu::lane_index() ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = emu::lane_index();
  return emu::shuffled(mask, value, lane < distance ? lane : lane - distance);
}
