// Shared by the kernels for matrix products: which product is a block's, and the end of a sum.
#pragma once

#include "common.cuh"
#include "constants.h"
#include "linear.h"

#include <mma.cuh>  // the order of the include path chooses between csrc/cuda and csrc/hip

namespace albatross {

__device__ __forceinline__ float activate(float value, Activation activation) {
  if (activation == Activation::kTanh) return tanhf(value);
  if (activation == Activation::kSigmoid) return __fdividef(1.0f, 1.0f + __expf(-value));
  if (activation == Activation::kSquaredRelu) {
    const float root = fminf(fmaxf(value, 0.0f), kCmixBound) * kCmixScale;
    return root * root;
  }
  return value;
}

__device__ __forceinline__ void write_out(const LinearProduct& p, float scale, int row, int column, float sum) {
  const float value = activate(sum * scale, p.activation);
  const int64_t place = row * p.out_stride + column;
  if (p.is_out_float) {
    static_cast<float*>(p.out)[place] = value;
  } else {
    static_cast<__half*>(p.out)[place] = __float2half_rn(value);
  }
}

// The product that owns `index`, by the products' first indices.
__device__ __forceinline__ int find_product(const int32_t (&begin)[kMaxProducts + 1], int num_products, int index) {
  int product = 0;
#pragma unroll
  for (int step = kMaxProducts / 2; step > 0; step /= 2) {
    if (product + step < num_products && index >= begin[product + step]) product += step;
  }
  return product;
}

}  // namespace albatross
