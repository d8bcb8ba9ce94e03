// fp16 of CUDA's header, as far as the kernels use it.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};
struct alignas(4) __half2 {
  _Float16 x, y;
  VECTOR(__half2)
};
inline float __half2float(__half number) { return static_cast<float>(number.value); }
inline __half __float2half_rn(float number) { return {static_cast<_Float16>(number)}; }
ALWAYS_INLINE __half2 __floats2half2_rn(float x, float y) {
  __half2 pair;
  pair.x = static_cast<_Float16>(x), pair.y = static_cast<_Float16>(y);
  return pair;
}
ALWAYS_INLINE float2 __half22float2(const __half2& pair) {
  const __half2 own = pair;
  return make_float2(static_cast<float>(own.x), static_cast<float>(own.y));
}
