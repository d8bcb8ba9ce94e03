// The layer norms between the sub-blocks of a layer, with the residual addition before and the token shift and its mixes after
// them. Called by csrc/norm.cpp; knows nothing of torch.
//
// In float32:   x_out = x + delta     y = LN(x_out), rounded     mixed[m] = y + (y of the token before - y) mix[m]
#include "launch.cuh"
#include "norm.cuh"

namespace albatross {
inline namespace norm_file {

// Up to this many tokens, a token is shared by kPacks blocks, each of which normalises all of it and mixes a fourth; more tokens
// fill the card by themselves. In fp32, where a whole token would need more registers than there are, tokens are always shared.
constexpr int64_t kMaxSharedTokens = 128;

// From this many blocks on, a block takes a run of tokens, each of which is the next one's predecessor.
constexpr int64_t kRunBlocks = 512;
constexpr int64_t kMaxRun = 8;

__host__ __device__ inline int64_t run_length(int64_t num_tokens) {
  const int64_t length = num_tokens / kRunBlocks;
  return length < 1 ? 1 : length > kMaxRun ? kMaxRun : length;
}

// Where a token stands in its row. A token of no row is its own first and last, in a row that is padding.
struct Place {
  int64_t begin = 0, end = 0;
  int slot = -1;

  __device__ __forceinline__ Place(const AddNormMixParams& p, int64_t token) {
    // In a decode step token i is row i: looking there at once saves a trip to memory.
    const int64_t guess = token < p.num_rows ? token : p.num_rows - 1;
    if (guess >= 0) read(p, guess);
    const int64_t row = p.token_rows[token];
    if (row != guess && row >= 0 && row < p.num_rows) read(p, row);
    if (token < begin || token >= end) begin = token, end = token + 1, slot = -1;
    if (begin < 0 || end > p.input.num_tokens || slot >= p.num_slots) GPU_TRAP();
  }

 private:
  __device__ __forceinline__ void read(const AddNormMixParams& p, int64_t row) {
    begin = p.cu_seqlens[row];
    end = p.cu_seqlens[row + 1];
    slot = p.slots[row];
  }
};

// The constants of one pack.
template <typename Io>
struct MixConstants {
  Packed<float, kPack> weight, bias;
  Packed<Io, kPack> mix[kMaxMixes];

  __device__ __forceinline__ void load_norm(const NormInput& input, int channel) {
    weight = load_packed<float, kPack>(input.ln_weight + channel);
    bias = load_packed<float, kPack>(input.ln_bias + channel);
  }
  __device__ __forceinline__ void load_mix(const AddNormMixParams& p, int channel) {
#pragma unroll
    for (int m = 0; m < kMaxMixes; ++m) {
      if (m < p.num_mixes) mix[m] = load_packed<Io, kPack>(static_cast<const Io*>(p.mix) + m * p.input.num_channels + channel);
    }
  }
};

// One block's share of the tokens' channels: one pack a thread where a token is shared, else all.
template <typename Io, int kThreads, bool kIsShared>
class MixBlock {
 public:
  __device__ __forceinline__ explicit MixBlock(const AddNormMixParams& p) : p_(p), norm_(p.input) {
    if (!kIsShared || !is_live(0)) return;
    constants_.load_norm(p.input, channel(0));
    constants_.load_mix(p, channel(0));
  }

  // Tokens first .. end - 1 in order, so that one token's y is there as the next one's predecessor.
  __device__ __forceinline__ void run(int64_t first, int64_t end) {
    Y before;
    norm_.load(first);
    for (int64_t token = first; token < end; ++token) {
      const Place place(p_, token);
      const bool begins_row = token == place.begin, has_state = begins_row && place.slot >= 0;
      Io* const shift = static_cast<Io*>(p_.shift) + place.slot * p_.shift_stride;
      if (begins_row) load_shift(has_state ? shift : nullptr, before);
      Y y, other;
      normalise(p_.x_out + token * p_.input.num_channels, y);
      // Of one more token the norm is needed: of the row's last one by the block that replaces the row's state by it, and of the
      // token before by the first of a run. The others have theirs.
      const bool needs_last = has_state && token != place.end - 1, needs_before = !begins_row && token == first;
      if (needs_last || needs_before) {
        norm_.load(needs_last ? place.end - 1 : token - 1);
        normalise(nullptr, other);
      }
      if (needs_before) before = other;
      if (!needs_last) other = y;
      // Nobody but this block reads or writes these channels of the slot, and it has read them.
      if (has_state) store_shift(shift, other);
      if (token + 1 < end) norm_.load(token + 1);  // on its way while this one is mixed
      mix(token, before, y);
      before = y;
    }
  }

 private:
  static constexpr int kOwned = kIsShared ? 1 : kPacks;
  using Norm = NormBlock<Io, kThreads>;
  struct Y {
    Packed<Io, kPack> packs[kOwned];
  };

  // The packs that are this block's.
  __device__ __forceinline__ static int pack_index(int owned) { return kIsShared ? static_cast<int>(blockIdx.y) : owned; }
  __device__ __forceinline__ static int channel(int owned) { return Norm::channel(pack_index(owned)); }
  __device__ __forceinline__ bool is_live(int owned) const { return norm_.is_live(pack_index(owned)); }

  __device__ __forceinline__ void load_shift(const Io* shift, Y& y) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      y.packs[i] = {};
      if (shift != nullptr && is_live(i)) y.packs[i] = load_packed<Io, kPack>(shift + channel(i));
    }
  }

