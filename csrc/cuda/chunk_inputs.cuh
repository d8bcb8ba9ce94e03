// From raw products to the scaled vectors of a chunk in shared memory (tmix_prefill.cu): A, R, B, K and V, by one warp.
#pragma once

#include "chunk_copies.cuh"

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

// Powers of two that keys and receptances are multiplied by, so that K, R and their products are within fp16's range, and values
// divided by the first: 1 but for numbers near a thousand and beyond. Values must be within fp16 even so: |k v| to about 2^31,
// which no state of fp16 holds.
struct Scales {
  float key = 1.0f, receptance = 1.0f;
};

// The length of a key or receptance of which each lane has a piece.
__device__ __forceinline__ float length_of(const float (&values)[kPack]) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kPack; ++j) squares = fmaf(values[j], values[j], squares);
  return sqrtf(lane_sum<kPieces>(squares));
}

// V as the state takes it.
template <bool kIsCopied, Pass kPass>
__device__ __forceinline__ void stage_values(const Share& share, const Constants& constants, float scale, Stage& stage) {
  const SharedAddress place = address_of(&stage) + place_of(share.first, share.piece);
  const TmixProducts& products = share.p.products;
  const bool is_gated = products.v_gate.data != nullptr;
  if (kIsCopied && kPass == Pass::kOutput && !is_gated) return;  // they lie where they should
  float v0[kPack];
  if (is_gated) read_constants(constants[kV0], share.piece, v0);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const SharedAddress row = next_row(place, i);
    float own[kPack];
    read_piece(piece_of<kIsCopied>(share, products.v, i, row + Raw<kPass>::kV), own);
    if (is_gated) {
      float first[kPack], gate[kPack];
      read_piece(piece_of<kIsCopied>(share, products.v_first, i, row + kTileFirst), first);
      read_piece(piece_of<kIsCopied>(share, products.v_gate, i, row + kTileGate), gate);
#pragma unroll
      for (int j = 0; j < kPack; ++j) own[j] = fmaf(first[j] - own[j], sigmoid_of(gate[j], v0[j]), own[j]);
    }
    if constexpr (!kIsCopied) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) own[j] *= scale;
    }
    store_shared(row + kTileV, pieces_of(own));
  }
}

// A, R, B and K, and what scales them; R and the bonus for the output alone. Returns whether a number of K or R passed fp16's
// range, in any lane.
// With kIsScaled, which reads from memory, `scales` are applied, and become the largest of what they are to keep within the
// range: the absolutes of K and R, and the lengths of keys and receptances, whose product no number of R K^T exceeds.
template <bool kIsScaled, Pass kPass>
__device__ __forceinline__ bool stage_keys(const Share& share, const Constants& constants, Scales& scales, Stage& stage) {
  const int piece = share.piece, group = share.first / kTokens;
  const SharedAddress place = address_of(&stage) + place_of(share.first, piece);
  const TmixProducts& products = share.p.products;
  constexpr bool kHasR = kPass == Pass::kOutput;

  // Sums of binary logarithms of the decays, over the lane's tokens; `offset` adds those of the groups before, and takes off that
  // of the middle.
  float sums[kTokens][kPack], offset[kPack];
  {
    float w0[kPack];
    read_constants(constants[kW0], piece, w0);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float logit[kPack];
      read_piece(piece_of<!kIsScaled>(share, products.w, i, next_row(place, i) + Raw<kPass>::kW), logit);
      const float scale = share.has(i) ? -kDecayScale * kLog2E : 0.0f;
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
    read_constants(constants[kKa], piece, k_a);
    if constexpr (kHasR) read_constants(constants[kRk], piece, r_k);
    float kk[kPack], gate[kPack], key[kPack], receptance[kPack], squares = 0.0f, bonus = 0.0f;
    uint4 raw_key = piece_of<!kIsScaled>(share, products.k, i, row + Raw<kPass>::kK);
    if (!share.has(i)) raw_key = make_uint4(0, 0, 0, 0);
    read_piece(raw_key, key);
    read_piece(piece_of<!kIsScaled>(share, products.a, i, row + Raw<kPass>::kA), gate);
    if constexpr (kHasR) read_piece(piece_of<!kIsScaled>(share, share.p.r, i, row + Raw<kPass>::kR), receptance);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if constexpr (kIsScaled) key[j] *= scales.key;
      if constexpr (kIsScaled && kHasR) receptance[j] *= scales.receptance;
      gate[j] = sigmoid_of(gate[j], a0[j]);
      kk[j] = key[j] * k_k[j];
      squares = fmaf(kk[j], kk[j], squares);
      key[j] = fmaf(key[j], fmaf(gate[j], k_a[j], -k_a[j]), key[j]);
      if constexpr (kHasR) bonus = fmaf(receptance[j] * key[j], r_k[j], bonus);
    }
    if constexpr (kIsScaled) {
      largest.key = fmaxf(largest.key, length_of(key));
      if constexpr (kHasR) largest.receptance = fmaxf(largest.receptance, length_of(receptance));
    }
    const float scale = reciprocal_root(squared_length(lane_sum<kPieces>(squares)));
    if constexpr (kHasR) {
      bonus = lane_sum<kPieces>(bonus);
      if (piece == 0) stage.bonus[share.first + i] = bonus;
    }
    float out[kPack], from[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      kk[j] *= scale;
      out[j] = -kk[j] * before[j];
      before[j] = exp2_of(sums[i][j] + offset[j]);
      from[j] = exp2_of(-(sums[i][j] + offset[j]));
      if constexpr (kHasR) receptance[j] *= before[j];
      if constexpr (kIsScaled && kHasR) largest.receptance = fmaxf(largest.receptance, fabsf(receptance[j]));
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      kk[j] *= gate[j] * from[j];
      key[j] *= from[j];
      if constexpr (kIsScaled) largest.key = fmaxf(largest.key, fabsf(key[j]));
    }
    const uint4 k_score = pieces_of(key);
    store_shared(row + kScoreA, pieces_of(out));
    store_shared(row + kScoreB, pieces_of(kk));
    store_shared(row + kScoreK, k_score);
    most = largest_of(most, k_score);
    if constexpr (kHasR) {
      const uint4 r_score = pieces_of(receptance);
      store_shared(row + kScoreR, r_score);
      most = largest_of(most, r_score);
#pragma unroll
      for (int j = 0; j < kPack; ++j) receptance[j] *= early[j];
      store_shared(row + kTileR, pieces_of(receptance));
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) out[j] *= early[j], kk[j] *= rest[j], key[j] *= rest[j];
    store_shared(row + kTileA, pieces_of(out));
    store_shared(row + kTileB, pieces_of(kk));
    store_shared(row + kTileK, pieces_of(key));
  }
  if constexpr (kIsScaled) {
    scales = {__uint_as_float(reduce_max(__float_as_uint(largest.key))),
              __uint_as_float(reduce_max(__float_as_uint(largest.receptance)))};
  }
  return passes_range(most);
}

}  // namespace albatross
