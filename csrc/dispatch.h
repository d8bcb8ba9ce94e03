// What follows the checks of an op, the same for all: device guard, current stream, launch.
#pragma once

#include "stream.h"
#include "tensor.h"

#include <stdexcept>
#include <string>

namespace albatross {

// Launches on the device of `like`. Throws what the driver refused.
template <typename Params>
void launch(const char* op, const Tensor& like, const Params& params, const char* (*launcher)(const Params&, void*)) {
  const DeviceGuard guard(like.get_device());
  const char* const error = launcher(params, current_stream(like.get_device()));
  if (error != nullptr) throw std::runtime_error(std::string(op) + ": the launch failed: " + error);
}

}  // namespace albatross
