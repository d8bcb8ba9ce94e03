// From raw products to the scaled vectors of a chunk in shared memory (tmix_prefill.cu): A, R, B, K and V, by one warp.
#pragma once

#include "chunk.cuh"
#include "tmix.cuh"

#include <cstddef>

namespace albatross {

// By the first 128 threads, 16 bytes each.
__device__ __forceinline__ void load_constants(const TmixPrefillParams& p, int64_t head, Constants& constants) {
  const float* const sources[kNumConstants] = {p.constants.w0, p.constants.a0, p.constants.v0, p.constants.k_k,
                                               p.constants.k_a, p.readout.r_k, p.readout.ln_weight, p.readout.ln_bias};
  constexpr int kParts = kHeadSize / 4;
  const int which = threadIdx.x / kParts, part = threadIdx.x % kParts;
  const float* source = nullptr;
#pragma unroll
  for (int i = 0; i < kNumConstants; ++i) source = which == i ? sources[i] : source;
  if (which >= kNumConstants) return;
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (source != nullptr) values = reinterpret_cast<const float4*>(source + head * kHeadSize)[part];
  const float scale = which == kW0 || which == kA0 || which == kV0 ? -kLog2E : 1.0f;
  reinterpret_cast<float4*>(constants[which])[part % 2 * kPieces + part / 2] =
      make_float4(values.x * scale, values.y * scale, values.z * scale, values.w * scale);
}

// The tokens of one chunk, of which the first `count` are there.
struct Span {
  int64_t first;
  int count;
};

// A lane's piece of its tokens in one matrix. In the place of tokens that a chunk lacks stands its last one, so that all loads
// are alike and on their way at once; whoever uses them takes from those all by which they would change the state.
struct RowLoader {
  const TmixPrefillParams& p;
  const Span span;
  const int64_t head;
  const int piece, first;  // of the lane

  __device__ __forceinline__ void operator()(const Rows& rows, uint4 (&out)[kTokens]) const {
    const __half* const begin = begin_of<__half>(rows, span.first) + head * kHeadSize;  // the same for all lanes
    const uint32_t stride = static_cast<uint32_t>(rows.stride);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) out[i] = load_global(begin + (min(first + i, span.count - 1) * stride + piece * kPack));
  }
  __device__ __forceinline__ bool has(int i) const { return first + i < span.count; }
};

// Calls for the lines of a chunk's rows of one head, a row a line, long before they are read.
__device__ __forceinline__ void prefetch(const TmixPrefillParams& p, const Span& span, int64_t head, int lane) {
  const int token = lane % kChunk;
  if (token >= span.count) return;
  const Rows* const rows[2][4] = {{&p.products.w, &p.products.k, &p.products.a, &p.r},
                                  {&p.products.v, &p.g, &p.products.v_gate, &p.products.v_first}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Rows& one = lane < kChunk ? *rows[0][i] : *rows[1][i];
    if (one.data != nullptr) prefetch_line(begin_of<__half>(one, span.first + token) + head * kHeadSize);
  }
}

constexpr uint32_t kTileA = offsetof(Stage, a), kTileR = offsetof(Stage, r), kTileB = offsetof(Stage, b);
constexpr uint32_t kTileK = offsetof(Stage, k), kScoreA = offsetof(Stage, scores), kScoreR = kScoreA + sizeof(Tile);
constexpr uint32_t kScoreB = kScoreR + sizeof(Tile), kScoreK = kScoreB + sizeof(Tile);

// The same piece i rows further on, from a row that is a multiple of 4, i less than 4.
__device__ __forceinline__ SharedAddress next_row(SharedAddress address, int i) { return (address ^ (i << 4)) + i * 128; }

// Powers of two that keys and receptances are multiplied by, so that K and R are within fp16's range, and values divided by the
// first: 1 but for numbers near a thousand and beyond. Values must be within fp16 even so: |k v| to about 2^31, which no state of
// fp16 holds.
struct Scales {
  float key = 1.0f, receptance = 1.0f;
};

