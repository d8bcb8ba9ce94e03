// From memory to the tensor cores by way of shared memory: asynchronous copies, and matrix fragments read back. csrc/hip has a
// file of the same name.
#pragma once

#include "common.cuh"

namespace albatross {

constexpr bool kHasAsyncCopies = true;
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress address_of(const void* shared) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared));
}

// 16 bytes to shared memory without passing through registers; zeros if they are not wanted.
__device__ __forceinline__ void copy_async(SharedAddress target, const void* source, bool is_wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(is_wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane 8 i + j names row j of matrix i, and lane 4 g + t gets of each column g, rows 2t and
// 2t + 1.
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

}  // namespace albatross
