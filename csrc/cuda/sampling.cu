// The sampling law, one block a row: from raw logits to the drawn id. Called by csrc/sampling.cpp; knows nothing of torch.
// The law itself, in its order, is in python/albatross/reference/sampling.py.
//
// A row is cut into tiles of 512 ids, and a warp takes a tile at a time. The first pass finds each tile's highest adjusted logit
// and its mass relative to that, so that a row without limits is read once: then the tile is drawn, then, in the tile read again,
// the id. Limits are found without a sort. With t = (highest - logit) log2(e) / temperature, an id's key is t in fixed point and
// its weight 2^-t in fixed point too. 1,024 bins over the keys hold how many ids and how much weight fall into them; the bin in
// which the limit is reached is split again, until it holds one id or ids of one key. Keys of few ids are kept in a list
// meanwhile, so that a row is read once more, seldom twice. Whatever cannot reach a limit is passed over, whole tiles by their maxima.
//
// All sums of more than one warp are sums of integers, which no order changes: a draw is the same in every run and every batch.
// Bytes moved: a row's logits once, its masks and, with penalties, its counts once; the rest comes from the L2 cache.
#include "sampling.cuh"

#include "constants.h"

namespace albatross {
inline namespace sampling_file {

// Sum of 2^((logit - tile_max) rate) over the ids of a tile whose key does not exceed `last`, the same in every lane.
template <bool kHasLast>
__device__ __forceinline__ float tile_mass(const SampledRow& s, const float (&x)[kLaneIds], float tile_max, float rate,
                                           uint32_t last) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneIds; ++i) {
    if (!kHasLast || key_of(s, x[i]) <= last) sum += exp2f((x[i] - tile_max) * rate);
  }
  return lane_sum<32>(sum);
}

// The first pass: maxima, masses (unless the rate is 0) and seen ids of all tiles. Returns false, in all threads, if a logit is
// not finite.
template <typename P>
__device__ __forceinline__ bool read_row(const P& p, SampledRow& s, float rate) {
  bool is_finite = true;
  for (int tile = threadIdx.x / 32; tile < s.num_tiles; tile += kWarps) {
    float x[kLaneIds];
    const TileFacts facts = load_tile(p, s, tile, x);
    is_finite &= facts.is_finite;
    float highest = x[0];
#pragma unroll
    for (int i = 1; i < kLaneIds; ++i) highest = fmaxf(highest, x[i]);
    highest = warp_max(highest);
    const bool has_mass = rate > 0.0f && highest > -infinity();
    const float sum = has_mass ? tile_mass<false>(s, x, highest, rate, 0) : 0.0f;
    const bool is_seen = GPU_BALLOT(facts.is_seen) != 0;
    if (threadIdx.x % 32 == 0) {
      s.tile_max[tile] = highest;
      s.tile_sum[tile] = sum;
      s.tile_is_seen[tile] = is_seen;
    }
  }
  return __syncthreads_or(!is_finite) == 0;
}

__device__ __forceinline__ void find_highest(SampledRow& s) {
  const int thread = threadIdx.x;
  const float in_warp = warp_max(thread < s.num_tiles ? s.tile_max[thread] : -infinity());
  if (thread % 32 == 0) s.warp_max[thread / 32] = in_warp;
  __syncthreads();
  const float highest = warp_max(s.warp_max[thread % 32]);
  if (thread == 0) s.highest = highest;
  __syncthreads();
}

// Weight of the thread's tile relative to the highest logit.
__device__ __forceinline__ uint64_t tile_weight(const SampledRow& s, float rate) {
  const int tile = threadIdx.x;
  if (tile >= s.num_tiles || !(s.tile_sum[tile] > 0.0f)) return 0;
  return fixed_weight(s.tile_sum[tile] * exp2f((s.tile_max[tile] - s.highest) * rate));
}

