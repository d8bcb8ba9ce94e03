// AMD's matrix instructions by their layouts, as AMD's matrix instruction calculator and "WMMA on RDNA 3" (gpuopen.com) give them.
#pragma once

namespace host {

using Sums4 = float __attribute__((vector_size(16)));
using Sums8 = float __attribute__((vector_size(32)));
using Halves4 = _Float16 __attribute__((vector_size(8)));
using Halves16 = _Float16 __attribute__((vector_size(32)));

// Rows of a and columns of b, k after k, for all lanes of the wave that this thread belongs to.
inline float matrix_a[1024 / 32][16][16], matrix_b[1024 / 32][16][16];

// A number as the instructions for fp16 see it: on an MI200 a subnormal one is zero.
inline float seen(_Float16 number) {
  const float value = static_cast<float>(number);
#if defined(__gfx90a__)
  if (std::fabs(value) < 0x1p-14f) return 0.0f;
#endif
  return value;
}

}  // namespace host

// v_mfma_f32_16x16x16_f16: lane 16 q + i holds row i of a and column i of b at k = 4q .. 4q + 3, and rows 4q .. 4q + 3 of column i
// of the result. A wave of 64.
inline host::Sums4 __builtin_amdgcn_mfma_f32_16x16x16f16(host::Halves4 a, host::Halves4 b, host::Sums4 sums, int, int, int) {
  const int wave = threadIdx.x / 64, i = threadIdx.x % 16, q = threadIdx.x % 64 / 16;
  for (int e = 0; e < 4; ++e) {
    host::matrix_a[wave][i][4 * q + e] = host::seen(a[e]);
    host::matrix_b[wave][i][4 * q + e] = host::seen(b[e]);
  }
  host::meet(wave * 64, 64);
  for (int e = 0; e < 4; ++e) {
    for (int k = 0; k < 16; ++k) sums[e] = std::fma(host::matrix_a[wave][4 * q + e][k], host::matrix_b[wave][i][k], sums[e]);
  }
  host::meet(wave * 64, 64);
  return sums;
}

// v_mfma_f32_16x16x4_f32: lane 16 k + i holds row i of a and column i of b at k; the result as above.
inline host::Sums4 __builtin_amdgcn_mfma_f32_16x16x4f32(float a, float b, host::Sums4 sums, int, int, int) {
  const int wave = threadIdx.x / 64, i = threadIdx.x % 16, q = threadIdx.x % 64 / 16;
  host::matrix_a[wave][i][q] = a;
  host::matrix_b[wave][i][q] = b;
  host::meet(wave * 64, 64);
  for (int e = 0; e < 4; ++e) {
    for (int k = 0; k < 4; ++k) sums[e] = std::fma(host::matrix_a[wave][4 * q + e][k], host::matrix_b[wave][i][k], sums[e]);
  }
  host::meet(wave * 64, 64);
  return sums;
}

// v_wmma_f32_16x16x16_f16: lanes i and i + 16 both hold row i of a and column i of b, whole; lane i + 16 h holds rows 2e + h of
// column i of the result. A wave of 32.
inline host::Sums8 __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(host::Halves16 a, host::Halves16 b, host::Sums8 sums) {
  const int wave = threadIdx.x / 32, i = threadIdx.x % 16, h = threadIdx.x % 32 / 16;
  if (h == 0) {
    for (int k = 0; k < 16; ++k) host::matrix_a[wave][i][k] = host::seen(a[k]), host::matrix_b[wave][i][k] = host::seen(b[k]);
  }
  host::meet(wave * 32, 32);
  for (int k = 0; k < 16; ++k) {
    const bool is_same = host::matrix_a[wave][i][k] == host::seen(a[k]) && host::matrix_b[wave][i][k] == host::seen(b[k]);
    if (!is_same) host::fail("the two halves of a wave hold different operands");
  }
  for (int e = 0; e < 8; ++e) {
    for (int k = 0; k < 16; ++k) sums[e] = std::fma(host::matrix_a[wave][2 * e + h][k], host::matrix_b[wave][i][k], sums[e]);
  }
  host::meet(wave * 32, 32);
  return sums;
}
