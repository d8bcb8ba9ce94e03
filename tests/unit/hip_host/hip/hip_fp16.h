// The part of HIP's header of the same name that the kernels use, on g++'s own 16-bit floats.
#pragma once

#include "hip_runtime.h"

struct __half {
  _Float16 value;
};
struct __half2 {
  _Float16 x, y;
};
inline float __half2float(__half number) { return static_cast<float>(number.value); }
inline __half __float2half_rn(float number) { return {static_cast<_Float16>(number)}; }
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<_Float16>(x), static_cast<_Float16>(y)}; }
inline __half __ushort_as_half(uint16_t bits) {
  __half number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
