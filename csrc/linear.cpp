// From tensors to pointers for the matrix products: checks, device guard, current stream, launch. Called through bindings.cpp.
#include "cuda/linear.h"

#include "checks.h"
#include "ops.h"
#include "stream.h"

namespace albatross {
namespace {

// The workspace's first numbers are counters, the rest partial sums.
constexpr int64_t kNumCounters = 1 << 16;

void check_matrix(const char* op, const char* name, const Tensor& x, const Tensor& like, const std::string& expected) {
  const bool is_good = x.dim() == 2 && x.scalar_type() == ScalarType::Half && x.is_cuda() && x.get_device() == like.get_device() &&
                       (x.size(1) == 1 || x.stride(1) == 1) && (x.size(0) <= 1 || x.stride(0) % 8 == 0);
  if (!is_good) refuse(op, name, expected, x);
  check_alignment(op, name, x);
}

LinearProduct checked_product(const char* op, const Tensor& x, const Tensor& weight, const Tensor& out, int64_t activation,
                              bool is_transposed) {
  check_matrix(op, "x", x, x, "float16 [T, K] on a CUDA card, rows a multiple of 8 numbers apart");
  const std::string shape = is_transposed ? "[K, N]" : "[N, K]";
  check_matrix(op, "weight", weight, x, "float16 " + shape + " on the device of x, rows a multiple of 8 numbers apart");
  const int64_t k = weight.size(is_transposed ? 0 : 1), n = weight.size(is_transposed ? 1 : 0);
  if (k != x.size(1) || k % 8 != 0 || (is_transposed && n % 8 != 0)) {
    refuse(op, "weight", "float16 " + shape + " with K = " + std::to_string(x.size(1)) + ", sizes multiples of 8", weight);
  }
  const bool is_good = out.dim() == 2 && is_float(out) && out.size(0) == x.size(0) && out.size(1) == n && out.is_cuda() &&
                       out.get_device() == x.get_device() && (n == 1 || out.stride(1) == 1);
  if (!is_good) {
    refuse(op, "out", "float16 or float32 [T, N] = [" + std::to_string(x.size(0)) + ", " + std::to_string(n) + "] on the device of x",
           out);
  }
  if (activation < 0 || activation > static_cast<int64_t>(Activation::kSquaredRelu)) {
    throw std::runtime_error(std::string(op) + ": activation must be 0 to 3, found " + std::to_string(activation));
  }
  LinearProduct product{};
  product.x = x.data_ptr();
  product.x_stride = x.stride(0);
  product.weight = weight.data_ptr();
  product.weight_stride = weight.stride(0);
  product.out = out.data_ptr();
  product.out_stride = out.stride(0);
  product.num_rows = static_cast<int32_t>(x.size(0));
  product.n = static_cast<int32_t>(n);
  product.k = static_cast<int32_t>(k);
  product.activation = static_cast<Activation>(activation);
  product.is_out_float = out.scalar_type() == ScalarType::Float;
  return product;
}

LinearWorkspace checked_workspace(const char* op, const Tensor& workspace, const Tensor& x) {
  const bool is_good = workspace.dim() == 1 && workspace.scalar_type() == ScalarType::Int && workspace.is_contiguous() &&
                       workspace.is_cuda() && workspace.get_device() == x.get_device() && workspace.size(0) >= kNumCounters;
  if (!is_good) refuse(op, "workspace", "contiguous int32 [at least " + std::to_string(kNumCounters) + "] on the device of x", workspace);
  check_alignment(op, "workspace", workspace);
  int32_t* const counters = static_cast<int32_t*>(workspace.data_ptr());
  return {reinterpret_cast<float*>(counters + kNumCounters), counters,
          static_cast<size_t>(workspace.size(0) - kNumCounters) * sizeof(float), static_cast<size_t>(kNumCounters)};
}

void require_launched(const char* op, const char* error) {
  if (error != nullptr) throw std::runtime_error(std::string(op) + ": the launch failed: " + error);
}

}  // namespace

void grouped_linear(std::vector<Tensor> x, std::vector<Tensor> weight, std::vector<int64_t> activation,
                    const Tensor& workspace, std::vector<Tensor> out) {
  constexpr const char* op = "grouped_linear";
  if (x.empty() || x.size() > kMaxProducts || weight.size() != x.size() || activation.size() != x.size() || out.size() != x.size()) {
    throw std::runtime_error(std::string(op) + ": x, weight, activation and out must be lists of 1 to " + std::to_string(kMaxProducts) +
                             " entries each, found " + std::to_string(x.size()) + ", " + std::to_string(weight.size()) + ", " +
                             std::to_string(activation.size()) + " and " + std::to_string(out.size()));
  }
  LinearParams params{};
  params.num_products = static_cast<int32_t>(x.size());
  params.scale = 1.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    params.products[i] = checked_product(op, x[i], weight[i], out[i], activation[i], false);
  }
  params.workspace = checked_workspace(op, workspace, x[0]);
  const DeviceGuard guard(x[0].get_device());
  void* const stream = current_stream(x[0].get_device());
  require_launched(op, launch_linear_rows(params, stream));
}

void sparse_linear(const Tensor& x, const Tensor& weight, double scale, const Tensor& workspace, const Tensor& out) {
  constexpr const char* op = "sparse_linear";
  LinearParams params{};
  params.num_products = 1;
  params.products[0] = checked_product(op, x, weight, out, 0, true);
  params.scale = static_cast<float>(scale);
  params.workspace = checked_workspace(op, workspace, x);
  const DeviceGuard guard(x.get_device());
  void* const stream = current_stream(x.get_device());
  require_launched(op, launch_linear_sparse(params, stream));
}

}  // namespace albatross
