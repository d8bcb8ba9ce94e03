// The kernels for matrix products as HIP compiles them, on a block of host threads, against plain loops.
#include <hip/hip_fp16.h>

#include "linear.h"

#include <random>
#include <string>

namespace albatross {
inline namespace linear_sparse_file {
extern thread_local unsigned char buffer[];
alignas(128) thread_local unsigned char buffer[kSharedBytes];  // the kernel's dynamic shared memory
}  // namespace linear_sparse_file
}  // namespace albatross

namespace {

using albatross::Activation;
using albatross::LinearParams;
using albatross::LinearProduct;

std::mt19937 generator(11);

float random_number(float scale) { return std::normal_distribution<float>(0.0f, scale)(generator); }

// One product with room around its rows, which must stay as it is.
struct Case {
  int rows, n, k, x_stride, weight_stride, out_stride;
  bool is_transposed;
  std::vector<__half> x, weight;
  std::vector<float> out;

  Case(int rows_, int n_, int k_, bool is_transposed_, float share)
      : rows(rows_), n(n_), k(k_), x_stride(k_ + 8), weight_stride((is_transposed_ ? n_ : k_) + 8), out_stride(n_ + 3),
        is_transposed(is_transposed_), x(rows_ * x_stride), weight((is_transposed_ ? k_ : n_) * weight_stride),
        out(rows_ * out_stride, -777.0f) {
    for (int i = 0; i < rows * x_stride; ++i) {
      const bool is_zero = std::uniform_real_distribution<float>()(generator) >= share;
      // Past the row's end stands what no sum survives.
      x[i] = __float2half_rn(i % x_stride >= k ? INFINITY : is_zero ? 0.0f : random_number(1.0f));
    }
    for (__half& number : weight) number = __float2half_rn(random_number(generator() % 4 == 0 ? 1e-6f : 0.1f));
  }
  LinearProduct product(Activation activation) {
    return {x.data(), x_stride, weight.data(), weight_stride, out.data(), out_stride, rows, n, k, activation, true};
  }
  void check(float scale, Activation activation, const std::string& name) const {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < out_stride; ++column) {
        double sum = 0.0, size = 1e-30;
        for (int i = 0; i < k && column < n; ++i) {
          const __half w = is_transposed ? weight[i * weight_stride + column] : weight[column * weight_stride + i];
          const double term = double{__half2float(x[row * x_stride + i])} * double{__half2float(w)} * double{scale};
          sum += term, size += std::fabs(term);
        }
        if (activation == Activation::kTanh) sum = std::tanh(sum);
        const double expected = column < n ? sum : -777.0;
        if (!(std::fabs(out[row * out_stride + column] - expected) <= 1e-6 * (size + std::fabs(sum)))) {
          host::fail((name + ": row " + std::to_string(row) + ", column " + std::to_string(column) + " is " +
                      std::to_string(out[row * out_stride + column]) + ", expected " + std::to_string(expected)).c_str());
        }
      }
    }
  }
};

struct Workspace {
  std::vector<float> partials = std::vector<float>(1 << 18, NAN);
  std::vector<int32_t> counters = std::vector<int32_t>(1 << 10);

  albatross::LinearWorkspace view() {
    return {partials.data(), counters.data(), partials.size() * sizeof(float), counters.size()};
  }
  void check() const {
    if (std::any_of(counters.begin(), counters.end(), [](int32_t c) { return c != 0; })) host::fail("a counter was left behind");
  }
};

void require_launched(const char* error) {
  if (error != nullptr) host::fail(error);
}

// Two products at once; more tiles than blocks, so that blocks share tiles.
void check_rows(int rows, int k, int processors) {
  host::processors = processors;
  Case first(rows, 40, k, false, 1.0f), second(rows, 17, k / 2 / 8 * 8, false, 1.0f);
  Workspace workspace;
  LinearParams params{};
  params.num_products = 2;
  params.products[0] = first.product(Activation::kNone);
  params.products[1] = second.product(Activation::kTanh);
  params.scale = 0.5f;
  params.workspace = workspace.view();
  require_launched(albatross::launch_linear_rows(params, nullptr));
  first.check(0.5f, Activation::kNone, "linear_rows");
  second.check(0.5f, Activation::kTanh, "linear_rows");
  workspace.check();
}

void check_sparse(int rows, int n, int k, float share, int processors) {
  host::processors = processors;
  std::memset(albatross::buffer, 0xff, kSharedBytes);  // not a number, whatever reads it
  Case only(rows, n, k, true, share);
  Workspace workspace;
  LinearParams params{};
  params.num_products = 1;
  params.products[0] = only.product(Activation::kNone);
  params.scale = 2.0f;
  params.workspace = workspace.view();
  require_launched(albatross::launch_linear_sparse(params, nullptr));
  only.check(2.0f, Activation::kNone, "linear_sparse");
  workspace.check();
}

}  // namespace

int main() {
  for (const int rows : {1, 8}) {
    check_rows(rows, 328, 3);   // short sums, a tile for each block
    check_rows(rows, 2056, 3);  // tiles shared by two blocks
  }
  check_rows(5, 4360, 2);  // the kernel for long sums
  for (const int rows : {1, 2, 3, 8}) {
    check_sparse(rows, 136, 72, 0.4f, 1);   // one part
    check_sparse(rows, 136, 4104, 0.1f, 3);  // several, and less than a unit at the end of each
  }
  check_sparse(2, 128, 256, 0.0f, 1);  // nothing to read
}
