// Refusals of wrong arguments: each says op, argument, expected and found, in the words python/albatross/ops/_checks.py uses for
// CPU tensors. Used by the functions of ops.h before anything touches the device.
#pragma once

#include "constants.h"
#include "cuda/params.h"
#include "tensor.h"

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace albatross {

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

inline Dtype dtype_of(const Tensor& x) { return x.scalar_type() == ScalarType::Half ? Dtype::kFloat16 : Dtype::kFloat32; }

inline std::string list_sizes(std::initializer_list<int64_t> shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
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
  refuse(op, name, "contiguous " + dtype_name(type) + " " + letters + " = " + list_sizes(shape) + " on " + device_name(like), x);
}

// The kernels move 16 bytes at a time.
inline void check_alignment(const char* op, const char* name, const Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  if (address % 16 == 0) return;
  throw std::runtime_error(std::string(op) + ": " + name + " must begin at a multiple of 16 bytes, found an offset of " +
                           std::to_string(address % 16) + " bytes: pass a copy of the view");
}

// As check_tensor, and 16-byte aligned.
inline void* checked_data(const char* op, const char* name, const Tensor& x, ScalarType type,
                          std::initializer_list<int64_t> shape, const char* letters, const Tensor& like) {
  check_tensor(op, name, x, type, shape, letters, like);
  check_alignment(op, name, x);
  return x.data_ptr();
}

// The first tensor of an op that has rows: [T, C] of either type, C a multiple of the head size.
inline void check_leading_rows(const char* op, const char* name, const Tensor& x) {
  const bool is_good = x.is_cuda() && is_float(x) && x.dim() == 2 && x.size(1) % kHeadSize == 0;
  if (!is_good) refuse(op, name, "float16 or float32 [T, C] with C a multiple of 64, on a CUDA card", x);
}

// Rows that begin at multiples of 16 bytes, any such distance apart.
inline Rows checked_rows(const char* op, const char* name, const Tensor& x, ScalarType type, std::initializer_list<int64_t> shape,
                         const char* letters, const Tensor& like) {
  const bool is_good = x.scalar_type() == type && has_shape(x, shape) && x.stride(1) == 1 &&
                       (x.size(0) <= 1 || x.stride(0) % 8 == 0) && x.is_cuda() && x.get_device() == like.get_device();
  if (!is_good) {
    const std::string what = dtype_name(type) + " " + letters + " = " + list_sizes(shape) + " on " + device_name(like);
    refuse(op, name, what + ", rows a multiple of 8 numbers apart", x);
  }
  check_alignment(op, name, x);
  return {x.data_ptr(), x.stride(0)};
}

// A pool of wkv states, [S, H, 64 value, 64 key], any 16-byte distance from slot to slot.
inline void check_state(const char* op, const Tensor& state) {
  constexpr int64_t n = kHeadSize;
  const bool is_good = state.is_cuda() && is_float(state) && state.dim() == 4 && state.size(2) == n && state.size(3) == n &&
                       (state.size(1) == 1 || state.stride(1) == n * n) && state.stride(2) == n && state.stride(3) == 1;
  if (!is_good) refuse(op, "state", "float16 or float32 [S, H, 64, 64], contiguous within a slot", state);
  const int64_t unit = dtype_of(state) == Dtype::kFloat16 ? 8 : 4;
  if (state.stride(0) % unit != 0) refuse(op, "state", "strided by a multiple of 16 bytes from slot to slot", state);
  check_alignment(op, "state", state);
}

}  // namespace albatross
