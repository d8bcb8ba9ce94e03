// What stands before and after the recurrence over sequences (wkv7.cu), and the activation of the channel mix. Called by
// csrc/tmix.cpp; knows nothing of torch. The law stands in tmix_decode.cu, which does all of it at once for one token a row.
//
// Every kernel is a stream of 16-byte accesses: a thread holds eight neighbouring channels, eight lanes hold a head, and sums
// over a head are three shuffles. A thread keeps its channels from token to token, and with them the constants in registers.
#include "launch.cuh"
#include "tmix.cuh"
#include "tmix.h"

namespace albatross {
inline namespace tmix_file {

constexpr int kThreads = 128;
constexpr int kPack = 8;                         // channels of a thread
constexpr int kHeadLanes = kHeadSize / kPack;    // lanes that hold a head
constexpr int64_t kMaxThreads = 1 << 18;         // of a launch: about two waves of a large card; beyond, threads take more tokens
constexpr unsigned kTokenUnit = 32 / kHeadLanes;  // tokens begun at once come in such numbers, so that they end with a warp

// How many tokens are begun at once: all, or an equal share of them a round.
unsigned num_blocks(int64_t num_tokens, int64_t num_heads) {
  const int64_t per_token = num_heads * kHeadLanes;
  const int64_t rounds = (num_tokens * per_token + kMaxThreads - 1) / kMaxThreads;
  const int64_t step = ((num_tokens + rounds - 1) / rounds + kTokenUnit - 1) / kTokenUnit * kTokenUnit;
  return static_cast<unsigned>((step * per_token + kThreads - 1) / kThreads);
}

// The tokens and channels of one thread: every `step`-th token from `first_token` on. Threads past the last that is needed have
// first_token >= step; they are whole warps.
struct Walk {
  int64_t first_token, step, channel;

  __device__ __forceinline__ explicit Walk(int64_t num_heads) {
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x, per_token = static_cast<unsigned>(num_heads) * kHeadLanes;
    first_token = thread / per_token;
    step = gridDim.x * kThreads / (per_token * kTokenUnit) * kTokenUnit;
    channel = thread % per_token * kPack;
  }
};

__device__ __forceinline__ void load_constants(const float* source, int64_t channel, float (&values)[kPack]) {
  unpack(load_packed<float, kPack>(source + channel), values);
}

template <typename Io>
__device__ __forceinline__ Packed<Io, kPack> load_row(const Rows& rows, int64_t token, int64_t channel) {
  return load_packed<Io, kPack>(begin_of<Io>(rows, token) + channel);
}

template <typename Io>
__device__ __forceinline__ void store_row(void* row, int64_t channel, const float (&values)[kPack]) {
  Packed<Io, kPack> packed;
  pack(values, packed);
  store_packed(static_cast<Io*>(row) + channel, packed);
}

struct PrepareConstants {
  float w0[kPack], a0[kPack], v0[kPack], k_k[kPack], k_a[kPack];

  __device__ __forceinline__ void load(const TmixConstants& source, int64_t channel) {
    load_constants(source.w0, channel, w0);
    load_constants(source.a0, channel, a0);
    load_constants(source.k_k, channel, k_k);
    load_constants(source.k_a, channel, k_a);
    if (source.v0 != nullptr) load_constants(source.v0, channel, v0);
  }
};

// Eight channels of one token's products, all on their way at once.
template <typename Io>
struct Products {
  Packed<Io, kPack> k, a, w, v, v_gate, v_first;

  __device__ __forceinline__ void load(const TmixProducts& source, int64_t token, int64_t channel) {
    k = load_row<Io>(source.k, token, channel);
    a = load_row<Io>(source.a, token, channel);
    w = load_row<Io>(source.w, token, channel);
    v = load_row<Io>(source.v, token, channel);
    if (source.v_gate.data == nullptr) return;
    v_gate = load_row<Io>(source.v_gate, token, channel);
    v_first = load_row<Io>(source.v_first, token, channel);
  }
};

// The order of TmixPrepareParams::outputs.
enum Output { kLogit, kKey, kValue, kMinusKk, kB, kNumOutputs };

template <typename Io>
__device__ __forceinline__ void prepare(
    const Products<Io>& products, const PrepareConstants& constants, bool is_gated, float (&out)[kNumOutputs][kPack]) {
  float gate[kPack], sum = 0.0f;
  unpack(products.w, out[kLogit]);
  unpack(products.k, out[kKey]);
  unpack(products.v, out[kValue]);
  unpack(products.a, gate);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    out[kLogit][i] += constants.w0[i];
    out[kMinusKk][i] = out[kKey][i] * constants.k_k[i];
    sum = fmaf(out[kMinusKk][i], out[kMinusKk][i], sum);
    gate[i] = sigmoid(gate[i] + constants.a0[i]);
    out[kKey][i] = gated_key(out[kKey][i], gate[i], constants.k_a[i]);
  }
  const float scale = -rsqrtf(squared_length(lane_sum<kHeadLanes>(sum)));
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    out[kMinusKk][i] *= scale;
    out[kB][i] = -out[kMinusKk][i] * gate[i];
  }
  if (!is_gated) return;
  float logit[kPack], first[kPack];
  unpack(products.v_gate, logit);
  unpack(products.v_first, first);
#pragma unroll
  for (int i = 0; i < kPack; ++i) out[kValue][i] = gated_value(out[kValue][i], first[i], logit[i] + constants.v0[i]);
}

