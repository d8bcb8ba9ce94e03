// What the kernels for matrix products ask of the tensor cores and of the way to them. csrc/hip has a file of the same name.
#pragma once

#include "common.cuh"

namespace albatross {

// d += a b for a 16x16 (row-major) and b 16x8, fp16 operands, fp32 sums: PTX mma.m16n8k16. Lane 4g + t holds of a the rows g and
// g + 8, of b the column g, at k = 2t, 2t + 1, 2t + 8, 2t + 9; of d the rows g and g + 8 at columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes of a weight, or zeros. Weights are read once a step: they must not push other lines out of the L1 cache, and memory
// is read in runs of 256 bytes (on an H200 7 to 10 % faster than without the hint).
__device__ __forceinline__ uint4 load_weight(const void* source, bool is_wanted) {
  uint4 value;
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.b32 wanted, %5, 0;\n"
      "  mov.b32 %0, 0;\n  mov.b32 %1, 0;\n  mov.b32 %2, 0;\n  mov.b32 %3, 0;\n"
      "  @wanted ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(source), "r"(static_cast<int>(is_wanted)));
  return value;
}

}  // namespace albatross
