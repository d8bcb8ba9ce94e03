// Stands in for csrc/cuda/launch.cuh: runs the blocks of a grid one after the other, the last first where the order of threads is
// reversed, and gives back what one did wrong.
#pragma once

#include "common.cuh"

namespace albatross {

// Of the card, by the caller's choice: what a block may have, and how many blocks of any kernel run at once.
inline int shared_bytes = 0, num_blocks = 1;

inline void wait_for_inputs() {}
inline void allow_dependents() {}
inline int shared_memory() { return shared_bytes; }

template <typename Params>
int resident_blocks(void (*)(Params), int, int bytes) {
  return bytes <= shared_bytes ? num_blocks : 0;
}

template <typename Params>
const char* launch_dependent(void (*kernel)(Params), dim3 grid, int threads, size_t bytes, gpu_stream_t, const Params& params) {
  // On a card params lie in constant memory: to copy them is no access.
  const auto run = [&]() __attribute__((no_sanitize("thread"))) { kernel(params); };
  const bool is_reversed = emu::options.order == emu::Order::kReversed;
  for (unsigned i = 0; i < grid.x; ++i) {
    const unsigned x = is_reversed ? grid.x - 1 - i : i;
    for (unsigned y = 0; y < grid.y; ++y) {
      const char* const error = emu::run_block(run, threads, bytes, {x, y, 0}, {grid.x, grid.y, grid.z});
      if (error != nullptr) return error;
    }
  }
  return nullptr;
}

}  // namespace albatross
