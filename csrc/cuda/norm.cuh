// Layer norm of one token by one block, for the kernels of norm.cu. The sums over a token are added in the same order whatever
// the launch, so its result does not depend on the batch.
#pragma once

#include "common.cuh"
#include "constants.h"
#include "norm.h"

namespace albatross {

constexpr int kPack = 4;   // neighbouring channels: 16 bytes of fp32
constexpr int kPacks = 4;  // packs of a thread, a block's width from each other

// x + delta of one token, with empty packs beyond the last channel: those of a thread begin at 4 * thread + i * kWidth.
template <typename Io, int kThreads>
class NormBlock {
 public:
  static constexpr int kWidth = kThreads * kPack;

  __device__ __forceinline__ explicit NormBlock(const NormInput& input)
      : input_(input), count_(live_channels(threadIdx.x / 32)), other_count_(live_channels(threadIdx.x % kWarps)) {}

  __device__ __forceinline__ static int first_channel() { return static_cast<int>(threadIdx.x) * kPack; }
  __device__ __forceinline__ static int channel(int pack) { return first_channel() + pack * kWidth; }
  __device__ __forceinline__ bool is_live(int pack) const { return channel(pack) < input_.num_channels; }

  // Has a token brought into the L2 cache, where the card can.
  __device__ __forceinline__ void prefetch(int64_t token) const {
    constexpr int kLine = 128;
    const float* const x = input_.x + token * input_.num_channels;
    for (int i = static_cast<int>(threadIdx.x) * (kLine / 4); i < input_.num_channels; i += kThreads * (kLine / 4)) {
      GPU_PREFETCH(x + i);
    }
    if (input_.delta.data == nullptr) return;
    constexpr int kStep = kLine / sizeof(Io);
    const Io* const delta = static_cast<const Io*>(input_.delta.data) + token * input_.delta.stride;
    for (int i = (kThreads - 1 - static_cast<int>(threadIdx.x)) * kStep; i < input_.num_channels; i += kThreads * kStep) {
      GPU_PREFETCH(delta + i);
    }
  }

  // Issues the loads of a token; `measure` waits for them.
  __device__ __forceinline__ void load(int64_t token) {
    const float* const x = input_.x + token * input_.num_channels + first_channel();
    const Io* const delta = static_cast<const Io*>(input_.delta.data) + token * input_.delta.stride + first_channel();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      x_[i] = {};
      delta_[i] = {};
      if (is_live(i)) x_[i] = load_packed<float, kPack>(x + i * kWidth);
      if (is_live(i) && input_.delta.data != nullptr) delta_[i] = load_packed<Io, kPack>(delta + i * kWidth);
    }
  }

  // Adds delta and takes mean and variance. Every thread of the block must call it. One barrier: sums are of differences from a
  // value near the mean, within a warp from the mean of its first thread's channels, between warps from the mean of the first. As
  // these channels themselves add to the variance, no term that cancels is more than 32 times the variance, whatever the numbers.
  __device__ __forceinline__ void measure() {
    float total = 0.0f, sum = 0.0f, squares = 0.0f;
    int packs = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      add_delta(i);
      total += (values_[i][0] + values_[i][1]) + (values_[i][2] + values_[i][3]);
      packs += is_live(i);
    }
    const float origin = GPU_SHFL(total / static_cast<float>(packs * kPack), 0);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float difference = is_live(i) ? values_[i][j] - origin : 0.0f;
        sum += difference;
        squares = fmaf(difference, difference, squares);
      }
    }
    sum = lane_sum<32>(sum);
    squares = lane_sum<32>(squares);
    const float2 own = make_float2(origin + sum / count_, squares - sum * sum / count_);
    combine(own);
  }

  // x + delta of one pack, after `measure`. The number of the pack need not be known to the compiler.
  __device__ __forceinline__ void read(int pack, float (&values)[kPack]) const {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      values[j] = values_[0][j];
#pragma unroll
      for (int i = 1; i < kPacks; ++i) values[j] = i == pack ? values_[i][j] : values[j];
    }
  }

  // The layer norm of a pack's values, rounded.
  __device__ __forceinline__ Packed<Io, kPack> normalised(
      const float (&values)[kPack], const Packed<float, kPack>& weight, const Packed<float, kPack>& bias) const {
    float w[kPack], b[kPack];
    unpack(weight, w);
    unpack(bias, b);
#pragma unroll
    for (int j = 0; j < kPack; ++j) w[j] = fmaf((values[j] - mean_) * scale_, w[j], b[j]);
    Packed<Io, kPack> packed;
    pack(w, packed);
    return packed;
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static_assert(32 % kWarps == 0, "the lanes of a warp add up the warps");

  __device__ __forceinline__ void add_delta(int i) {
    float delta[kPack];
    unpack(x_[i], values_[i]);
    unpack(delta_[i], delta);
#pragma unroll
    for (int j = 0; j < kPack; ++j) values_[i][j] += delta[j];
  }

  // From each warp's mean and squared distances from it to the token's.
  __device__ __forceinline__ void combine(float2 own) {
    __shared__ float2 exchange[2][kWarps];
    float2(&warps)[kWarps] = exchange[turn_];
    turn_ ^= 1;  // the slower warps may still read when the next token's sums are written
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    const float origin = warps[0].x;
    const float2 other = warps[threadIdx.x % kWarps];
    const float difference = other.x - origin, weighted = other_count_ * difference;
    const bool is_empty = other_count_ == 0.0f;
    const float sum = lane_sum<kWarps>(is_empty ? 0.0f : weighted);
    const float squares = lane_sum<kWarps>(is_empty ? 0.0f : fmaf(weighted, difference, other.y));
    const float num_channels = static_cast<float>(input_.num_channels), offset = sum / num_channels;
    mean_ = origin + offset;
    scale_ = rsqrtf((squares - sum * offset) / num_channels + kLayerNormEps);
  }

  __device__ __forceinline__ float live_channels(int warp) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int rest = input_.num_channels - i * kWidth - warp * (32 * kPack);
      count += rest < 0 ? 0 : rest < 32 * kPack ? rest : 32 * kPack;
    }
    return static_cast<float>(count);
  }

  const NormInput& input_;
  Packed<float, kPack> x_[kPacks];
  Packed<Io, kPack> delta_[kPacks];
  float values_[kPacks][kPack];
  float mean_, scale_;       // scale: 1 / sqrt(variance + eps)
  const float count_;        // channels of this warp
  const float other_count_;  // channels of the warp whose sums this lane takes
  int turn_ = 0;
};

}  // namespace albatross
