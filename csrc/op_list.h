// The ops this library implements: the one list of them, from which both lanes register and the build's record is written (by
// the pattern DO\((\w+)\)). Knows nothing of torch. Sorted; the declarations stand in ops.h.
#pragma once

// clang-format off
#define ALBATROSS_FOR_EACH_OP(DO) \
  DO(add_norm) \
  DO(add_norm_mix) \
  DO(grouped_linear) \
  DO(sample) \
  DO(sparse_linear) \
  DO(squared_relu) \
  DO(tmix_decode) \
  DO(tmix_prefill) \
  DO(tmix_prepare) \
  DO(tmix_readout) \
  DO(wkv7_prefill)
// clang-format on
