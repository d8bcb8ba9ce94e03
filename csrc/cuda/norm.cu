// The layer norms between the sub-blocks of a layer, with the residual addition before and the token shift and its mixes after
// them. Called by csrc/norm.cpp; knows nothing of torch.
//
// In float32:   x_out = x + delta     y = LN(x_out), rounded     mixed[m] = y + (y of the token before - y) mix[m]
#include "launch.cuh"
#include "norm_mix.cuh"

namespace albatross {
inline namespace norm_file {

// Up to this many tokens, a token is shared by kPacks blocks, each of which normalises all of it and mixes a fourth; more tokens
// fill the card by themselves. In fp32, where a whole token would need more registers than there are, tokens are always shared.
constexpr int64_t kMaxSharedTokens = 128;

constexpr int resident_threads(bool is_shared, size_t io_bytes) { return !is_shared ? 1024 : io_bytes == 2 ? 768 : 512; }

// Grid (tokens, packs of a thread) where tokens are shared, else (runs of tokens). Moves, per token and channel: x and delta in,
// x_out and num_mixes numbers out; the token before a run is read again, and the last token of a row by the block of its first.
template <typename Io, int kThreads, bool kIsShared>
__global__ void GPU_LAUNCH_BOUNDS(kThreads, resident_threads(kIsShared, sizeof(Io)) / kThreads)
add_norm_mix_kernel(const AddNormMixParams p) {
  if constexpr (kIsShared) {
    SharedBlock<Io, kThreads> block(p);
    wait_for_inputs();
    allow_dependents();
    block.run(blockIdx.x);
  } else {
    RunBlock<Io, kThreads> block(p);
    wait_for_inputs();
    allow_dependents();
    const int64_t length = run_length(p.input.num_tokens, kThreads), first = blockIdx.x * length, end = first + length;
    block.run(static_cast<int>(first), static_cast<int>(end < p.input.num_tokens ? end : p.input.num_tokens));
  }
}

// Grid (chosen tokens). Moves, per token and channel: x and delta in, one number out.
template <typename Io, int kThreads>
__global__ void __launch_bounds__(kThreads) add_norm_kernel(const AddNormParams p) {
  using Norm = NormBlock<Io, kThreads>;
  Norm norm(p.input);
  Packed<float, kPack> weight[kPacks], bias[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (!norm.is_live(i)) continue;
    weight[i] = load_packed<float, kPack>(p.input.ln_weight + Norm::channel(i));
    bias[i] = load_packed<float, kPack>(p.input.ln_bias + Norm::channel(i));
  }
  wait_for_inputs();
  allow_dependents();
  const int64_t token = p.index[blockIdx.x];
  if (token < 0 || token >= p.input.num_tokens) GPU_TRAP();
  norm.load(token);
  norm.measure();
  Io* const out = static_cast<Io*>(p.out) + blockIdx.x * p.out_stride;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float values[kPack];
    norm.read(i, values);
    if (norm.is_live(i)) store_packed(out + Norm::channel(i), norm.normalised(values, weight[i], bias[i]));
  }
}

template <typename Io, int kThreads>
const char* mix(const AddNormMixParams& p, gpu_stream_t stream) {
  constexpr int width = NormBlock<Io, kThreads>::kWidth;
  if constexpr (sizeof(Io) == 2) {
    if (p.input.num_tokens > kMaxSharedTokens) {
      const int64_t length = run_length(p.input.num_tokens, kThreads);
      const dim3 grid(static_cast<unsigned>((p.input.num_tokens + length - 1) / length));
      return launch_dependent(add_norm_mix_kernel<Io, kThreads, false>, grid, kThreads, 0, stream, p);
    }
  }
  const dim3 grid(static_cast<unsigned>(p.input.num_tokens), static_cast<unsigned>((p.input.num_channels + width - 1) / width));
  return launch_dependent(add_norm_mix_kernel<Io, kThreads, true>, grid, kThreads, 0, stream, p);
}

template <typename Io, int kThreads>
const char* norm(const AddNormParams& p, gpu_stream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.num_chosen));
  return launch_dependent(add_norm_kernel<Io, kThreads>, grid, kThreads, 0, stream, p);
}

// All that is built, by [dtype][threads]: four packs a thread hold the widest token of 128, 256 and 512 threads.
constexpr int kNumSizes = 3;
using MixLauncher = const char* (*)(const AddNormMixParams&, gpu_stream_t);
using NormLauncher = const char* (*)(const AddNormParams&, gpu_stream_t);
constexpr MixLauncher kMix[2][kNumSizes] = {
    {mix<__half, 128>, mix<__half, 256>, mix<__half, 512>}, {mix<float, 128>, mix<float, 256>, mix<float, 512>}};
constexpr NormLauncher kNorm[2][kNumSizes] = {
    {norm<__half, 128>, norm<__half, 256>, norm<__half, 512>}, {norm<float, 128>, norm<float, 256>, norm<float, 512>}};
static_assert(kMaxNormChannels == 512 * kPack * kPacks, "the widest token fits the largest block");

template <typename Launcher>
Launcher choose(const Launcher (&table)[2][kNumSizes], const NormInput& input) {
  const int size = input.num_channels <= kMaxNormChannels / 4 ? 0 : input.num_channels <= kMaxNormChannels / 2 ? 1 : 2;
  return table[static_cast<int>(input.dtype)][size];
}

}  // namespace norm_file

const char* launch_add_norm_mix(const AddNormMixParams& params, void* stream) {
  if (params.input.num_tokens == 0 || params.input.num_channels == 0) return nullptr;
  return choose(kMix, params.input)(params, static_cast<gpu_stream_t>(stream));
}

const char* launch_add_norm(const AddNormParams& params, void* stream) {
  if (params.num_chosen == 0 || params.input.num_channels == 0) return nullptr;
  return choose(kNorm, params.input)(params, static_cast<gpu_stream_t>(stream));
}

}  // namespace albatross
