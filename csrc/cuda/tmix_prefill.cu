// Time mixing over packed sequences, from the raw products of the mixed inputs to what the output matrix multiplies, a chunk of
// 16 tokens at a time on tensor cores. Called by csrc/tmix.cpp; knows nothing of torch. The law stands in tmix_decode.cu.
//
// Within a chunk let G_t be the sum of the log decays up to token t, m its middle, C its last token, a = -kk, b = kk times the
// gate of a, and
//   A = a exp(G_(t-1) - G_m)   R = r exp(G_t - G_m)   B = b exp(G_m - G_t)   K = k exp(G_m - G_t)          [16 token, 64 key]
//   L = tril(A B^T, -1)     T = (I - L)^-1     tril(A K^T, -1)     tril(R B^T)     tril(R K^T)             [16, 16]
// none of which depends on the state. Then, with S0 the state [64 value, 64 key] before the chunk,
//   U = T (A exp(G_m) S0^T + tril(A K^T, -1) V)     Y = R exp(G_m) S0^T + tril(R K^T) V + tril(R B^T) U
//   S = S0 diag(exp(G_C)) + V^T (K exp(G_C - G_m)) + U^T (B exp(G_C - G_m))
// Operands are rounded to fp16, sums and the state are fp32. A log decay is above -0.607, so A and B stay within fp16 at any
// decay, and K and R for keys to 511 and receptances to 938; for larger ones a chunk is scaled by powers of two.
//
// A block takes one head of some of the sequences, or of their segments, one after the other. Its producer warps make the upper
// lines for chunks ahead, each for every kProducers-th chunk, in a stage of shared memory of its own. Four consumer warps hold 16
// value rows of the state each, from the first token to the last: the rows need nothing of each other, and every product lies in
// the registers as the next one's operand wants it. A producer that gets its stage back finds Y there, and ends what it began:
// group norm, bonus and gate.
//
// The state alone goes from chunk to chunk. Where heads and sequences are too few to fill the card, and the caller gives room for
// it, a first kernel goes through the segments of long sequences at once, each from no state at all: it leaves what the segment
// does to any state, two matrices (chunk_segments.cuh). The second then starts every segment from its own first state.
#include "chunk_consumer.cuh"
#include "chunk_producer.cuh"
#include "launch.cuh"
#include "tmix.h"

namespace albatross {
inline namespace tmix_prefill_file {

// Shared memory with all that does not depend on tokens. What earlier kernels wrote may be read behind it.
template <int kProducers>
__device__ __forceinline__ Shared<kProducers>& begin(const TmixPrefillParams& p, int64_t head) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared<kProducers>& shared = *reinterpret_cast<Shared<kProducers>*>(raw);
  load_constants(p, head, shared.constants);
  if (threadIdx.x < kProducers) {
    init_barrier(address_of(&shared.full[threadIdx.x]), 1);
    init_barrier(address_of(&shared.empty[threadIdx.x]), kConsumers);
  }
  const bool is_split = p.num_segments > 1;
  if (is_split) wait_for_inputs();
  if (threadIdx.x < 32) {
    const Plan plan = is_split ? plan_of(p, threadIdx.x) : Plan{static_cast<int>(p.num_rows), 0};
    if (threadIdx.x == 0) shared.plan = plan;
  }
  __syncthreads();
  if (!is_split) wait_for_inputs();
  allow_dependents();
  return shared;
}
// So that the compiler knows it for the same in all lanes.
__device__ __forceinline__ int warp_index() { return GPU_SHFL(static_cast<int>(threadIdx.x / 32), 0); }

// What the segments of rows that are split do to a state, all but the last of a row. Grid (blocks of a head, heads). Moves, per
// head and token, six vectors in; per segment, two states out.
template <int kProducers>
__global__ void __launch_bounds__(32 * (kConsumers + kProducers))
tmix_summary_kernel(const __grid_constant__ TmixPrefillParams p) {
  const int64_t head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = warp_index();
  Shared<kProducers>& shared = begin<kProducers>(p, head);
  if (warp < kConsumers) {
    consume_summaries(p, head, warp, lane, shared);
  } else {
    produce_summaries(p, head, warp - kConsumers, lane, shared);
  }
}

// Grid (blocks of a head, heads). Moves, per head: the states once in and once out, and per token eight vectors in, one out. The
// blocks share a head's rows among them: there are as many as the card holds, not as many as the padded number of rows.
template <typename State, int kProducers>
__global__ void __launch_bounds__(32 * (kConsumers + kProducers))
tmix_prefill_kernel(const __grid_constant__ TmixPrefillParams p) {
  const int64_t head = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = warp_index();
  Shared<kProducers>& shared = begin<kProducers>(p, head);
  if (warp < kConsumers) {
    consume<State>(p, head, warp, lane, shared);
  } else {
    produce(p, head, warp - kConsumers, lane, shared);
  }
}

// Launches one of them for up to `items` rows or segments.
template <int kProducers>
const char* launch(void (*kernel)(TmixPrefillParams), int64_t items, const TmixPrefillParams& p, gpu_stream_t stream) {
  constexpr int kThreads = 32 * (kConsumers + kProducers), kBytes = sizeof(Shared<kProducers>);
  const int64_t num_blocks = resident_blocks(kernel, kThreads, kBytes);
  if (num_blocks == 0) return launch_error();
  const int64_t of_a_head = num_blocks < 2 * p.num_heads ? 1 : num_blocks / p.num_heads;
  const dim3 grid(static_cast<unsigned>(of_a_head < items ? of_a_head : items), static_cast<unsigned>(p.num_heads));
  return launch_dependent(kernel, grid, kThreads, kBytes, stream, p);
}

template <typename State, int kProducers>
const char* prefill(const TmixPrefillParams& p, gpu_stream_t stream) {
  if (p.num_segments > 1) {
    const char* const error = launch<kProducers>(tmix_summary_kernel<kProducers>, p.num_segments - 1, p, stream);
    if (error != nullptr) return error;
  }
  return launch<kProducers>(tmix_prefill_kernel<State, kProducers>, p.num_rows + p.num_segments, p, stream);
}

// All that is built, by [state dtype][whether the card has room for twice the stages].
using Launcher = const char* (*)(const TmixPrefillParams&, gpu_stream_t);
constexpr Launcher kPrefill[2][2] = {{prefill<__half, 4>, prefill<__half, 8>}, {prefill<float, 4>, prefill<float, 8>}};

}  // namespace tmix_prefill_file

const char* launch_tmix_prefill(const TmixPrefillParams& params, void* stream) {
  if (params.num_rows == 0 || params.num_heads == 0) return nullptr;
  const int room = shared_memory();
  if (room == 0) return launch_error();
  const bool has_room = room >= static_cast<int>(sizeof(Shared<8>));
  return kPrefill[static_cast<int>(params.state_dtype)][has_room](params, static_cast<gpu_stream_t>(stream));
}

}  // namespace albatross
