// What the ops need of torch, in the words both lanes share: Tensor, ScalarType, DeviceGuard. Lane S takes them from LibTorch's
// stable ABI, which one library meets in every later torch; lane C (ALBATROSS_CLASSIC_ABI) from the C++ classes of the one torch
// it is built for, also of those before 2.10. Beside this header only bindings.cpp (S) and classic/module.cpp (C) know their lane.
#pragma once

#ifdef ALBATROSS_CLASSIC_ABI

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>

namespace albatross {

using c10::ScalarType;
using Tensor = at::Tensor;

class DeviceGuard {
 public:
  explicit DeviceGuard(int64_t index) : guard_(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))) {}

 private:
  const c10::DeviceGuard guard_;
};

}  // namespace albatross

#else

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

namespace albatross {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

}  // namespace albatross

#endif