__device__ __forceinline__ void add_to_bin(SampledRow& s, uint32_t bin, uint32_t key) {
  const uint64_t weight = weight_of_key(key);
  const uint32_t low = static_cast<uint32_t>(weight);
  atomicAdd(&s.bin_count[bin], 1u);
  const uint32_t before = atomicAdd(&s.bin_low[bin], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (before + low < before ? 1u : 0u);
  if (high != 0) atomicAdd(&s.bin_high[bin], high);
}

// Adds the keys within the range to the bins, read from the row's tiles, and lists them.
template <typename P>
__device__ __forceinline__ void fill_from_row(const P& p, SampledRow& s, uint32_t first,
                                              uint32_t last, int shift) {
  const int lane = threadIdx.x % 32;
  for (int tile = threadIdx.x / 32; tile < s.num_tiles; tile += kWarps) {
    if (key_of(s, s.tile_max[tile]) > last) continue;
    float x[kLaneIds];
    load_tile(p, s, tile, x);
#pragma unroll
    for (int i = 0; i < kLaneIds; ++i) {
      const uint32_t key = key_of(s, x[i]);
      const bool is_within = key >= first && key <= last;
      const uint32_t within = GPU_BALLOT(is_within);
      if (within == 0) continue;
      uint32_t begin = 0;
      if (lane == 0) begin = atomicAdd(&s.list_count, static_cast<uint32_t>(__popc(within)));
      const uint32_t place = GPU_SHFL(begin, 0) + __popc(within & ((1u << lane) - 1));
      if (!is_within) continue;
      add_to_bin(s, (key - first) >> shift, key);
      if (place < kListSize) s.list[place] = key;
    }
  }
}

enum class Source { kTileMaxima, kRow };

// Makes a range of keys the one to be searched.
__device__ __forceinline__ void set_range(SampledRow& s, uint32_t last) {
  __syncthreads();
  if (threadIdx.x == 0) s.range = {0, last, 0, 0, 0, 0};
  __syncthreads();
}

// Narrows the range to the bin in which ids (or weights) sum up to `goal`, counted from the likeliest. False if they do not.
template <typename P>
__device__ bool narrow(const P& p, SampledRow& s, Source source, bool is_by_weight,
                       uint64_t goal) {
  const int thread = threadIdx.x;
  const uint32_t first = s.range.first, last = s.range.last;
  const int shift = max(0, 32 - __clz(last - first) - kBinBits);
  const bool is_listed = s.list_count <= kListSize && s.list_first <= first && last <= s.list_last;
  __syncthreads();
  s.bin_count[thread] = s.bin_low[thread] = s.bin_high[thread] = 0;
  if (thread == 0) {
    s.is_found = false;
    if (source == Source::kRow && !is_listed) s.list_first = first, s.list_last = last, s.list_count = 0;
  }
  __syncthreads();
  if (source == Source::kTileMaxima) {
    const uint32_t key = thread < s.num_tiles ? key_of(s, s.tile_max[thread]) : ~0u;
    if (key <= last) add_to_bin(s, (key - first) >> shift, key);
  } else if (is_listed) {
    for (uint32_t i = thread; i < s.list_count; i += kThreads) {
      const uint32_t key = s.list[i];
      if (key >= first && key <= last) add_to_bin(s, (key - first) >> shift, key);
    }
  } else {
    fill_from_row(p, s, first, last, shift);
  }
  __syncthreads();
  const uint64_t count = s.bin_count[thread], weight = (static_cast<uint64_t>(s.bin_high[thread]) << 32) + s.bin_low[thread];
  uint64_t count_before = s.range.count_before - count, weight_before = s.range.weight_before - weight, total;
  count_before += block_scan(s, count, total);
  weight_before += block_scan(s, weight, total);
  const uint64_t before = is_by_weight ? weight_before : count_before, within = is_by_weight ? weight : count;
  if (before < goal && goal <= before + within) {
    const uint64_t begin = first + (static_cast<uint64_t>(thread) << shift), end = begin + (uint64_t{1} << shift) - 1;
    s.range = {static_cast<uint32_t>(begin), static_cast<uint32_t>(end < last ? end : last), static_cast<uint32_t>(count_before),
               static_cast<uint32_t>(count), weight_before, weight};
    s.is_found = true;
  }
  __syncthreads();
  return s.is_found;
}

// Narrows the range to the id, or the ids of one key, with which the goal is reached. False if they do not.
template <typename P>
__device__ bool search(const P& p, SampledRow& s, bool is_by_weight, uint64_t goal) {
  do {
    if (!narrow(p, s, Source::kRow, is_by_weight, goal)) return false;
  } while (s.range.count > 1 && s.range.last > s.range.first);
  return true;
}

// Weight of the top_k likeliest ids, with the range narrowed to the last of them; `total` if all of any weight are among them.
template <typename P>
__device__ uint64_t search_top_k(const P& p, SampledRow& s, uint64_t total) {
  const uint32_t top_k = s.record.top_k;
  set_range(s, kKeyLimit);
  // The top_k best tiles hold top_k ids at least as good as the worst of their maxima.
  if (top_k <= static_cast<uint32_t>(s.num_tiles) && narrow(p, s, Source::kTileMaxima, false, top_k)) set_range(s, s.range.last);
  if (!search(p, s, false, top_k)) return total;
  return s.range.weight_before + (top_k - s.range.count_before) * (s.range.weight / s.range.count);
}

// Highest key that the row's limits leave. `weight` is that of all ids, needed with top_p alone.
template <typename P>
__device__ uint32_t last_key(const P& p, SampledRow& s, uint64_t weight) {
  if (threadIdx.x == 0) s.list_first = 1, s.list_last = 0, s.list_count = 0;  // covers no range
  set_range(s, kKeyLimit);
  if (s.record.top_k > 0 && s.record.top_k < p.vocab_size) weight = search_top_k(p, s, weight);
  const float top_p = s.record.top_p;
  if (top_p < 1.0f) {
    // What the limit leaves out weighs (1 - top_p) of all, so its likeliest id weighs that by the number of ids at least.
    const float least = (1.0f - top_p) * static_cast<float>(weight) / static_cast<float>(p.vocab_size);
    const float most_t = fmaxf(kWeightBits + 0.01f - log2f(least), 0.0f);
    set_range(s, min(s.range.last, GPU_FLOAT_TO_UINT(most_t * kKeyScale)));
    search(p, s, true, static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(weight))));
  }
  const float min_p = s.record.min_p;
  return min_p > 0.0f ? min(s.range.last, GPU_FLOAT_TO_UINT(-log2f(min_p) * kKeyScale)) : s.range.last;
}

