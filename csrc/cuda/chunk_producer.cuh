// The producers of the chunked kernel (tmix_prefill.cu): all that does not depend on the state, and from Y to what the output
// matrix multiplies.
#pragma once

#include "chunk_inputs.cuh"

namespace albatross {

// The 16x16 products of A, R, B and K, by one warp, in their place. T = (I - L)^-1 is (I + L)(I + L^2)(I + L^4)(I + L^8), since
// the 16th power of a strictly lower L is zero: the sum is carried in float, the factors are rounded. Returns whether a number of
// R K^T, A K^T or R B^T passed fp16's range, in any lane. A summary has nothing of R.
template <Pass kPass>
__device__ __forceinline__ bool multiply_scores(Stage& stage, int lane) {
  const SharedAddress at_a = address_of(&stage.scores) + place_a(lane), at_b = address_of(&stage.scores) + place_b(lane);
  constexpr uint32_t kTile = sizeof(Tile);
  constexpr bool kHasR = kPass == Pass::kOutput;
  Product ab{}, ak{}, rb{}, rk{};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t a[4], r[4], b[4], k[4];
    load_matrices(a, columns(at_a, q));
    if constexpr (kHasR) load_matrices(r, columns(at_a, q) + kTile);
    load_matrices(b, columns(at_b, q) + 2 * kTile);
    load_matrices(k, columns(at_b, q) + 3 * kTile);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(ab[n], a, b[2 * n], b[2 * n + 1]);
      mma(ak[n], a, k[2 * n], k[2 * n + 1]);
      if constexpr (kHasR) mma(rb[n], r, b[2 * n], b[2 * n + 1]);
      if constexpr (kHasR) mma(rk[n], r, k[2 * n], k[2 * n + 1]);
    }
  }
  keep_lower(ab, lane, -1), keep_lower(ak, lane, -1), keep_lower(rb, lane, 0), keep_lower(rk, lane, 0);
  __syncwarp();  // all have read A, whose place the squares take
  const uint4 squares[3] = {as_square(ak), as_square(rb), as_square(rk)};
  stage.squares[kAK][lane] = squares[0];
  if constexpr (kHasR) stage.squares[kRB][lane] = squares[1], stage.squares[kRK][lane] = squares[2];

  // Each power beside its transpose, so that no product waits for registers to change lanes.
  uint32_t power[4], power_transposed[4], operand[4];
  as_operand(ab, power);
  transpose(power, power_transposed);
  Product& inverse = ab;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane % 4 * 2 + i == lane / 4) inverse[0][i] = inverse[1][2 + i] = 1.0f;
  }
#pragma unroll
  for (int length = 2; length < kChunk; length *= 2) {
    Product next{}, next_transposed{};
    multiply(next, power, power_transposed);
    multiply(next_transposed, power_transposed, power);
    as_operand(next, power);
    as_operand(next_transposed, power_transposed);
    as_operand(inverse, operand);
    multiply(inverse, operand, power_transposed);
  }
  stage.squares[kT][lane] = as_square(inverse);
  return passes_range(largest_of(largest_of(largest_of(0, squares[0]), squares[1]), squares[2]));
}

// The power of two that brings a number below 2^15, half of fp16's range, if it is beyond.
__device__ __forceinline__ float scale_for(float largest) {
  constexpr uint32_t kExponent = 0x7f800000u;
  return largest < 32768.0f ? 1.0f : __uint_as_float(((2u * 127u + 14u) << 23) - (__float_as_uint(largest) & kExponent));
}

// The whole chunk once more where something passed fp16's range: once to see by how much, once to keep. Rare, so not inlined.
template <Pass kPass>
__device__ __noinline__ void stage_large_chunk(Share share, const Constants& constants, Stage& stage, int lane) {
  constexpr float kTiny = 1.0f / (1 << 20);
  Scales largest{kTiny, kTiny};
  __syncwarp();
  stage_keys<true, kPass>(share, constants, largest, stage);
  Scales scales;
  scales.key = scale_for(largest.key / kTiny);
  scales.receptance = scale_for(largest.receptance / kTiny * fmaxf(largest.key / kTiny * scales.key, 1.0f));
  largest = scales;
  __syncwarp();
  stage_keys<true, kPass>(share, constants, largest, stage);
  stage_values<false, kPass>(share, constants, 1.0f / scales.key, stage);
  __syncwarp();
  multiply_scores<kPass>(stage, lane);
  __syncwarp();
  if (lane == 0) stage.unscale = 1.0f / scales.receptance;
}

// From a chunk's inputs, when they have been copied, to all that the consumers need. Values may still be on their way.
template <Pass kPass>
__device__ __forceinline__ void stage_chunk(const Share& share, const Constants& constants, Stage& stage, int lane) {
  Scales scales;
  bool is_large = stage_keys<false, kPass>(share, constants, scales, stage);
  wait_for_copies<0>();
  stage_values<true, kPass>(share, constants, 1.0f, stage);
  if constexpr (kPass == Pass::kOutput) InputCopies<kPass>(share, stage).output_gates(), commit_copies();
  if (lane == 0) stage.unscale = 1.0f;
  __syncwarp();
  is_large |= multiply_scores<kPass>(stage, lane);
  if (is_large) stage_large_chunk<kPass>(share, constants, stage, lane);
}

