// The WKV-7 recurrence (RWKV-7 "Goose", arXiv:2503.14456, eq. 17 and 18, with a = -kk and b = kk * in-context rate), for one token a
// row (decode) and for packed sequences (prefill). Called by csrc/wkv7.cpp; knows nothing of torch.
//
// Per head, in float32, with the state S [value, key]:
//   d = exp(-kDecayScale * sigmoid(w))     S = S diag(d) + (S a) b^T + v k^T     y = S r
//
// A value row of S needs nothing of any other row, so four neighbouring lanes own one row: lane q holds keys 8q..8q+7 and
// 32+8q..32+8q+7, sums over keys are two shuffles, and the per-token vectors come from shared memory as float. Both kernels
// use the same `advance`, so a token's arithmetic does not depend on the kernel, the batch or the place in it.
#include "common.cuh"
#include "constants.h"
#include "wkv7.h"

namespace albatross {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 4;                          // lanes that own one value row
constexpr int kKeys = kHeadSize / kLanes;          // keys a lane holds
constexpr int kRun = 8;                            // consecutive keys: 16 bytes of fp16
constexpr int kRowsPerPass = kThreads / kLanes;    // value rows of a block with one row a thread
constexpr int kDecodeRows = kHeadSize / kRowsPerPass;  // value rows of a thread in decode: a block does a whole head
constexpr int kChunk = 8;                          // tokens staged at once in prefill
static_assert(kHeadSize == 64 && kKeys == 2 * kRun, "the key layout is written for heads of 64");

// The order of Wkv7Params::vectors; w becomes the decay on its way to shared memory.
enum Vector { kR, kDecay, kK, kV, kA, kB, kNumVectors };
using Token = float[kNumVectors][kHeadSize];

__device__ __forceinline__ float decay_of(float w) { return expf(__fdividef(-kDecayScale, 1.0f + expf(-w))); }

// Key at which the run holding a lane's element `e` begins.
__device__ __forceinline__ int run_begin(int lane, int e) { return e / kRun * (kHeadSize / 2) + lane * kRun; }

// A slot outside the pool would corrupt memory, so it ends the kernel and with it the process: it is a caller's bug.
__device__ __forceinline__ int64_t state_offset(const Wkv7Params& p, int64_t slot, int64_t head) {
  if (slot >= p.num_slots) GPU_TRAP();
  return slot * p.state_stride + head * (kHeadSize * kHeadSize);
}

template <typename State>
struct RowState {
  Packed<State, kRun> runs[kKeys / kRun];

  __device__ __forceinline__ void load(const State* row, int lane) {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) runs[i] = load_packed<State, kRun>(row + run_begin(lane, i * kRun));
  }
  __device__ __forceinline__ void store(State* row, int lane) const {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) store_packed(row + run_begin(lane, i * kRun), runs[i]);
  }
  __device__ __forceinline__ void read(float (&s)[kKeys]) const {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) unpack(runs[i], s + i * kRun);
  }
  __device__ __forceinline__ void write(const float (&s)[kKeys]) {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) pack(s + i * kRun, runs[i]);
  }
};

