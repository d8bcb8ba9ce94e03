// Shared by all kernels: vector loads and stores that convert to float, lane reductions, and the few names that differ
// between CUDA and HIP. No torch header; kernels include this and their own params header, nothing else.
#pragma once

#include <cstdint>

#if defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
using gpu_stream_t = hipStream_t;
#if defined(__AMDGCN__) && __AMDGCN_WAVEFRONT_SIZE == 32
#define GPU_WAVE 32
#else
#define GPU_WAVE 64
#endif
#define GPU_API(name) hip##name
#define GPU_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, albatross::waves_per_unit((threads) * (blocks)))
#define GPU_TRAP() __builtin_trap()
#define GPU_STORE(target, value) (*(target) = (value))
#define GPU_LOAD_L2(source) albatross::load_from_l2(source)
#define GPU_PREFETCH(address) static_cast<void>(address)
#define GPU_FLOAT_TO_UINT(value) albatross::float_to_uint(value)
#define GPU_SHFL(value, lane) __shfl(value, lane, 32)
#define GPU_SHFL_XOR(value, lane_mask) __shfl_xor(value, lane_mask, 32)
#define GPU_SHFL_UP(value, distance) __shfl_up(value, distance, 32)
#define GPU_BALLOT(value) static_cast<uint32_t>(__ballot(value) >> (__lane_id() & 32))
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
using gpu_stream_t = cudaStream_t;
#define GPU_API(name) cuda##name
#define GPU_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)  // blocks that a multiprocessor is to hold
#define GPU_TRAP() __trap()
#define GPU_STORE(target, value) __stwb(target, value)  // an assignment may be compiled to a store for each member
#define GPU_LOAD_L2(source) __ldcg(source)  // what another block wrote: the L1 cache may hold what was there before
#define GPU_PREFETCH(address) asm volatile("prefetch.global.L2 [%0];" ::"l"(address))  // its 128 bytes, into the L2 cache
#define GPU_FLOAT_TO_UINT(value) __float2uint_rz(value)  // towards zero; saturates, and not a number becomes zero
#define GPU_SHFL(value, lane) __shfl_sync(0xffffffffu, value, lane)
#define GPU_SHFL_XOR(value, lane_mask) __shfl_xor_sync(0xffffffffu, value, lane_mask)
#define GPU_SHFL_UP(value, distance) __shfl_up_sync(0xffffffffu, value, distance)
#define GPU_BALLOT(value) __ballot_sync(0xffffffffu, value)
#endif

namespace albatross {

// nullptr if the launch before this call was accepted. Never waits for the device.
inline const char* launch_error() {
  const GPU_API(Error_t) error = GPU_API(GetLastError)();
  return error == GPU_API(Success) ? nullptr : GPU_API(GetErrorString)(error);
}

#if defined(__HIP__) || defined(__HIPCC__)
// HIP's launch bounds count the waves of each of a compute unit's four SIMD units.
constexpr int waves_per_unit(int threads) { return threads < 4 * GPU_WAVE ? 1 : threads / (4 * GPU_WAVE); }

template <typename T>
__device__ __forceinline__ T load_from_l2(const T* source) {
  T value;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 4; ++i) {
    reinterpret_cast<uint32_t*>(&value)[i] = __hip_atomic_load(
        reinterpret_cast<const uint32_t*>(source) + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  return value;
}

// A conversion beyond the range of the integer would be undefined.
__device__ __forceinline__ uint32_t float_to_uint(float value) {
  return value >= 4294967296.0f ? ~0u : value > 0.0f ? static_cast<uint32_t>(value) : 0u;
}
#endif

// N consecutive numbers as they lie in memory, so that a load can be under way long before it is converted.
template <typename T, int N>
struct Packed {
  static constexpr int kWords = N * sizeof(T) / 4;
  static_assert(N * sizeof(T) == 8 || N * sizeof(T) % 16 == 0, "moved in 8 or 16 bytes at a time");
  uint32_t words[kWords];
};

template <typename T, int N>
__device__ __forceinline__ Packed<T, N> load_packed(const T* source) {
  Packed<T, N> packed;
  if constexpr (Packed<T, N>::kWords == 2) {
    const uint2 part = *reinterpret_cast<const uint2*>(source);
    packed.words[0] = part.x, packed.words[1] = part.y;
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; i += 4) {
      const uint4 part = reinterpret_cast<const uint4*>(source)[i / 4];
      packed.words[i] = part.x, packed.words[i + 1] = part.y, packed.words[i + 2] = part.z, packed.words[i + 3] = part.w;
    }
  }
  return packed;
}

// What no kernel writes: such a load need not wait for the stores before it.
template <typename T, int N>
__device__ __forceinline__ Packed<T, N> load_constant(const T* source) {
  Packed<T, N> packed;
  if constexpr (Packed<T, N>::kWords == 2) {
    const uint2 part = __ldg(reinterpret_cast<const uint2*>(source));
    packed.words[0] = part.x, packed.words[1] = part.y;
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; i += 4) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(source) + i / 4);
      packed.words[i] = part.x, packed.words[i + 1] = part.y, packed.words[i + 2] = part.z, packed.words[i + 3] = part.w;
    }
  }
  return packed;
}

// To global memory.
template <typename T, int N>
__device__ __forceinline__ void store_packed(T* target, const Packed<T, N>& packed) {
  if constexpr (Packed<T, N>::kWords == 2) {
    GPU_STORE(reinterpret_cast<uint2*>(target), make_uint2(packed.words[0], packed.words[1]));
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::kWords; i += 4) {
      GPU_STORE(reinterpret_cast<uint4*>(target) + i / 4,
                make_uint4(packed.words[i], packed.words[i + 1], packed.words[i + 2], packed.words[i + 3]));
    }
  }
}

template <int N>
__device__ __forceinline__ void unpack(const Packed<float, N>& packed, float* values) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = __uint_as_float(packed.words[i]);
}

template <int N>
__device__ __forceinline__ void unpack(const Packed<__half, N>& packed, float* values) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&packed.words[i / 2]));
    values[i] = pair.x, values[i + 1] = pair.y;
  }
}

template <int N>
__device__ __forceinline__ void pack(const float* values, Packed<float, N>& packed) {
#pragma unroll
  for (int i = 0; i < N; ++i) packed.words[i] = __float_as_uint(values[i]);
}

template <int N>
__device__ __forceinline__ void pack(const float* values, Packed<__half, N>& packed) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
    packed.words[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ void assign(float& target, float value) { target = value; }
__device__ __forceinline__ void assign(__half& target, float value) { target = __float2half_rn(value); }

// Sum over kLanes neighbouring lanes (a power of two that divides the warp), the same in each of them; of every kStep-th lane
// where the lanes between hold the same number.
template <int kLanes, int kStep = 1>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int mask = kStep; mask < kLanes; mask *= 2) value += GPU_SHFL_XOR(value, mask);
  return value;
}

}  // namespace albatross
