// What the kernels for matrix products ask of an AMD card: csrc/cuda/mma.cuh's functions, with the same numbers in the same
// lanes. The kernels think in groups of 32 lanes, of which a wave holds one or two.
#pragma once

#include "common.cuh"

namespace albatross {

// What one lane holds of a row of a or a column of b: k = 2t, 2t + 1, 2t + 8, 2t + 9. Every product below takes four such parts
// for its 16 numbers of k, in this order, which is not that of k: both operands have it, so that the sum is the same.
using Part = Packed<__half, 4>;

template <int kWidth>
__device__ __forceinline__ Part read_lane(const Part& part, int lane) {
  return {{__shfl(part.words[0], lane, kWidth), __shfl(part.words[1], lane, kWidth)}};
}

// Adds what a matrix instruction left to d: this lane's rows g and g + 8 of a are in the lanes `source` and `source + 8`, the
// columns 2t and 2t + 1 of b are the instruction's results 2 * pair and 2 * pair + 1.
template <int kWidth, int kResults, typename Results>
__device__ __forceinline__ void add_results(float (&d)[4], const Results& results, int source, int pair) {
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const float upper = __shfl(results[i], source, kWidth), lower = __shfl(results[i], source + 8, kWidth);
    if (i / 2 == pair) d[i % 2] += upper, d[2 + i % 2] += lower;
  }
}

#if defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)

using Sums = float __attribute__((vector_size(16)));

// 16x16 results of x (16 rows) and w (16 columns): lane 16 q + i holds part q of row i and of column i, and of the results the
// rows 4q .. 4q + 3 of column i.
__device__ __forceinline__ Sums multiply_parts(const Part& x, const Part& w) {
  Sums sums = {};
#if defined(__gfx908__) || defined(__gfx90a__)
  // On an MI200 the instructions for fp16 take subnormal numbers for zero (MIOpen's manual, "MI200 MFMA behavior specifics");
  // those for fp32 do not, and products of fp16 numbers are exact in fp32.
  float x_values[4], w_values[4];
  unpack(x, x_values);
  unpack(w, w_values);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums = __builtin_amdgcn_mfma_f32_16x16x4f32(x_values[i], w_values[i], sums, 0, 0, 0);
  return sums;
#else
  using Words = uint32_t __attribute__((vector_size(8)));
  using Halves = _Float16 __attribute__((vector_size(8)));
  const Words x_words = {x.words[0], x.words[1]}, w_words = {w.words[0], w.words[1]};
  return __builtin_amdgcn_mfma_f32_16x16x16f16(
      reinterpret_cast<const Halves&>(x_words), reinterpret_cast<const Halves&>(w_words), sums, 0, 0, 0);
#endif
}

// A wave of 64 lanes multiplies for both of its groups: an instruction takes the columns of both groups' b as its 16 rows and
// one group's a, and each group keeps its half of the results. The instructions take no heed of lanes that are switched off, so
// both groups must be here, as they are in kernels whose blocks are not divided over this call.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 64, group = lane / 32, i = lane % 16, quarter = lane / 16;
  const Part upper = {{a0, a2}}, lower = {{a1, a3}}, column = {{b0, b1}};
  const Part x = read_lane<64>(column, i / 8 * 32 + i % 8 * 4 + quarter);
  Sums sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int source = half * 32 + i % 8 * 4 + quarter;
    const Part first = read_lane<64>(upper, source), second = read_lane<64>(lower, source);
    sums[half] = multiply_parts(x, i < 8 ? first : second);
  }
  Sums own;
#pragma unroll
  for (int j = 0; j < 4; ++j) own[j] = group == 0 ? sums[0][j] : sums[1][j];
  const int g = lane % 32 / 4, t = lane % 4;
  add_results<64, 4>(d, own, group * 32 + t / 2 * 16 + g, t % 2);
}

#elif defined(__GFX11__) && GPU_WAVE == 32

// One instruction, 16x16x16: lanes i and i + 16 both hold row i of x and column i of w. Row m of x is column m / 2 of b, so that
// the eight results of a lane, the rows 2i + lane / 16 of its column, are all eight columns of b.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  using Words = uint32_t __attribute__((vector_size(32)));
  using Halves = _Float16 __attribute__((vector_size(32)));
  using Sums = float __attribute__((vector_size(32)));
  const int lane = threadIdx.x % 32, i = lane % 16;
  const Part upper = {{a0, a2}}, lower = {{a1, a3}}, column = {{b0, b1}};
  Words x = {}, w = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const Part first = read_lane<32>(upper, i % 8 * 4 + part), second = read_lane<32>(lower, i % 8 * 4 + part);
    const Part from_x = read_lane<32>(column, i / 2 * 4 + part), from_w = i < 8 ? first : second;
    x[2 * part] = from_x.words[0], x[2 * part + 1] = from_x.words[1];
    w[2 * part] = from_w.words[0], w[2 * part + 1] = from_w.words[1];
  }
  const Sums sums = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(
      reinterpret_cast<const Halves&>(x), reinterpret_cast<const Halves&>(w), Sums{});
  add_results<32, 8>(d, sums, lane / 4, lane % 4);
}

#else

__device__ __forceinline__ float dot(const Part& x, const Part& y, float sum) {
  float x_values[4], y_values[4];
  unpack(x, x_values);
  unpack(y, y_values);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(x_values[i], y_values[i], sum);
  return sum;
}

// Without matrix instructions every lane fetches the rows and columns of its four sums from the lanes that hold them.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const Part upper = read_lane<32>(Part{{a0, a2}}, g * 4 + part), lower = read_lane<32>(Part{{a1, a3}}, g * 4 + part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Part column = read_lane<32>(Part{{b0, b1}}, (2 * t + i) * 4 + part);
      d[i] = dot(upper, column, d[i]);
      d[2 + i] = dot(lower, column, d[2 + i]);
    }
  }
}

#endif

// 16 bytes of a weight, or zeros. Weights are read once a step: they need not stay in the caches.
__device__ __forceinline__ uint4 load_weight(const void* source, bool is_wanted) {
  using Words = uint32_t __attribute__((vector_size(16)));
  Words words = {};
  if (is_wanted) words = __builtin_nontemporal_load(static_cast<const Words*>(source));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace albatross