// Moves, per token and channel: six numbers in (four in layer 0), five out. All threads of a warp run through the loop equally
// often, since its sums take all of them: past the last token they repeat it and store nothing.
template <typename Io>
__global__ void __launch_bounds__(kThreads) tmix_prepare_kernel(const TmixPrepareParams p) {
  const Walk walk(p.num_heads);
  PrepareConstants constants;
  constants.load(p.constants, walk.channel);
  wait_for_inputs();
  allow_dependents();
  if (walk.first_token >= walk.step) return;
  for (int64_t begin = 0; begin < p.num_tokens; begin += walk.step) {
    const int64_t token = begin + walk.first_token;
    Products<Io> products;
    products.load(p.products, token < p.num_tokens ? token : p.num_tokens - 1, walk.channel);
    float out[kNumOutputs][kPack];
    prepare(products, constants, p.products.v_gate.data != nullptr, out);
    if (token < p.num_tokens) {
      const int64_t offset = token * p.num_heads * kHeadSize + walk.channel;
#pragma unroll
      for (int i = 0; i < kNumOutputs; ++i) store_row<Io>(p.outputs[i], offset, out[i]);
    }
  }
}

// Moves, per token and channel: five numbers in, one out. Loop as in tmix_prepare_kernel.
template <typename Io>
__global__ void __launch_bounds__(kThreads) tmix_readout_kernel(const TmixReadoutParams p) {
  const Walk walk(p.num_heads);
  float r_k[kPack], ln_weight[kPack], ln_bias[kPack];
  load_constants(p.readout.r_k, walk.channel, r_k);
  load_constants(p.readout.ln_weight, walk.channel, ln_weight);
  load_constants(p.readout.ln_bias, walk.channel, ln_bias);
  wait_for_inputs();
  allow_dependents();
  if (walk.first_token >= walk.step) return;
  for (int64_t begin = 0; begin < p.num_tokens; begin += walk.step) {
    const int64_t token = begin + walk.first_token, source = token < p.num_tokens ? token : p.num_tokens - 1;
    const Packed<Io, kPack> packed[5] = {
        load_row<Io>(p.y, source, walk.channel), load_row<Io>(p.r, source, walk.channel), load_row<Io>(p.k, source, walk.channel),
        load_row<Io>(p.v, source, walk.channel), load_row<Io>(p.g, source, walk.channel)};
    float y[kPack], r[kPack], k[kPack], v[kPack], g[kPack];
    unpack(packed[0], y);
    unpack(packed[1], r);
    unpack(packed[2], k);
    unpack(packed[3], v);
    unpack(packed[4], g);
    float sum = 0.0f, bonus = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sum += y[i];
      bonus = fmaf(r[i] * k[i], r_k[i], bonus);
    }
    bonus = lane_sum<kHeadLanes>(bonus);
    const float mean = lane_sum<kHeadLanes>(sum) / kHeadSize;
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares = fmaf(y[i] - mean, y[i] - mean, squares);
    const float scale = rsqrtf(lane_sum<kHeadLanes>(squares) / kHeadSize + kGroupNormEps);
#pragma unroll
    for (int i = 0; i < kPack; ++i) y[i] = fmaf(bonus, v[i], fmaf((y[i] - mean) * scale, ln_weight[i], ln_bias[i])) * g[i];
    if (token < p.num_tokens) store_row<Io>(static_cast<Io*>(p.out) + token * p.out_stride, walk.channel, y);
  }
}

