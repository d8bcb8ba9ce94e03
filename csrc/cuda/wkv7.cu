// The WKV-7 recurrence (RWKV-7 "Goose", arXiv:2503.14456, eq. 17 and 18, with a = -kk and b = kk * in-context rate) over packed
// sequences. Called by csrc/wkv7.cpp; knows nothing of torch.
//
// Per head, in float32, with the state S [value, key]:
//   d = exp(-kDecayScale * sigmoid(w))     S = S diag(d) + (S a) b^T + v k^T     y = S r
#include "launch.cuh"
#include "wkv7.cuh"
#include "wkv7.h"

namespace albatross {
inline namespace wkv7_file {

constexpr int kChunk = 8;  // tokens staged at once

// The six vectors of up to kChunk tokens of one head on their way to shared memory. A thread moves four numbers of each,
// of token threadIdx.x / 16, so that a chunk is loaded by six independent instructions a thread.
template <typename Io>
struct ChunkLoader {
  static constexpr int kPart = kChunk * kHeadSize / kWkvThreads;
  Packed<Io, kPart> parts[kNumVectors];

  static __device__ __forceinline__ int token_index() { return threadIdx.x / (kHeadSize / kPart); }
  static __device__ __forceinline__ int first_key() { return threadIdx.x % (kHeadSize / kPart) * kPart; }

  __device__ __forceinline__ void fetch(const Wkv7Params& p, int64_t first_token, int64_t end_token, int64_t head) {
    const int64_t token = first_token + token_index();
    if (token >= end_token) return;
    const int64_t offset = (token * p.num_heads + head) * kHeadSize + first_key();
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      parts[i] = load_packed<Io, kPart>(static_cast<const Io*>(p.vectors[i]) + offset);
    }
  }
  __device__ __forceinline__ void stage(Token* chunk) const {
#pragma unroll
    for (int i = 0; i < kNumVectors; ++i) {
      float values[kPart];
      unpack(parts[i], values);
      if (i == kDecay) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) values[j] = decay_of(values[j]);
      }
      static_assert(kPart == 4, "one 16-byte store");
      float4* const target = reinterpret_cast<float4*>(&chunk[token_index()][i][first_key()]);
      *target = make_float4(values[0], values[1], values[2], values[3]);
    }
  }
};

// Grid (rows, heads, halves): a block takes half the value rows of one head through a whole sequence, a value row for four
// threads, with the state in float registers from the first token to the last. Tokens come in chunks: while one chunk is
// computed from shared memory, the next is on its way in registers; y leaves through shared memory in 16-byte pieces.
// Moves, per head: the state once in and once out, and per token six vectors in (twice, once for each half) and one out.
template <typename State, typename Io>
__global__ void __launch_bounds__(kWkvThreads) wkv7_prefill_kernel(const Wkv7Params p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int first_value = blockIdx.z * kRowsPerPass;
  wait_for_inputs();
  allow_dependents();
  const int slot = p.slots[row];
  const int64_t begin = p.cu_seqlens[row], end = p.cu_seqlens[row + 1];
  if (slot < 0 || begin >= end) return;
  if (begin < 0 || end > p.num_tokens) GPU_TRAP();
  const int lane = threadIdx.x % kLanes, local_row = threadIdx.x / kLanes;
  State* const state_row =
      head_state<State>(p.state, p.state_stride, p.num_slots, slot, head) + (first_value + local_row) * kHeadSize;

  constexpr int kPiece = 16 / sizeof(Io);                  // numbers of one 16-byte store
  constexpr int kPiecesPerToken = kRowsPerPass / kPiece;
  __shared__ __align__(16) Token chunks[2][kChunk];
  __shared__ __align__(16) Io outputs[2][kChunk][kRowsPerPass];

  RowState<State> packed;
  packed.load(state_row, lane);
  ChunkLoader<Io> next;
  next.fetch(p, begin, end, head);
  next.stage(chunks[0]);
  __syncthreads();
  float s[1][kKeys];
  packed.read(s[0]);

  int buffer = 0;
  for (int64_t first = begin; first < end; first += kChunk, buffer ^= 1) {
    const bool has_next = first + kChunk < end;
    if (has_next) next.fetch(p, first + kChunk, end, head);
    const int count = static_cast<int>(end - first < kChunk ? end - first : kChunk);
#pragma unroll 2
    for (int t = 0; t < count; ++t) {
      const Token& token = chunks[buffer][t];
      const float v[1] = {token[kV][first_value + local_row]};
      float sa[1], y[1];
      multiply_state(s, token[kA], lane, sa);
      advance(s, token, lane, sa, v, y);
      if (lane == 0) assign(outputs[buffer][t][local_row], y[0]);
    }
    if (has_next) next.stage(chunks[buffer ^ 1]);
    // One barrier a chunk is enough: what is written after it was last read before it, in the other buffer's turn.
    __syncthreads();
    const int t = threadIdx.x / kPiecesPerToken, piece = threadIdx.x % kPiecesPerToken * kPiece;
    if (t < count) {
      Io* const y = static_cast<Io*>(p.y) + ((first + t) * p.num_heads + head) * kHeadSize + first_value;
      store_packed(y + piece, load_packed<Io, kPiece>(&outputs[buffer][t][piece]));
    }
  }
  packed.write(s[0]);
  packed.store(state_row, lane);
}

template <typename State, typename Io>
const char* prefill(const Wkv7Params& p, gpu_stream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.num_heads), kHeadSize / kRowsPerPass);
  return launch_dependent(wkv7_prefill_kernel<State, Io>, grid, kWkvThreads, 0, stream, p);
}

// All that is built, by [state dtype][vector dtype].
using Launcher = const char* (*)(const Wkv7Params&, gpu_stream_t);
constexpr Launcher kPrefill[2][2] = {
    {prefill<__half, __half>, prefill<__half, float>}, {prefill<float, __half>, prefill<float, float>}};

}  // namespace wkv7_file

const char* launch_wkv7_prefill(const Wkv7Params& params, void* stream) {
  if (params.num_rows == 0 || params.num_heads == 0) return nullptr;
  const Launcher launcher = kPrefill[static_cast<int>(params.state_dtype)][static_cast<int>(params.vector_dtype)];
  return launcher(params, static_cast<gpu_stream_t>(stream));
}

}  // namespace albatross
