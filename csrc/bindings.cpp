// Lane S: registers the ops' CUDA implementations with torch's dispatcher through the stable ABI, nothing else. Runs when the
// library is opened. Lane C has classic/module.cpp in its place.
#include "op_list.h"
#include "ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(albatross, CUDA, m) {
#define ALBATROSS_REGISTER(op) m.impl(#op, TORCH_BOX(&albatross::op));
  ALBATROSS_FOR_EACH_OP(ALBATROSS_REGISTER)
#undef ALBATROSS_REGISTER
}