  __device__ __forceinline__ void store_shift(Io* shift, const Y& y) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (is_live(i)) store_packed(shift + channel(i), y.packs[i]);
    }
  }

  // The token whose loads were issued last. x_out is null where another block, or another pass, writes it.
  __device__ __forceinline__ void normalise(float* x_out, Y& y) {
    norm_.measure();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (!is_live(i)) continue;
      if (!kIsShared) constants_.load_norm(p_.input, channel(i));
      float values[kPack];
      norm_.read(pack_index(i), values);
      y.packs[i] = norm_.normalised(values, constants_.weight, constants_.bias);
      if (x_out == nullptr) continue;
      Packed<float, kPack> packed;
      pack(values, packed);
      store_packed(x_out + channel(i), packed);
    }
  }

  __device__ __forceinline__ void mix(int64_t token, const Y& before, const Y& y) {
    const int64_t stride = p_.input.num_tokens * p_.input.num_channels;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (!is_live(i)) continue;
      if (!kIsShared) constants_.load_mix(p_, channel(i));
      float own[kPack], difference[kPack];
      unpack(y.packs[i], own);
      unpack(before.packs[i], difference);
#pragma unroll
      for (int j = 0; j < kPack; ++j) difference[j] -= own[j];
      Io* mixed = static_cast<Io*>(p_.mixed) + token * p_.input.num_channels + channel(i);
#pragma unroll
      for (int m = 0; m < kMaxMixes; ++m, mixed += stride) {
        if (m >= p_.num_mixes) break;
        float values[kPack];
        unpack(constants_.mix[m], values);
#pragma unroll
        for (int j = 0; j < kPack; ++j) values[j] = fmaf(difference[j], values[j], own[j]);
        Packed<Io, kPack> packed;
        pack(values, packed);
        store_packed(mixed, packed);
      }
    }
  }

  const AddNormMixParams& p_;
  Norm norm_;
  MixConstants<Io> constants_;
};

// Grid (runs of tokens, packs of a thread or 1). Moves, per token and channel: x and delta in, x_out and num_mixes numbers out;
// the token before a run is read again, and the last token of a row by the block of its first.
template <typename Io, int kThreads, bool kIsShared>
__global__ void GPU_LAUNCH_BOUNDS(kThreads, (kIsShared && sizeof(Io) == 2 ? 768 : 512) / kThreads)
add_norm_mix_kernel(const AddNormMixParams p) {
  MixBlock<Io, kThreads, kIsShared> block(p);
  wait_for_inputs();
  allow_dependents();
  const int64_t length = kIsShared ? 1 : run_length(p.input.num_tokens), first = blockIdx.x * length, end = first + length;
  block.run(first, kIsShared || end < p.input.num_tokens ? end : p.input.num_tokens);
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
      const int64_t length = run_length(p.input.num_tokens);
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
