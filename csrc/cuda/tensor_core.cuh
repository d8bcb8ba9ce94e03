// What a warp asks of the tensor cores by way of shared memory, and barriers between warps. CUDA alone: csrc/hip has no twin,
// since the kernels that include this are not built there.
#pragma once

#include "mma.cuh"
#include "staging.cuh"

namespace albatross {

// As load_transposed, but lane 4 g + t gets of each matrix row g, columns 2t and 2t + 1.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
// One 8x8 matrix that lies over the warp's registers.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// A 16x16 operand a, transposed.
__device__ __forceinline__ void transpose(const uint32_t (&a)[4], uint32_t (&t)[4]) {
  t[0] = transposed(a[0]), t[1] = transposed(a[2]), t[2] = transposed(a[1]), t[3] = transposed(a[3]);
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(d, a[0], a[1], a[2], a[3], b0, b1);
}

// d += a b for a 16x8 and b 8x8 of TF32, fp32 numbers whose last 13 bits are zero: PTX mma.m16n8k8. Lane 4 g + t has of a rows g
// and g + 8 of column t, then of column t + 4; of b column g of rows t and t + 4; of d what `mma` leaves.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint4 load_shared(SharedAddress source) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(source) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(SharedAddress target, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared_pair(SharedAddress target, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(target), "f"(low), "f"(high) : "memory");
}

// The largest over a warp, in all of its lanes.
__device__ __forceinline__ uint32_t reduce_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

// Of each pair of halves the larger: x, which is not negative, or the absolute of y. What is not a number loses.
__device__ __forceinline__ uint32_t larger(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("{ .reg .b32 size; abs.f16x2 size, %2; max.f16x2 %0, %1, size; }" : "=r"(result) : "r"(x), "r"(y));
  return result;
}
__device__ __forceinline__ bool any_of_warp(bool value) { return __any_sync(0xffffffffu, value); }

// 16 bytes that nothing writes meanwhile. Issued where it stands.
__device__ __forceinline__ uint4 load_global(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source));
  return v;
}

// mbarriers: objects in shared memory that count arrivals and change their parity with the last. What was written before an
// arrival is seen after the wait for it.
__device__ __forceinline__ void init_barrier(SharedAddress barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(SharedAddress barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool has_parity_passed(SharedAddress barrier, int parity) {
  uint32_t is_done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(is_done) : "r"(barrier), "r"(parity) : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(is_done) : "r"(barrier), "r"(parity) : "memory");
#endif
  return is_done != 0;
}
__device__ __forceinline__ void wait_barrier(SharedAddress barrier, int parity) {
  while (!has_parity_passed(barrier, parity)) {}
}

}  // namespace albatross
