// The emulator for Python (tests/cuda_host_cases.py), whatever kernel it runs.
#include "emulator.h"

extern "C" {

// How the next blocks run.
void emu_set_options(int order, uint64_t seed, int counts_banks) {
  emu::options = {static_cast<emu::Order>(order), seed, counts_banks != 0};
}

// Good until the next call.
const char* emu_conflicts() {
  static std::string text;
  text = emu::conflicts();
  return text.c_str();
}
void emu_forget_conflicts() { emu::forget_conflicts(); }

}  // extern "C"
