// What the params structs of several kernels share. No torch and no CUDA header, so that any compiler reads it.
#pragma once

#include <cstdint>

namespace albatross {

enum class Dtype { kFloat16, kFloat32 };

// A matrix [T, C] that is read: neighbours in a row are neighbours in memory, rows are `stride` elements apart. Null: not given.
struct Rows {
  const void* data;
  int64_t stride;
};

}  // namespace albatross
