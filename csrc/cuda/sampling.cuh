// One row as the sampling kernel sees it: its tables, its adjusted logits a tile at a time, and sums over its block. Included by
// sampling.cu alone, which says how tiles, keys and weights are used.
#pragma once

#include "launch.cuh"
#include "sampling.h"

namespace albatross {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = 4;                    // groups of four neighbouring ids that a lane holds of a tile
constexpr int kLaneIds = 4 * kQuads;
constexpr int kTile = 32 * kLaneIds;
constexpr int kMaxTiles = kThreads;          // a thread looks after a tile
constexpr int kBins = kThreads;              // and after a bin
constexpr int kBinBits = 10;
constexpr int kListSize = 2048;
static_assert(kTile * kMaxTiles == kMaxSampledVocab && kBins == 1 << kBinBits, "a tile and a bin for each thread");

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kKeyBits = 26;                           // of the fraction of a key
constexpr float kKeyScale = 1 << kKeyBits;
constexpr uint32_t kKeyLimit = 42u << kKeyBits;        // weights from here on round to nothing
constexpr int kWeightBits = 40;                        // of the fraction of a weight; 2^19 ids stay far below 2^63
constexpr float kWeightScale = 1099511627776.0f;       // 2^kWeightBits

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ uint64_t fixed_weight(float weight) { return __float2ull_rz(weight * kWeightScale); }
__device__ __forceinline__ uint64_t weight_of_key(uint32_t key) {
  return fixed_weight(exp2f(__uint2float_rn(key) * (-1.0f / kKeyScale)));
}

// Keys from `first` to `last`: how many ids of what weight have them, and how many come before, being likelier.
struct KeyRange {
  uint32_t first, last, count_before, count;
  uint64_t weight_before, weight;
};

struct SampledRow {
  // The row: written once by thread 0.
  const float* logits;
  const float* counts;
  const uint32_t* allowed;
  const int32_t* edit_ids;
  const float* edit_values;
  SlotRecord record;
  float inverse_repetition;
  float limits_rate, draw_rate;  // log2(e) / temperature, as the limits and as the draw see it
  int num_tiles;
  bool bans_stops;

  float highest;  // adjusted logit
  float tile_max[kMaxTiles];
  float tile_sum[kMaxTiles];     // of exp(logit - tile_max), of the ids that stay
  bool tile_is_seen[kMaxTiles];  // holds an id with a count
  uint32_t bin_count[kBins], bin_low[kBins], bin_high[kBins];
  uint32_t list[kListSize];  // keys from list_first to list_last, if list_count fits
  uint32_t list_first, list_last, list_count;
  uint64_t warp_sums[kWarps];
  float warp_max[kWarps];
  KeyRange range;
  bool is_found;
  int tile;
  double place;  // of the draw in its tile's mass, in [0, 1)
  int64_t token;
};

// Saturates; a forbidden id has the highest key.
__device__ __forceinline__ uint32_t key_of(const SampledRow& s, float logit) {
  return GPU_FLOAT_TO_UINT((s.highest - logit) * (s.limits_rate * kKeyScale));
}

// Two kernels are built: rows of logits and counts are read 16 bytes at a time, or id by id where they do not lie so.
template <bool kQuads>
struct KernelParams : SampleParams {
  static constexpr bool kHasQuads = kQuads;
};

template <typename P>
__device__ __forceinline__ void load_quad(const float* row, int id, const P& p, float* x) {
  if (P::kHasQuads && id < p.vocab_size) {
    unpack(load_packed<float, 4>(row + id), x);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = id + i < p.vocab_size ? row[id + i] : 0.0f;
}

__device__ __forceinline__ int first_id(int tile, int quad) {
  return tile * kTile + quad * 128 + static_cast<int>(threadIdx.x % 32) * 4;
}

// Adds the edits that fall into the tile. Whole warp.
__device__ __forceinline__ void add_edits(const SampledRow& s, int tile, float (&x)[kLaneIds]) {
  const int lane = threadIdx.x % 32;
  for (int begin = 0; begin < s.record.num_edits; begin += 32) {
    const bool is_edit = begin + lane < s.record.num_edits;
    const int32_t entry = is_edit ? s.edit_ids[begin + lane] : 0;
    const int place = (entry & 0x7fffffff) - tile * kTile;
    const bool is_here = is_edit && place >= 0 && place < kTile;
    float value = is_here ? s.edit_values[begin + lane] : 0.0f;
    if (entry < 0 && s.bans_stops) value = -infinity();
    for (uint32_t left = GPU_BALLOT(is_here); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const int target = GPU_SHFL(place, source);
      const float change = GPU_SHFL(value, source);
      const int element = target % 128 / 4 == lane ? target / 128 * 4 + target % 4 : -1;
#pragma unroll
      for (int i = 0; i < kLaneIds; ++i) x[i] += i == element ? change : 0.0f;
    }
  }
}

// Returns whether any of the lane's ids was drawn before.
template <typename P>
__device__ __forceinline__ bool penalise(const P& p, const SampledRow& s, int tile, float (&x)[kLaneIds]) {
  bool is_seen = false;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    float counts[4];
    load_quad(s.counts, first_id(tile, quad), p, counts);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(counts[i] > 0.0f)) continue;
      // Spelled out, so that every pass over the row gets the same bits.
      float& logit = x[quad * 4 + i];
      logit = fmaf(logit, logit > 0.0f ? s.inverse_repetition : s.record.repetition, -s.record.presence);
      logit = fmaf(-s.record.frequency, counts[i], logit);
      is_seen = true;
    }
  }
  return is_seen;
}

