// Registers the ops' CUDA implementations with torch's dispatcher, nothing else. Runs when the library is opened.
#include "ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(albatross, CUDA, m) {
  m.impl("wkv7_decode", TORCH_BOX(&albatross::wkv7_decode));
  m.impl("wkv7_prefill", TORCH_BOX(&albatross::wkv7_prefill));
}