// Masses of the tiles again, of the ids that stay.
template <typename P>
__device__ __forceinline__ void sum_kept(const P& p, SampledRow& s, uint32_t last) {
  for (int tile = threadIdx.x / 32; tile < s.num_tiles; tile += kWarps) {
    const float highest = s.tile_max[tile];
    float sum = 0.0f;
    if (key_of(s, highest) <= last) {
      float x[kLaneIds];
      load_tile(p, s, tile, x);
      sum = tile_mass<true>(s, x, highest, s.draw_rate, last);
    }
    if (threadIdx.x % 32 == 0) s.tile_sum[tile] = sum;
  }
  __syncthreads();
}

// First word of Philox4x32-10 (Salmon et al., SC 2011) with the key (seed) and the counter (position, 0, choice, 0).
__device__ __forceinline__ uint32_t random_word(const SlotRecord& record) {
  uint32_t c0 = record.position, c1 = 0, c2 = record.choice, c3 = 0, k0 = record.seed_low, k1 = record.seed_high;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9, k1 += 0xBB67AE85;
  }
  return c0;
}

// Draws the tile: the first at which the sum of the weights exceeds (word + 0.5) / 2^32 of their total.
__device__ __forceinline__ void draw_tile(SampledRow& s) {
  const uint64_t weight = tile_weight(s, s.draw_rate);
  uint64_t total;
  const uint64_t before = block_scan(s, weight, total) - weight;
  const uint64_t odd = 2 * uint64_t{random_word(s.record)} + 1;
  const uint64_t target = (__umul64hi(total, odd) << 31) | (total * odd >> 33);
  if (before <= target && target < before + weight) {
    s.tile = threadIdx.x;
    s.place = static_cast<double>(target - before) / static_cast<double>(weight);
  }
  __syncthreads();
}

// Draws the id in the drawn tile; one warp. Weights are relative to the tile's maximum, in which small masses lose nothing.
template <typename P>
__device__ __forceinline__ void draw_id(const P& p, SampledRow& s, uint32_t last) {
  const int tile = s.tile;
  float x[kLaneIds];
  load_tile(p, s, tile, x);
#pragma unroll
  for (int i = 0; i < kLaneIds; ++i) {
    const bool stays = last == ~0u || key_of(s, x[i]) <= last;
    x[i] = stays ? exp2f((x[i] - s.tile_max[tile]) * s.draw_rate) : 0.0f;
  }
  uint64_t up_to[kQuads], total = 0;  // weight of all ids up to the end of each of the lane's quads
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const float sum = ((x[4 * quad] + x[4 * quad + 1]) + x[4 * quad + 2]) + x[4 * quad + 3];
    up_to[quad] = total + warp_scan(fixed_weight(sum));
    total = GPU_SHFL(static_cast<unsigned long long>(up_to[quad]), 31);
  }
  uint64_t target = static_cast<uint64_t>(s.place * static_cast<double>(total));
  if (target >= total) target = total - 1;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    // Sums of a quad's floats in order never fall, so their fixed weights meet the target in exactly one place.
    float sum = ((x[4 * quad] + x[4 * quad + 1]) + x[4 * quad + 2]) + x[4 * quad + 3];
    const uint64_t before = up_to[quad] - fixed_weight(sum);
    if (target < before || target >= up_to[quad]) continue;
    int place = 0;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      sum += x[4 * quad + i];
      if (before + fixed_weight(sum) <= target) place = i + 1;
    }
    s.token = first_id(tile, quad) + place;
  }
}

// The lowest id with the highest logit.
template <typename P>
__device__ __forceinline__ void choose_highest(const P& p, SampledRow& s) {
  const int thread = threadIdx.x;
  if (thread == 0) s.tile = kMaxTiles;
  __syncthreads();
  if (thread < s.num_tiles && s.tile_max[thread] == s.highest) atomicMin(&s.tile, thread);
  __syncthreads();
  if (thread >= 32) return;
  float x[kLaneIds];
  load_tile(p, s, s.tile, x);
  int best = p.vocab_size;
#pragma unroll
  for (int i = kLaneIds - 1; i >= 0; --i) {
    if (x[i] == s.highest) best = first_id(s.tile, i / 4) + i % 4;
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) best = min(best, GPU_SHFL_XOR(best, mask));
  if (thread == 0) s.token = best;
}

