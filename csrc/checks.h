// Refusals of wrong arguments: each says op, argument, expected and found, in the words python/albatross/ops/wkv7.py uses for
// CPU tensors. Used by the functions of ops.h before anything touches the device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace albatross {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "type " + std::to_string(static_cast<int>(type));
  }
}

inline std::string list(const Tensor& x, int64_t (Tensor::*entry)(int64_t) const) {
  std::string text = "[";
  for (int64_t i = 0; i < x.dim(); ++i) text += (i ? ", " : "") + std::to_string((x.*entry)(i));
  return text + "]";
}

inline std::string device_name(const Tensor& x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device()) : x.is_cpu() ? "cpu" : "another device";
}

inline std::string describe(const Tensor& x) {
  return dtype_name(x.scalar_type()) + " " + list(x, &Tensor::size) + " with strides " + list(x, &Tensor::stride) + " on " +
         device_name(x);
}

[[noreturn]] inline void refuse(const char* op, const char* name, const std::string& expected, const Tensor& found) {
  throw std::runtime_error(std::string(op) + ": " + name + " must be " + expected + ", found " + describe(found));
}

inline bool is_float(const Tensor& x) {
  return x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::Float;
}

inline bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  if (x.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t i = 0;
  for (const int64_t size : shape) {
    if (x.size(i++) != size) return false;
  }
  return true;
}

// A contiguous tensor of one type and shape on the device of `like`; `letters` names the shape's sizes.
inline void check_tensor(const char* op, const char* name, const Tensor& x, ScalarType type, std::initializer_list<int64_t> shape,
                         const char* letters, const Tensor& like) {
  const bool is_good = x.scalar_type() == type && has_shape(x, shape) && x.is_contiguous() && x.is_cuda() &&
                       x.get_device() == like.get_device();
  if (is_good) return;
  std::string sizes;
  for (const int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  refuse(op, name, "contiguous " + dtype_name(type) + " " + letters + " = [" + sizes + "] on " + device_name(like), x);
}

// The kernels move 16 bytes at a time.
inline void check_alignment(const char* op, const char* name, const Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  if (address % 16 == 0) return;
  throw std::runtime_error(std::string(op) + ": " + name + " must begin at a multiple of 16 bytes, found an offset of " +
                           std::to_string(address % 16) + " bytes: pass a copy of the view");
}

}  // namespace albatross