// From Y to what the output matrix multiplies, for the chunk whose stage came back. A lane does half a head of one token.
__device__ __forceinline__ void finish_chunk(
    const TmixPrefillParams& p, const Span& span, int64_t head, int lane, const Stage& stage, const Constants& constants) {
  constexpr int kHalfPieces = kPieces / 2;
  const int token = lane % kChunk, first_piece = lane / kChunk * kHalfPieces;
  const SharedAddress v_row = address_of(&stage.v) + token * 128, gate_row = address_of(&stage.gate) + token * 128;
  float y[kHalfPieces][kPack], sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHalfPieces; ++i) {
    const int piece = first_piece + i;
    const SharedAddress y_tile = address_of(&stage.y) + piece / 2 * sizeof(stage.y[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = load_shared(y_tile + place_of_y(token, piece % 2 * 2 + half));
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) y[i][half * 4 + j] = __uint_as_float(words[j]);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum += y[i][j];
  }
  const float mean = (sum + GPU_SHFL_XOR(sum, kChunk)) / kHeadSize;
#pragma unroll
  for (int i = 0; i < kHalfPieces; ++i) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) y[i][j] -= mean, squares = fmaf(y[i][j], y[i][j], squares);
  }
  squares += GPU_SHFL_XOR(squares, kChunk);
  const float unscale = stage.unscale, bonus = stage.bonus[token] * unscale;
  const float scale = unscale * reciprocal_root(squares * (unscale * unscale) / kHeadSize + kGroupNormEps);
  __half* const out = static_cast<__half*>(p.out) + (span.first + token) * p.out_stride + head * kHeadSize + first_piece * kPack;
#pragma unroll
  for (int i = 0; i < kHalfPieces; ++i) {
    const int piece = first_piece + i;
    const uint32_t place = (piece ^ token % 8) << 4;
    float v[kPack], gate[kPack], weight[kPack], bias[kPack];
    read_piece(load_shared(v_row + place), v), read_piece(load_shared(gate_row + place), gate);
    read_constants(constants[kLnWeight], piece, weight), read_constants(constants[kLnBias], piece, bias);
#pragma unroll
    for (int j = 0; j < kPack; ++j) y[i][j] = fmaf(bonus, v[j], fmaf(y[i][j] * scale, weight[j], bias[j])) * gate[j];
    if (token < span.count) GPU_STORE(reinterpret_cast<uint4*>(out) + i, pieces_of(y[i]));
  }
}

// A producer's way through the chunks of the block's rows. While one chunk's Y is awaited and finished, the next one's inputs
// come: each to its place as soon as nobody needs what lies there.
template <int kProducers>
__device__ __forceinline__ void produce(
    const TmixPrefillParams& p, int64_t head, int producer, int lane, Shared<kProducers>& shared) {
  const SharedAddress full = address_of(&shared.full[producer]), empty = address_of(&shared.empty[producer]);
  Stage& stage = shared.stages[producer];
  ChunkWalk<Pass::kOutput, kProducers> walk(p, shared.plan, producer, lane);
  Span span, next;
  if (!walk.next(span)) return;
  {
    const InputCopies<Pass::kOutput> copies(Share(p, span, head, lane), stage);
    copies.keys(), commit_copies();
    copies.values(), commit_copies();
  }
  for (int parity = 0;; parity ^= 1) {
    const bool has_next = walk.next(next);
    wait_for_copies<1>();
    stage_chunk<Pass::kOutput>(Share(p, span, head, lane), shared.constants, stage, lane);
    __syncwarp();
    if (lane == 0) arrive(full);
    const InputCopies<Pass::kOutput> copies(Share(p, next, head, lane), stage);
    wait_barrier(empty, parity);
    if (has_next) copies.keys();
    commit_copies();
    wait_for_copies<1>();
    __syncwarp();  // the gates are there for all
    finish_chunk(p, span, head, lane, stage, shared.constants);
    if (!has_next) return;
    __syncwarp();  // all have read values and gates
    copies.values(), commit_copies();
    span = next;
  }
}

// The same for summaries. Nothing comes back, and inputs have places of their own: the next chunk's come at once.
template <int kProducers>
__device__ __forceinline__ void produce_summaries(
    const TmixPrefillParams& p, int64_t head, int producer, int lane, Shared<kProducers>& shared) {
  const SharedAddress full = address_of(&shared.full[producer]), empty = address_of(&shared.empty[producer]);
  Stage& stage = shared.stages[producer];
  ChunkWalk<Pass::kSummary, kProducers> walk(p, shared.plan, producer, lane);
  Span span;
  for (int parity = 1; walk.next(span); parity ^= 1) {  // the stage is empty at first, as the end of the phase of parity 1 says
    const Share share(p, span, head, lane);
    const InputCopies<Pass::kSummary> copies(share, stage);
    copies.keys(), commit_copies();
    copies.values(), commit_copies();
    wait_barrier(empty, parity);
    wait_for_copies<1>();
    stage_chunk<Pass::kSummary>(share, shared.constants, stage, lane);
    __syncwarp();
    if (lane == 0) arrive(full);
  }
}

}  // namespace albatross
