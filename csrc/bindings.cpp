// Registers the ops' CUDA implementations with torch's dispatcher, nothing else. Runs when the library is opened.
#include "ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(albatross, CUDA, m) {
  m.impl("add_norm", TORCH_BOX(&albatross::add_norm));
  m.impl("add_norm_mix", TORCH_BOX(&albatross::add_norm_mix));
  m.impl("grouped_linear", TORCH_BOX(&albatross::grouped_linear));
  m.impl("sparse_linear", TORCH_BOX(&albatross::sparse_linear));
  m.impl("squared_relu", TORCH_BOX(&albatross::squared_relu));
  m.impl("tmix_decode", TORCH_BOX(&albatross::tmix_decode));
  m.impl("tmix_prepare", TORCH_BOX(&albatross::tmix_prepare));
  m.impl("tmix_readout", TORCH_BOX(&albatross::tmix_readout));
  m.impl("wkv7_prefill", TORCH_BOX(&albatross::wkv7_prefill));
  m.impl("sample", TORCH_BOX(&albatross::sample));
}
