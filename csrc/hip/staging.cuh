// From memory to the matrix instructions by way of shared memory: csrc/cuda/staging.cuh's functions for AMD cards. Copies are
// done when the call is, so there is nothing to commit or to wait for but the block's barrier.
#pragma once

#include "common.cuh"

namespace albatross {

constexpr bool kHasAsyncCopies = false;
using SharedAddress = unsigned char*;

__device__ __forceinline__ SharedAddress address_of(void* pointer) { return static_cast<SharedAddress>(pointer); }

// 16 bytes to shared memory; zeros if they are not wanted.
__device__ __forceinline__ void copy_async(SharedAddress target, const void* source, bool is_wanted) {
  *reinterpret_cast<uint4*>(target) = is_wanted ? *static_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void commit_copies() {}
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {}

// Four matrices 8x8 of fp16 at once: lane 8i + r names the address of row r of matrix i, and lane l gets of matrix i the rows
// 2 (l % 4) and 2 (l % 4) + 1 of column l / 4 in m[i].
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], SharedAddress address) {
  const int lane = threadIdx.x % 32;
  // Rows are looked for by their distance from this lane's own, so that the compiler still sees an address in shared memory.
  const uint32_t own = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    m[i] = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int distance = static_cast<int>(GPU_SHFL(own, i * 8 + lane % 4 * 2 + j) - own);
      const uint32_t number = *reinterpret_cast<const uint16_t*>(address + distance + lane / 4 * 2);
      m[i] |= number << (16 * j);
    }
  }
}

}  // namespace albatross
