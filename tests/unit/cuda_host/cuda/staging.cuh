// Stands in for csrc/cuda/staging.cuh: its functions, by what the PTX manual says of the instructions there.
#pragma once

#include "common.cuh"

namespace albatross {

using SharedAddress = emu::SharedAddress;
using emu::commit_copies;
using emu::copy_async;

ALWAYS_INLINE SharedAddress address_of(const void* shared) { return emu::shared_address(shared); }

template <int kPending>
void wait_for_copies() {
  emu::wait_for_copies(kPending);
}

ALWAYS_INLINE void load_transposed(uint32_t (&m)[4], SharedAddress row) { emu::load_matrices(m, row, true); }

}  // namespace albatross