// One token for kRows value rows: s is advanced in place, y is what is read from it.
template <int kRows>
__device__ __forceinline__ void advance(
    float (&s)[kRows][kKeys], const Token& token, int lane, const float (&v)[kRows], float (&y)[kRows]) {
  float sums[kRows][4] = {};  // four chains hide the latency of dependent additions
#pragma unroll
  for (int e = 0; e < kKeys; e += 4) {
    const float4 a = *reinterpret_cast<const float4*>(&token[kA][run_begin(lane, e) + e % kRun]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i][0] = fmaf(s[i][e], a.x, sums[i][0]);
      sums[i][1] = fmaf(s[i][e + 1], a.y, sums[i][1]);
      sums[i][2] = fmaf(s[i][e + 2], a.z, sums[i][2]);
      sums[i][3] = fmaf(s[i][e + 3], a.w, sums[i][3]);
    }
  }
  float sa[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sa[i] = lane_sum<kLanes>((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
    sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
  }
#pragma unroll
  for (int e = 0; e < kKeys; e += 4) {
    const int key = run_begin(lane, e) + e % kRun;
    float d[4], b[4], k[4], r[4];
    unpack(load_packed<float, 4>(&token[kDecay][key]), d);
    unpack(load_packed<float, 4>(&token[kB][key]), b);
    unpack(load_packed<float, 4>(&token[kK][key]), k);
    unpack(load_packed<float, 4>(&token[kR][key]), r);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][e + j] = fmaf(sa[i], b[j], fmaf(s[i][e + j], d[j], v[i] * k[j]));
        sums[i][j] = fmaf(s[i][e + j], r[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) y[i] = lane_sum<kLanes>((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
}

// Decode. Grid (rows, heads): a block advances one head of one row by one token, two value rows a thread.
// Moves, per head: the state once in and once out (16 KiB in fp16, 32 KiB in fp32), six vectors in, one out. The loads of
// the vectors are issued before the slot is known, those of the state before anything waits for the vectors.
template <typename State, typename Io>
__global__ void __launch_bounds__(kThreads) wkv7_decode_kernel(const Wkv7Params p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int64_t offset = (row * p.num_heads + head) * kHeadSize;
  constexpr int kGroups = kThreads / kHeadSize;
  const int key = threadIdx.x % kHeadSize, group = threadIdx.x / kHeadSize;
  Io vectors[kNumVectors / kGroups];
#pragma unroll
  for (int i = 0; i < kNumVectors / kGroups; ++i) {
    vectors[i] = static_cast<const Io*>(p.vectors[i * kGroups + group])[offset + key];
  }

  const int slot = p.slots[row];
  if (slot < 0) return;
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  State* const state = static_cast<State*>(p.state) + state_offset(p, slot, head);
  RowState<State> packed[kDecodeRows];
#pragma unroll
  for (int i = 0; i < kDecodeRows; ++i) packed[i].load(state + (first_row + i * kRowsPerPass) * kHeadSize, lane);

  __shared__ alignas(16) Token token;
#pragma unroll
  for (int i = 0; i < kNumVectors / kGroups; ++i) {
    const int vector = i * kGroups + group;
    const float value = to_float(vectors[i]);
    token[vector][key] = vector == kDecay ? decay_of(value) : value;
  }
  __syncthreads();

  float s[kDecodeRows][kKeys], v[kDecodeRows], y[kDecodeRows];
#pragma unroll
  for (int i = 0; i < kDecodeRows; ++i) {
    packed[i].read(s[i]);
    v[i] = token[kV][first_row + i * kRowsPerPass];
  }
  advance(s, token, lane, v, y);
#pragma unroll
  for (int i = 0; i < kDecodeRows; ++i) {
    const int value_row = first_row + i * kRowsPerPass;
    packed[i].write(s[i]);
    packed[i].store(state + value_row * kHeadSize, lane);
    if (lane == 0) assign(static_cast<Io*>(p.y)[offset + value_row], y[i]);
  }
}

// The six vectors of up to kChunk tokens of one head on their way to shared memory. A thread moves four numbers of each,
// of token threadIdx.x / 16, so that a chunk is loaded by six independent instructions a thread.
template <typename Io>
struct ChunkLoader {
  static constexpr int kPart = kChunk * kHeadSize / kThreads;
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
      Packed<float, kPart> packed;
      pack(values, packed);
      store_packed(&chunk[token_index()][i][first_key()], packed);
    }
  }
};

// Prefill. Grid (rows, heads, halves): a block takes half the value rows of one head through a whole sequence, one row a
// thread, with the state in float registers from the first token to the last. Tokens come in chunks: while one chunk is
// computed from shared memory, the next is on its way in registers; y leaves through shared memory in 16-byte pieces.
// Moves, per head: the state once in and once out, and per token six vectors in (twice, once for each half) and one out.
template <typename State, typename Io>
__global__ void __launch_bounds__(kThreads) wkv7_prefill_kernel(const Wkv7Params p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const int first_value = blockIdx.z * kRowsPerPass;
  const int slot = p.slots[row];
  const int64_t begin = p.cu_seqlens[row], end = p.cu_seqlens[row + 1];
  if (slot < 0 || begin >= end) return;
  if (begin < 0 || end > p.num_tokens) GPU_TRAP();
  const int lane = threadIdx.x % kLanes, local_row = threadIdx.x / kLanes;
  State* const state_row =
      static_cast<State*>(p.state) + state_offset(p, slot, head) + (first_value + local_row) * kHeadSize;

  constexpr int kPiece = 16 / sizeof(Io);                  // numbers of one 16-byte store
  constexpr int kPiecesPerToken = kRowsPerPass / kPiece;
  __shared__ alignas(16) Token chunks[2][kChunk];
  __shared__ alignas(16) Io outputs[2][kChunk][kRowsPerPass];

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
      float y[1];
      advance(s, token, lane, v, y);
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
void decode(const Wkv7Params& p, gpu_stream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.num_heads));
  wkv7_decode_kernel<State, Io><<<grid, kThreads, 0, stream>>>(p);
}

template <typename State, typename Io>
void prefill(const Wkv7Params& p, gpu_stream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.num_heads), kHeadSize / kRowsPerPass);
  wkv7_prefill_kernel<State, Io><<<grid, kThreads, 0, stream>>>(p);
}

// All that is built, by [state dtype][vector dtype].
using Launcher = void (*)(const Wkv7Params&, gpu_stream_t);
constexpr Launcher kDecode[2][2] = {{decode<__half, __half>, decode<__half, float>}, {decode<float, __half>, decode<float, float>}};
constexpr Launcher kPrefill[2][2] = {{prefill<__half, __half>, prefill<__half, float>}, {prefill<float, __half>, prefill<float, float>}};

const char* launch(const Launcher (&table)[2][2], const Wkv7Params& params, void* stream) {
  if (params.num_rows == 0 || params.num_heads == 0) return nullptr;
  table[static_cast<int>(params.state_dtype)][static_cast<int>(params.vector_dtype)](params, static_cast<gpu_stream_t>(stream));
  return launch_error();
}

}  // namespace

const char* launch_wkv7_decode(const Wkv7Params& params, void* stream) { return launch(kDecode, params, stream); }
const char* launch_wkv7_prefill(const Wkv7Params& params, void* stream) { return launch(kPrefill, params, stream); }

}  // namespace albatross
