// Lane C: registers the ops' CUDA implementations with the dispatcher of the one torch this library is built for, and is a
// Python module that tells what it is. Runs when the library is opened, also without Python importing it.
#include "op_list.h"
#include "ops.h"

#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/csrc/api/include/torch/version.h>

#include <cstddef>
#include <iterator>

TORCH_LIBRARY_IMPL(albatross, CUDA, m) {
#define ALBATROSS_REGISTER(op) m.impl(#op, &albatross::op);
  ALBATROSS_FOR_EACH_OP(ALBATROSS_REGISTER)
#undef ALBATROSS_REGISTER
}

PYBIND11_MODULE(rwkv7_state_fwd_fp16, m) {
  m.doc() = "CUDA implementations of the albatross ops for one torch and one Python.";
  m.attr("lane") = "C";
  m.attr("torch_version") = TORCH_VERSION;  // of the headers: a library of one minor version serves all its patch releases
#define ALBATROSS_NAME(op) #op,
  const char* const names[] = {ALBATROSS_FOR_EACH_OP(ALBATROSS_NAME)};
#undef ALBATROSS_NAME
  pybind11::tuple ops(std::size(names));
  for (std::size_t i = 0; i < std::size(names); ++i) ops[i] = names[i];
  m.attr("ops") = ops;
}