// One step of the slot's counts: all decay, though never to nothing, and the drawn id counts one more.
template <typename P>
__device__ __forceinline__ void count_token(const P& p, SampledRow& s, float* counts) {
  const float decay = s.record.decay;
  if (decay < 1.0f) {
    for (int tile = threadIdx.x / 32; tile < s.num_tiles; tile += kWarps) {
      if (!s.tile_is_seen[tile]) continue;
      for (int i = threadIdx.x % 32; i < kTile; i += 32) {
        const int id = tile * kTile + i;
        if (id < p.vocab_size && counts[id] > 0.0f) counts[id] = fmaxf(counts[id] * decay, kLeastCount);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) counts[s.token] += 1.0f;
}

template <typename P>
__device__ __forceinline__ void open_row(const P& p, SampledRow& s, int64_t row, int64_t slot) {
  s.record = p.records[slot];
  s.logits = p.logits + row * p.logits_stride;
  s.counts = (s.record.flags & kPenalties) != 0 && p.counts != nullptr ? p.counts + slot * p.vocab_size : nullptr;
  s.allowed = p.allowed == nullptr ? nullptr : p.allowed + row * ((p.vocab_size + 31) / 32);
  s.edit_ids = p.edit_ids + slot * p.edit_capacity;
  s.edit_values = p.edit_values + slot * p.edit_capacity;
  s.record.num_edits = min(s.record.num_edits, p.edit_capacity);
  s.inverse_repetition = 1.0f / s.record.repetition;
  s.draw_rate = kLog2E / s.record.temperature;
  s.limits_rate = (s.record.flags & kClassic) != 0 ? kLog2E : s.draw_rate;
  s.num_tiles = (p.vocab_size + kTile - 1) / kTile;
  s.bans_stops = s.record.position < s.record.min_tokens;
  s.tile = 0;
}

// Chooses the row's id: s.token, or false for a row with a logit that is not finite or no id to draw.
template <typename P>
__device__ __forceinline__ bool choose(const P& p, SampledRow& s) {
  const bool is_greedy = (s.record.flags & kGreedy) != 0, has_limits = (s.record.flags & kLimits) != 0;
  const bool needs_mass = !is_greedy && (!has_limits || s.record.top_p < 1.0f);
  const bool is_finite = read_row(p, s, !needs_mass ? 0.0f : has_limits ? s.limits_rate : s.draw_rate);
  find_highest(s);
  if (!is_finite || !(fabsf(s.highest) < infinity())) return false;
  if (is_greedy) {
    choose_highest(p, s);
    return true;
  }
  uint32_t last = ~0u;
  if (has_limits) {
    uint64_t total;
    block_scan(s, tile_weight(s, s.limits_rate), total);
    last = last_key(p, s, total);
    sum_kept(p, s, last);
  }
  draw_tile(s);
  if (threadIdx.x < 32) draw_id(p, s, last);
  return true;
}

template <typename P>
__global__ void __launch_bounds__(kThreads) sample_kernel(const P p) {
  wait_for_inputs();
  allow_dependents();
  __shared__ SampledRow s;
  const int64_t row = blockIdx.x;
  const int64_t slot = p.slots[row];
  if (slot < 0) return;
  if (slot >= p.num_slots) GPU_TRAP();  // would corrupt memory: a caller's bug
  if (threadIdx.x == 0) open_row(p, s, row, slot);
  __syncthreads();
  const bool is_good = choose(p, s);
  __syncthreads();
  if (is_good && s.counts != nullptr) count_token(p, s, p.counts + slot * p.vocab_size);
  if (threadIdx.x != 0) return;
  const int64_t token = is_good ? s.token : 0;
  p.drawn[row] = token;
  p.is_bad[row] = !is_good;
  p.last_token[slot] = token;
  p.records[slot].position = s.record.position + 1;
}

template <bool kHasQuads>
const char* launch(const SampleParams& params, gpu_stream_t stream) {
  using P = KernelParams<kHasQuads>;
  return launch_dependent(sample_kernel<P>, dim3(static_cast<unsigned>(params.num_rows)), kThreads, 0, stream, P{params});
}

}  // namespace sampling_file

const char* launch_sample(const SampleParams& params, void* stream) {
  if (params.num_rows == 0) return nullptr;
  return (params.has_quads ? launch<true> : launch<false>)(params, static_cast<gpu_stream_t>(stream));
}

}  // namespace albatross
