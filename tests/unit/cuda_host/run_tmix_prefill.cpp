// tmix_prefill on the emulator, for Python: tests/cuda_host_cases.py calls it with pointers and sizes.
#include "chunk_rows.cuh"
#include "launch.cuh"

namespace albatross {
inline namespace tmix_prefill_file {
extern unsigned char raw[];
alignas(1024) unsigned char raw[emu::kMaxShared];  // the kernel's dynamic shared memory
}  // namespace tmix_prefill_file

namespace {

constexpr int kHead = 64;

void allow_rows(const Rows& rows, int64_t count, int64_t bytes, bool may_write) {
  for (int64_t i = 0; i < count && rows.data != nullptr; ++i) {
    emu::allow_memory(static_cast<const char*>(rows.data) + i * rows.stride * 2, bytes, may_write);
  }
}
void allow_constants(const float* constants, int64_t num_heads) {
  if (constants != nullptr) emu::allow_memory(constants, num_heads * kHead * sizeof(float), false);
}

// What the kernel may touch, and no byte between.
void allow_tensors(const TmixPrefillParams& p) {
  emu::forget_memory();
  const int64_t row_bytes = p.num_heads * kHead * 2;
  const TmixProducts& products = p.products;
  for (const Rows& rows : {products.k, products.v, products.w, products.a, products.v_gate, products.v_first, p.r, p.g}) {
    allow_rows(rows, p.num_tokens, row_bytes, false);
  }
  allow_rows({p.out, p.out_stride}, p.num_tokens, row_bytes, true);
  const TmixConstants& c = p.constants;
  for (const float* constants : {c.w0, c.a0, c.v0, c.k_k, c.k_a, p.readout.r_k, p.readout.ln_weight, p.readout.ln_bias}) {
    allow_constants(constants, p.num_heads);
  }
  const int64_t state_bytes = p.state_dtype == Dtype::kFloat16 ? 2 : 4;
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    char* const state = static_cast<char*>(p.state) + slot * p.state_stride * state_bytes;
    emu::allow_memory(state, p.num_heads * kHead * kHead * state_bytes, true);
  }
  if (p.segments != nullptr) {
    emu::allow_memory(p.segments, p.num_segments * p.num_heads * 2 * kHead * kHead * sizeof(float), true);
  }
  emu::allow_memory(p.slots, p.num_rows * sizeof(int32_t), false);
  emu::allow_memory(p.cu_seqlens, (p.num_rows + 1) * sizeof(int32_t), false);
}

}  // namespace
}  // namespace albatross

// Params as csrc/cuda/tmix.h has them, what a block of the card may have, and how many blocks it holds. Returns nullptr, or what the
// kernel did wrong.
extern "C" const char* emu_tmix_prefill(
    const albatross::TmixPrefillParams* params, size_t params_bytes, int shared_bytes, int num_blocks) {
  if (params_bytes != sizeof *params) return "tests/cuda_host_cases.py has other params than csrc/cuda/tmix.h";
  emu::shared_memory = albatross::raw;
  albatross::shared_bytes = shared_bytes, albatross::num_blocks = num_blocks;
  albatross::allow_tensors(*params);
  return albatross::launch_tmix_prefill(*params, nullptr);
}

// Segments of a row of `chunks` where all rows have `all`.
extern "C" int emu_num_segments(int chunks, int all, int64_t room) { return albatross::num_segments_of(chunks, all, room); }