struct TileFacts {
  bool is_finite, is_seen;
};

// Adjusted logits of the lane's ids of a tile, first_id(tile, quad) + i in x[4 quad + i]; -inf for what must not be drawn.
// Whole warp.
template <typename P>
__device__ __forceinline__ TileFacts load_tile(const P& p, const SampledRow& s, int tile, float (&x)[kLaneIds]) {
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) load_quad(s.logits, first_id(tile, quad), p, x + 4 * quad);
  TileFacts facts{true, false};
#pragma unroll
  for (int i = 0; i < kLaneIds; ++i) facts.is_finite &= fabsf(x[i]) < infinity();
  if (s.record.num_edits > 0) add_edits(s, tile, x);
  if (s.counts != nullptr) facts.is_seen = penalise(p, s, tile, x);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int id = first_id(tile, quad);
    uint32_t banned = 15;
    if (id < p.vocab_size) {
      const uint32_t word = p.forbidden[id / 32] | (s.allowed == nullptr ? 0u : ~s.allowed[id / 32]);
      const int excess = id + 4 - p.vocab_size;
      banned = (word >> id % 32 & 15) | (excess > 0 ? 15u << (4 - excess) : 0u);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (banned >> i & 1) x[4 * quad + i] = -infinity();
    }
  }
  return facts;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) value = fmaxf(value, GPU_SHFL_XOR(value, mask));
  return value;
}

__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t before = GPU_SHFL_UP(static_cast<unsigned long long>(value), distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// Sum over all threads up to this one, and over all.
__device__ __forceinline__ uint64_t block_scan(SampledRow& s, uint64_t value, uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t in_warp = warp_scan(value);
  if (lane == 31) s.warp_sums[warp] = in_warp;
  __syncthreads();
  const uint64_t sums = warp_scan(s.warp_sums[lane]);
  total = GPU_SHFL(static_cast<unsigned long long>(sums), 31);
  const uint64_t before = GPU_SHFL(static_cast<unsigned long long>(sums), warp == 0 ? 0 : warp - 1);
  __syncthreads();
  return in_warp + (warp == 0 ? 0 : before);
}

}  // namespace albatross
