// What the kernels for matrix products of few rows take: out = activation(scale * x W^T), one or several products at once.
// No torch and no CUDA header. All strides are in elements; matrices are fp16, sums fp32. K and all strides are multiples of 8.
#pragma once

#include <cstddef>
#include <cstdint>

namespace albatross {

enum class Activation : int32_t { kNone, kTanh, kSigmoid, kSquaredRelu };

constexpr int kMaxProducts = 32;

struct LinearProduct {
  const void* x;  // [T, K] fp16
  int64_t x_stride;
  const void* weight;  // [N, K] fp16, or [K, N] where the kernel says so
  int64_t weight_stride;
  void* out;  // [T, N] fp16 or fp32
  int64_t out_stride;
  int32_t num_rows;  // T
  int32_t n;
  int32_t k;
  Activation activation;
  bool is_out_float;
};

// Where the partial sums of tiles that several blocks share go. `counters` are zero before and after every launch.
struct LinearWorkspace {
  float* partials;
  int32_t* counters;
  size_t partials_bytes;
  size_t num_counters;
};

struct LinearParams {
  LinearProduct products[kMaxProducts];
  int32_t num_products;
  float scale;
  LinearWorkspace workspace;
  // Filled by the launchers: tiles and units of work before each product, and one past the last.
  int32_t tile_begin[kMaxProducts + 1];
  int32_t unit_begin[kMaxProducts + 1];
};

// Each launches on `stream` and returns nullptr, or why not.
// At most 8 rows each; any N, K multiples of 8.
const char* launch_linear_rows(LinearParams params, void* stream);
// One product of at most kSparseRows rows whose x is mostly zero, weight [K, N]: rows of the weight are read only where x is not.
constexpr int kSparseRows = 8;
const char* launch_linear_sparse(LinearParams params, void* stream);

}  // namespace albatross
