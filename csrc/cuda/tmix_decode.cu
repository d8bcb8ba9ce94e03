// Time mixing of one token a row, from the raw products of the mixed inputs to what the output matrix multiplies. Called by
// csrc/tmix.cpp; knows nothing of torch.
//
// Per head, in float32 (RWKV-7 "Goose", arXiv:2503.14456, section 4; S is [value, key]):
//   d = exp(-kDecayScale sigmoid(w + w0))     A = sigmoid(a + a0)     v = v + (v_first - v) sigmoid(v_gate + v0)
//   kk = k k_k / |k k_k|     k = k (1 + (A - 1) k_a)     S = S diag(d) - (S kk)(kk A)^T + v k^T
//   out = (GroupNorm(S r) + (sum of r k r_k) v) g
#include "launch.cuh"
#include "tmix.cuh"
#include "tmix.h"
#include "wkv7.cuh"

namespace albatross {
inline namespace tmix_decode_file {

constexpr int kRows = kHeadSize / kRowsPerPass;  // value rows of a thread: a block does a whole head
constexpr int kNumWarps = kWkvThreads / 32;
constexpr int kKeyWarps = kHeadSize / 32;  // the warps that prepare the keys
static_assert(kRows == 2 && kNumWarps == 2 * kKeyWarps, "half the block prepares keys, half values");

// What half the block prepares, one channel a thread: all that meets the keys but the decay. kk goes out with its own length;
// whoever uses it divides, so that nobody waits for the sum of its squares but those who need it.
template <typename Io>
struct KeyInputs {
  float a0, k_k, k_a, r_k;
  Io r, k, a;

  __device__ __forceinline__ void load_constants(const TmixDecodeParams& p, int64_t channel) {
    a0 = p.constants.a0[channel];
    k_k = p.constants.k_k[channel];
    k_a = p.constants.k_a[channel];
    r_k = p.readout.r_k[channel];
  }
  __device__ __forceinline__ void load(const TmixDecodeParams& p, int64_t row, int64_t channel) {
    a = begin_of<Io>(p.products.a, row)[channel];
    k = begin_of<Io>(p.products.k, row)[channel];
    r = begin_of<Io>(p.r, row)[channel];
  }
  // Returns the warp's sums of kk^2 and of r k r_k.
  __device__ __forceinline__ float2 stage(Token& token, int key) const {
    const float raw_key = to_float(k), receptance = to_float(r);
    const float gate = sigmoid(to_float(a) + a0), kk = raw_key * k_k, new_key = gated_key(raw_key, gate, k_a);
    token[kR][key] = receptance;
    token[kK][key] = new_key;
    token[kA][key] = kk;
    token[kB][key] = kk * gate;
    return make_float2(lane_sum<32>(kk * kk), lane_sum<32>(receptance * new_key * r_k));
  }
};

// What the other half prepares: decay and v.
template <typename Io>
struct ValueInputs {
  float w0, v0;
  Io w, v, v_gate, v_first;

  __device__ __forceinline__ void load_constants(const TmixDecodeParams& p, int64_t channel) {
    w0 = p.constants.w0[channel];
    v0 = p.constants.v0 == nullptr ? 0.0f : p.constants.v0[channel];
  }
  __device__ __forceinline__ void load(const TmixDecodeParams& p, int64_t row, int64_t channel) {
    w = begin_of<Io>(p.products.w, row)[channel];
    v = begin_of<Io>(p.products.v, row)[channel];
    if (p.products.v_gate.data == nullptr) return;
    v_gate = begin_of<Io>(p.products.v_gate, row)[channel];
    v_first = begin_of<Io>(p.products.v_first, row)[channel];
  }
  __device__ __forceinline__ void stage(const TmixDecodeParams& p, Token& token, int key) const {
    const bool is_gated = p.products.v_gate.data != nullptr;
    token[kDecay][key] = decay_of(to_float(w) + w0);
    token[kV][key] = is_gated ? gated_value(to_float(v), to_float(v_first), to_float(v_gate) + v0) : to_float(v);
  }
};

// Mean and variance of y over the head's value rows, from one exchange: each warp sends the mean of its rows and their squared
// distances from it.
__device__ __forceinline__ float2 head_moments(const float (&y)[kRows], float2 (&warps)[kNumWarps]) {
  constexpr float kPerWarp = kHeadSize / kNumWarps;
  const float warp_mean = lane_sum<32, kLanes>(y[0] + y[1]) / kPerWarp;
  const float squares = lane_sum<32, kLanes>((y[0] - warp_mean) * (y[0] - warp_mean) + (y[1] - warp_mean) * (y[1] - warp_mean));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(warp_mean, squares);
  __syncthreads();
  float mean = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNumWarps; ++i) mean += warps[i].x / kNumWarps;
#pragma unroll
  for (int i = 0; i < kNumWarps; ++i) sum += fmaf(kPerWarp * (warps[i].x - mean), warps[i].x - mean, warps[i].y);
  return make_float2(mean, sum / kHeadSize);
}

// Grid (rows, heads): a block advances one head of one row by one token, two value rows a thread, and normalises what it reads.
// Moves, per head: the state once in and once out (16 KiB in fp16, 32 KiB in fp32), eight vectors in, one out. The loads of the
// state are issued as soon as the slot is known, before anything waits for the vectors.
template <typename State, typename Io>
__global__ void GPU_LAUNCH_BOUNDS(kWkvThreads, sizeof(State) == 2 ? 8 : 5) tmix_decode_kernel(const TmixDecodeParams p) {
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const bool is_key_side = threadIdx.x < kHeadSize;
  const int key = threadIdx.x % kHeadSize;
  const int64_t channel = head * kHeadSize + key;
  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const bool is_writer = lane < kRows;  // of value row first_row + lane * kRowsPerPass
  const int64_t out_channel = head * kHeadSize + first_row + lane % kRows * kRowsPerPass;

  KeyInputs<Io> keys;
  ValueInputs<Io> values;
  if (is_key_side) keys.load_constants(p, channel);
  if (!is_key_side) values.load_constants(p, channel);
  const float ln_weight = p.readout.ln_weight[out_channel], ln_bias = p.readout.ln_bias[out_channel];
  wait_for_inputs();
  allow_dependents();

  const int slot = p.slots[row];
  if (is_key_side) keys.load(p, row, channel);
  if (!is_key_side) values.load(p, row, channel);
  const Io g = begin_of<Io>(p.g, row)[out_channel];
  if (slot < 0) {
    if (is_writer) assign(static_cast<Io*>(p.out)[row * p.out_stride + out_channel], 0.0f);
    return;
  }
  State* const state = head_state<State>(p.state, p.state_stride, p.num_slots, slot, head);
  RowState<State> packed[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) packed[i].load(state + (first_row + i * kRowsPerPass) * kHeadSize, lane);

  __shared__ __align__(16) Token token;
  __shared__ float2 key_sums[kKeyWarps], moments[kNumWarps];
  if (is_key_side) {
    const float2 sums = keys.stage(token, key);
    if (key % 32 == 0) key_sums[key / 32] = sums;
  } else {
    values.stage(p, token, key);
  }
  __syncthreads();

  float s[kRows][kKeys], v[kRows], sa[kRows], y[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    packed[i].read(s[i]);
    v[i] = token[kV][first_row + i * kRowsPerPass];
  }
  multiply_state(s, token[kA], lane, sa);
  const float scale = -1.0f / squared_length(key_sums[0].x + key_sums[1].x);  // the lengths of both kk, and the sign
#pragma unroll
  for (int i = 0; i < kRows; ++i) sa[i] *= scale;
  advance(s, token, lane, sa, v, y);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    packed[i].write(s[i]);
    packed[i].store(state + (first_row + i * kRowsPerPass) * kHeadSize, lane);
  }

