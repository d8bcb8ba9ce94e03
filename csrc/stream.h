// The stream torch works on at this moment, so that every op is ordered with its neighbours and can be captured in a graph.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <stdexcept>

// torch declares it only in its CUDA build's headers. Weak: the library also opens in a torch without CUDA, where no op runs.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace albatross {

inline void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr || aoti_torch_get_current_cuda_stream(device_index, &stream) != 0) {
    throw std::runtime_error("torch gave no CUDA stream: this torch was built without CUDA");
  }
  return stream;
}

}  // namespace albatross