// V as the state takes it.
__device__ __forceinline__ void stage_values(
    const RowLoader& load, const Constants& constants, float scale, Stage& stage, int lane) {
  const SharedAddress tile = address_of(&stage.v) + place_of(load.first, lane % kPieces);
  const int piece = lane % kPieces;
  const bool is_gated = load.p.products.v_gate.data != nullptr;
  uint4 v[kTokens], logit[kTokens], v_first[kTokens];
  load(load.p.products.v, v);
  if (is_gated) load(load.p.products.v_gate, logit), load(load.p.products.v_first, v_first);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float own[kPack];
    read_piece(v[i], own);
    if (is_gated) {
      float first[kPack], gate[kPack], v0[kPack];
      read_piece(v_first[i], first), read_piece(logit[i], gate);
      read_constants(constants[kV0], piece, v0);
#pragma unroll
      for (int j = 0; j < kPack; ++j) own[j] = fmaf(first[j] - own[j], sigmoid_of(gate[j], v0[j]), own[j]);
    }
    if (scale != 1.0f) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) own[j] *= scale;
    }
    store_shared(next_row(tile, i), pieces_of(own));
  }
}

// A, R, B and K, and what scales them. Returns whether a number of K or R passed fp16's range, in any lane.
// With kIsScaled, `scales` are applied and become the largest absolutes of K and R.
template <bool kIsScaled>
__device__ __forceinline__ bool stage_keys(
    const RowLoader& load, const Constants& constants, Scales& scales, Stage& stage, int lane) {
  const int piece = lane % kPieces, group = lane / kPieces;
  const SharedAddress place = address_of(&stage) + place_of(load.first, piece);
  uint4 w[kTokens], k[kTokens], a[kTokens], r[kTokens];
  load(load.p.products.w, w), load(load.p.products.k, k), load(load.p.products.a, a), load(load.p.r, r);
  if (load.span.count < kChunk) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (!load.has(i)) k[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // Sums of binary logarithms of the decays, over the lane's tokens; `offset` adds those of the groups before, and takes off that
  // of the middle.
  float sums[kTokens][kPack], offset[kPack];
  {
    float w0[kPack];
    read_constants(constants[kW0], piece, w0);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float logit[kPack];
      read_piece(w[i], logit);
      const float scale = load.has(i) ? -kDecayScale * kLog2E : 0.0f;
#pragma unroll
      for (int j = 0; j < kPack; ++j) sums[i][j] = fmaf(scale, sigmoid_of(logit[j], w0[j]), i == 0 ? 0.0f : sums[i - 1][j]);
    }
  }
  float early[kPack], rest[kPack];  // exp(G_m), exp(G_C - G_m)
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    float total = sums[kTokens - 1][j];
#pragma unroll
    for (int distance = 1; distance < kGroups; distance *= 2) {
      const float other = GPU_SHFL_UP(total, distance * kPieces);
      if (group >= distance) total += other;
    }
    const float before = total - sums[kTokens - 1][j];
    const float middle = GPU_SHFL(total, kMiddle / kTokens * kPieces + piece), whole = GPU_SHFL(total, 32 - kPieces + piece);
    offset[j] = before - middle;
    early[j] = exp2_of(middle);
    rest[j] = exp2_of(whole - middle);
  }
  if (group == 0) {
    float whole[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) whole[j] = early[j] * rest[j];
    stage.whole[0][piece] = make_float4(whole[0], whole[1], whole[2], whole[3]);
    stage.whole[1][piece] = make_float4(whole[4], whole[5], whole[6], whole[7]);
  }

  float before[kPack];  // exp(G_(t-1) - G_m)
