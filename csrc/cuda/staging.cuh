// From memory to the tensor cores by way of shared memory: asynchronous copies, and matrix fragments read back without bank conflicts.
#pragma once

#include "common.cuh"

namespace albatross {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory without passing through registers; zeros if they are not wanted.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool is_wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(is_wanted ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

// Where piece `piece` of row `row` lies in a buffer of rows of kRowPieces pieces: the pieces of neighbouring rows are
// exchanged so that eight rows' pieces of one column lie in different banks.
template <int kRowPieces>
__device__ __forceinline__ uint32_t place(int row, int piece) {
  return static_cast<uint32_t>(row * kRowPieces + (piece ^ (row % 8))) * 16;
}

}  // namespace albatross
