// The two ways in which blocks share the tokens of add_norm_mix (norm.cu).
#pragma once

#include "norm.cuh"

namespace albatross {

// A block that takes whole tokens takes a run of them, each of which is the next one's predecessor, as soon as there are enough
// for about as many threads as a large card holds at once.
constexpr int64_t kRunThreads = 1 << 17;
constexpr int64_t kMaxRun = 8;

__host__ __device__ inline int64_t run_length(int64_t num_tokens, int threads) {
  const int64_t length = num_tokens / (kRunThreads / threads);
  return length < 1 ? 1 : length > kMaxRun ? kMaxRun : length;
}

// Where a token stands in its row. A token of no row is its own first and last, in a row that is padding.
struct Place {
  int64_t begin, end;
  int slot;

  __device__ __forceinline__ static Place of(const AddNormMixParams& p, int64_t token) {
    Place place{0, 0, -1};
    // In a decode step token i is row i: looking there at once saves a trip to memory.
    const int64_t guess = token < p.num_rows ? token : p.num_rows - 1;
    if (guess >= 0) place.read(p, guess);
    const int64_t row = p.token_rows[token];
    if (row != guess && row >= 0 && row < p.num_rows) place.read(p, row);
    if (token < place.begin || token >= place.end) place = {token, token + 1, -1};
    if (place.begin < 0 || place.end > p.input.num_tokens || place.slot >= p.num_slots) GPU_TRAP();
    return place;
  }

  // The state of a row that has one, else null.
  template <typename Io>
  __device__ __forceinline__ Io* shift(const AddNormMixParams& p) const {
    return slot >= 0 ? static_cast<Io*>(p.shift) + slot * p.shift_stride : nullptr;
  }

 private:
  __device__ __forceinline__ void read(const AddNormMixParams& p, int64_t row) {
    begin = p.cu_seqlens[row];
    end = p.cu_seqlens[row + 1];
    slot = p.slots[row];
  }
};

// One pack mixed, rounded: `difference` is that of the token before from this one.
template <typename Io>
__device__ __forceinline__ Packed<Io, kPack> mixed_pack(
    const float (&own)[kPack], const float (&difference)[kPack], const Packed<Io, kPack>& mix) {
  float values[kPack];
  unpack(mix, values);
#pragma unroll
  for (int j = 0; j < kPack; ++j) values[j] = fmaf(difference[j], values[j], own[j]);
  Packed<Io, kPack> packed;
  pack(values, packed);
  return packed;
}

template <typename Io>
__device__ __forceinline__ void subtract(const Packed<Io, kPack>& before, const Packed<Io, kPack>& y, float (&own)[kPack],
                                         float (&difference)[kPack]) {
  unpack(y, own);
  unpack(before, difference);
#pragma unroll
  for (int j = 0; j < kPack; ++j) difference[j] -= own[j];
}

__device__ __forceinline__ void store_sum(float* target, const float (&values)[kPack]) {
  Packed<float, kPack> packed;
  pack(values, packed);
  store_packed(target, packed);
}

// One block's share of a token that several share: one pack a thread.
template <typename Io, int kThreads>
class SharedBlock {
 public:
  __device__ __forceinline__ explicit SharedBlock(const AddNormMixParams& p) : p_(p), norm_(p.input) {
    if (!is_live()) return;
    weight_ = load_packed<float, kPack>(p.input.ln_weight + channel());
    bias_ = load_packed<float, kPack>(p.input.ln_bias + channel());
#pragma unroll
    for (int m = 0; m < kMaxMixes; ++m) {
      if (m < p.num_mixes) mix_[m] = load_packed<Io, kPack>(static_cast<const Io*>(p.mix) + m * p.input.num_channels + channel());
    }
  }

  __device__ __forceinline__ void run(int64_t token) {
    norm_.load(token);
    const Place place = Place::of(p_, token);
    Io* const shift = place.shift<Io>(p_);
    const bool begins_row = token == place.begin, has_state = begins_row && shift != nullptr;
    Y before{}, y, other;
    if (has_state && is_live()) before = load_packed<Io, kPack>(shift + channel());
    normalise(p_.x_out + token * p_.input.num_channels, y);
    // Of one more token the norm is needed: of the row's last one by the block that replaces the row's state by it, else of the
    // token before.
    const bool needs_last = has_state && token != place.end - 1;
    if (needs_last || !begins_row) {
      norm_.load(needs_last ? place.end - 1 : token - 1);
      normalise(nullptr, other);
    }
    if (!begins_row) before = other;
    if (!needs_last) other = y;
    if (!is_live()) return;
    // Nobody but this block reads or writes these channels of the slot, and it has read them.
    if (has_state) store_packed(shift + channel(), other);
    mix(token, before, y);
  }

 private:
  using Norm = NormBlock<Io, kThreads>;
  using Y = Packed<Io, kPack>;

  __device__ __forceinline__ static int channel() { return Norm::channel(blockIdx.y); }
  __device__ __forceinline__ bool is_live() const { return norm_.is_live(blockIdx.y); }

  // The token whose loads were issued last. x_out is null where another block, or another pass, writes it.
  __device__ __forceinline__ void normalise(float* x_out, Y& y) {
    norm_.measure();
    if (!is_live()) return;
    float values[kPack];
    norm_.read(blockIdx.y, values);
    y = norm_.normalised(values, weight_, bias_);
    if (x_out != nullptr) store_sum(x_out + channel(), values);
  }