#pragma unroll
  for (int j = 0; j < kPack; ++j) before[j] = exp2_of(offset[j]);
  uint32_t most = 0;  // the largest of a pair of numbers of K or R
  Scales largest{0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const SharedAddress row = next_row(place, i);
    float a0[kPack], k_k[kPack], k_a[kPack], r_k[kPack];  // read again for each token: registers are scarcer
    read_constants(constants[kA0], piece, a0), read_constants(constants[kKk], piece, k_k);
    read_constants(constants[kKa], piece, k_a), read_constants(constants[kRk], piece, r_k);
    float kk[kPack], gate[kPack], key[kPack], receptance[kPack], squares = 0.0f, bonus = 0.0f;
    read_piece(k[i], key), read_piece(a[i], gate), read_piece(r[i], receptance);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if constexpr (kIsScaled) key[j] *= scales.key, receptance[j] *= scales.receptance;
      gate[j] = sigmoid_of(gate[j], a0[j]);
      kk[j] = key[j] * k_k[j];
      squares = fmaf(kk[j], kk[j], squares);
      key[j] = fmaf(key[j], fmaf(gate[j], k_a[j], -k_a[j]), key[j]);
      bonus = fmaf(receptance[j] * key[j], r_k[j], bonus);
    }
    const float scale = reciprocal_root(squared_length(lane_sum<kPieces>(squares)));
    bonus = lane_sum<kPieces>(bonus);
    if (piece == 0) stage.bonus[load.first + i] = bonus;
    float out[kPack], from[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      kk[j] *= scale;
      out[j] = -kk[j] * before[j];
      before[j] = exp2_of(sums[i][j] + offset[j]);
      from[j] = exp2_of(-(sums[i][j] + offset[j]));
      receptance[j] *= before[j];
      if constexpr (kIsScaled) largest.receptance = fmaxf(largest.receptance, fabsf(receptance[j]));
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      kk[j] *= gate[j] * from[j];
      key[j] *= from[j];
      if constexpr (kIsScaled) largest.key = fmaxf(largest.key, fabsf(key[j]));
    }
    const uint4 r_score = pieces_of(receptance), k_score = pieces_of(key);
    store_shared(row + kScoreA, pieces_of(out));
    store_shared(row + kScoreR, r_score);
    store_shared(row + kScoreB, pieces_of(kk));
    store_shared(row + kScoreK, k_score);
    most = larger(larger(larger(larger(most, r_score.x), r_score.y), r_score.z), r_score.w);
    most = larger(larger(larger(larger(most, k_score.x), k_score.y), k_score.z), k_score.w);
#pragma unroll
    for (int j = 0; j < kPack; ++j) out[j] *= early[j], receptance[j] *= early[j], kk[j] *= rest[j], key[j] *= rest[j];
    store_shared(row + kTileA, pieces_of(out));
    store_shared(row + kTileR, pieces_of(receptance));
    store_shared(row + kTileB, pieces_of(kk));
    store_shared(row + kTileK, pieces_of(key));
  }
  if constexpr (kIsScaled) {
    scales = {__uint_as_float(reduce_max(__float_as_uint(largest.key))),
              __uint_as_float(reduce_max(__float_as_uint(largest.receptance)))};
  }
  return any_of_warp((most & 0xffffu) >= kInfinity || most >> 16 >= kInfinity);
}

// The power of two that brings a number below 2^15, if it is beyond: half of fp16's range.
__device__ __forceinline__ float scale_for(float largest) {
  constexpr uint32_t kExponent = 0x7f800000u;
  return largest < 32768.0f ? 1.0f : __uint_as_float(((2u * 127u + 14u) << 23) - (__float_as_uint(largest) & kExponent));
}

// The same where K or R passed fp16's range: once to see by how much, once to keep. Rare, so not inlined.
__device__ __noinline__ Scales stage_large_keys(RowLoader load, const Constants& constants, Stage& stage, int lane) {
  constexpr float kTiny = 1.0f / (1 << 20);
  Scales largest{kTiny, kTiny};
  __syncwarp();
  stage_keys<true>(load, constants, largest, stage, lane);
  const Scales scales{scale_for(largest.key / kTiny), scale_for(largest.receptance / kTiny)};
  largest = scales;
  __syncwarp();
  stage_keys<true>(load, constants, largest, stage, lane);
  return scales;
}

// All that `multiply_scores` and the consumers need.
__device__ __forceinline__ void stage_chunk(const RowLoader& load, const Constants& constants, Stage& stage, int lane) {
  Scales scales;
  float value_scale = 1.0f, unscale = 1.0f;
  if (stage_keys<false>(load, constants, scales, stage, lane)) {
    scales = stage_large_keys(load, constants, stage, lane);
    value_scale = 1.0f / scales.key, unscale = 1.0f / scales.receptance;
  }
  stage_values(load, constants, value_scale, stage, lane);
  if (lane == 0) stage.unscale = unscale;
}

}  // namespace albatross
