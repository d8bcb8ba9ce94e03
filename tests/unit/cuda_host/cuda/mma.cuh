// Stands in for csrc/cuda/mma.cuh: its product, by what the PTX manual says of the instruction there.
#pragma once

#include "common.cuh"

namespace albatross {

inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3};
  emu::multiply(d, a, b0, b1);
}

}  // namespace albatross