// NaN passes, as in torch: it fails both comparisons.
__device__ __forceinline__ float squared_relu(float x, float bound, float scale) {
  x = x < 0.0f ? 0.0f : x;
  x = (x > bound ? bound : x) * scale;
  return x * x;
}

// Moves every number in and out. A thread has kParts packs, each a block's width from the one before; the last block's first
// threads take what is left of the last pack.
constexpr int kParts = 4;
template <typename Io>
__global__ void __launch_bounds__(kThreads) squared_relu_kernel(const SquaredReluParams p) {
  constexpr bool is_half = sizeof(Io) == 2;
  const float bound = is_half ? kCmixBound : INFINITY, scale = is_half ? kCmixScale : 1.0f;
  wait_for_inputs();
  allow_dependents();
  Io* const x = static_cast<Io*>(p.x);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kParts * kThreads + threadIdx.x) * kPack;
  constexpr int64_t kPartStride = kThreads * kPack;
  Packed<Io, kPack> packed[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int64_t offset = first + i * kPartStride;
    if (offset + kPack <= p.numel) packed[i] = load_packed<Io, kPack>(x + offset);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int64_t offset = first + i * kPartStride;
    if (offset + kPack <= p.numel) {
      float values[kPack];
      unpack(packed[i], values);
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[j] = squared_relu(values[j], bound, scale);
      store_row<Io>(x, offset, values);
    }
  }
  const int64_t rest = p.numel / kPack * kPack + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && rest < p.numel) assign(x[rest], squared_relu(to_float(x[rest]), bound, scale));
}

}  // namespace tmix_file

const char* launch_tmix_prepare(const TmixPrepareParams& params, void* stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return nullptr;
  const auto kernel = params.dtype == Dtype::kFloat16 ? tmix_prepare_kernel<__half> : tmix_prepare_kernel<float>;
  const dim3 grid(num_blocks(params.num_tokens, params.num_heads));
  return launch_dependent(kernel, grid, kThreads, 0, static_cast<gpu_stream_t>(stream), params);
}

const char* launch_tmix_readout(const TmixReadoutParams& params, void* stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return nullptr;
  const auto kernel = params.dtype == Dtype::kFloat16 ? tmix_readout_kernel<__half> : tmix_readout_kernel<float>;
  const dim3 grid(num_blocks(params.num_tokens, params.num_heads));
  return launch_dependent(kernel, grid, kThreads, 0, static_cast<gpu_stream_t>(stream), params);
}

const char* launch_squared_relu(const SquaredReluParams& params, void* stream) {
  if (params.numel == 0) return nullptr;
  const auto kernel = params.dtype == Dtype::kFloat16 ? squared_relu_kernel<__half> : squared_relu_kernel<float>;
  constexpr int64_t per_block = kParts * kThreads * kPack;
  const dim3 grid(static_cast<unsigned>((params.numel + per_block - 1) / per_block));
  return launch_dependent(kernel, grid, kThreads, 0, static_cast<gpu_stream_t>(stream), params);
}

}  // namespace albatross