  const float2 moment = head_moments(y, moments);
  const float bonus = key_sums[0].y + key_sums[1].y;
  const float own_y = lane % kRows == 0 ? y[0] : y[1], own_v = lane % kRows == 0 ? v[0] : v[1];
  const float normalised = fmaf((own_y - moment.x) * rsqrtf(moment.y + kGroupNormEps), ln_weight, ln_bias);
  const float result = fmaf(bonus, own_v, normalised) * to_float(g);
  if (is_writer) assign(static_cast<Io*>(p.out)[row * p.out_stride + out_channel], result);
}

template <typename State, typename Io>
const char* decode(const TmixDecodeParams& p, gpu_stream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_heads));
  return launch_dependent(tmix_decode_kernel<State, Io>, grid, kWkvThreads, 0, stream, p);
}

// All that is built, by [state dtype][dtype].
using Launcher = const char* (*)(const TmixDecodeParams&, gpu_stream_t);
constexpr Launcher kDecode[2][2] = {
    {decode<__half, __half>, decode<__half, float>}, {decode<float, __half>, decode<float, float>}};

}  // namespace tmix_decode_file

const char* launch_tmix_decode(const TmixDecodeParams& params, void* stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return nullptr;
  const Launcher launcher = kDecode[static_cast<int>(params.state_dtype)][static_cast<int>(params.dtype)];
  return launcher(params, static_cast<gpu_stream_t>(stream));
}

}  // namespace albatross