  __device__ __forceinline__ void mix(int64_t token, const Y& before, const Y& y) const {
    const int64_t stride = p_.input.num_tokens * p_.input.num_channels;
    float own[kPack], difference[kPack];
    subtract(before, y, own, difference);
    Io* mixed = static_cast<Io*>(p_.mixed) + token * p_.input.num_channels + channel();
#pragma unroll
    for (int m = 0; m < kMaxMixes; ++m, mixed += stride) {
      if (m >= p_.num_mixes) break;
      store_packed(mixed, mixed_pack(own, difference, mix_[m]));
    }
  }

  const AddNormMixParams& p_;
  Norm norm_;
  Packed<float, kPack> weight_, bias_;
  Packed<Io, kPack> mix_[kMaxMixes];
};

// All channels of a run of tokens. What counts is how many such blocks a multiprocessor holds, since each waits for memory most
// of the time: so registers hold no token ahead, no constants, which come from the L1 cache, and y in 16 bits.
template <typename Io, int kThreads>
class RunBlock {
 public:
  __device__ __forceinline__ explicit RunBlock(const AddNormMixParams& p) : p_(p), norm_(p.input) {}

  // Tokens first .. end - 1 in order, so that one token's y is there as the next one's predecessor. Two more norms are taken for
  // themselves alone: of the token before the run, if the first one needs it, and of the last token of a row that begins here,
  // to replace the row's state.
  __device__ __forceinline__ void run(int first, int end) {
    __shared__ Place places[kMaxRun];
    norm_.prefetch(first);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < end - first) places[thread] = Place::of(p_, first + thread);
    __syncthreads();
    int token = first, source = places[0].begin == first ? first : first - 1;
    Y before, y;
    while (token < end) {
      norm_.load(source);
      const Place& place = places[token - first];
      const bool is_own = source == token, is_last = source == place.end - 1;
      Io* const shift = token == place.begin ? place.shift<Io>(p_) : nullptr;
      if (is_own && token == place.begin) load_shift(shift, before);
      normalise(is_own ? p_.x_out + offset(token) : nullptr, y);
      // Nobody but this block reads or writes the slot, and it has read it.
      if (shift != nullptr && is_last) store_shift(shift, y);
      if (is_own) mix(static_cast<Io*>(p_.mixed) + offset(token), before, y);
      if (source <= token) before = y;
      if (source < token) {
        source = token;
      } else if (is_own && shift != nullptr && !is_last) {
        source = static_cast<int>(place.end) - 1;
      } else {
        source = ++token;
      }
    }
  }

 private:
  using Norm = NormBlock<Io, kThreads>;
  struct Y {
    Packed<Io, kPack> packs[kPacks];
  };

  // Of this thread's first channel.
  __device__ __forceinline__ int64_t offset(int64_t token) const {
    return token * p_.input.num_channels + Norm::first_channel();
  }

  __device__ __forceinline__ void load_shift(const Io* shift, Y& y) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      y.packs[i] = {};
      if (shift != nullptr && norm_.is_live(i)) y.packs[i] = load_packed<Io, kPack>(shift + Norm::channel(i));
    }
  }

  __device__ __forceinline__ void store_shift(Io* shift, const Y& y) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (norm_.is_live(i)) store_packed(shift + Norm::channel(i), y.packs[i]);
    }
  }

  // The token whose loads were issued last. x_out is null where another pass writes it.
  __device__ __forceinline__ void normalise(float* x_out, Y& y) {
    norm_.measure();
    const float* const ln_weight = p_.input.ln_weight + Norm::first_channel();
    const float* const ln_bias = p_.input.ln_bias + Norm::first_channel();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Packed<float, kPack> weight{}, bias{};
      if (norm_.is_live(i)) weight = load_constant<float, kPack>(ln_weight + i * Norm::kWidth);
      if (norm_.is_live(i)) bias = load_constant<float, kPack>(ln_bias + i * Norm::kWidth);
      float values[kPack];
      norm_.read(i, values);
      y.packs[i] = norm_.normalised(values, weight, bias);
      if (x_out != nullptr && norm_.is_live(i)) store_sum(x_out + i * Norm::kWidth, values);
    }
  }

  // The loop over the mixes is not unrolled: a thread's addresses would not fit its registers.
  __device__ __forceinline__ void mix(Io* mixed, const Y& before, const Y& y) const {
    const int64_t stride = p_.input.num_tokens * p_.input.num_channels;
    const Io* source = static_cast<const Io*>(p_.mix) + Norm::first_channel();
#pragma unroll 1
    for (int m = 0; m < p_.num_mixes; ++m, source += p_.input.num_channels, mixed += stride) {
      Y constants{};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (norm_.is_live(i)) constants.packs[i] = load_constant<Io, kPack>(source + i * Norm::kWidth);
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float own[kPack], difference[kPack];
        subtract(before.packs[i], y.packs[i], own, difference);
        const Packed<Io, kPack> packed = mixed_pack(own, difference, constants.packs[i]);
        if (norm_.is_live(i)) store_packed(mixed + i * Norm::kWidth, packed);
      }
    }
  }

  const AddNormMixParams& p_;
  Norm norm_;
};

}  // namespace albatross
