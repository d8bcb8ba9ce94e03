// The consumers of the chunked kernel (tmix_prefill.cu): the state, from the first token to the last.
#pragma once

#include "chunk_rows.cuh"
#include "wkv7.cuh"

#include <cstddef>

namespace albatross {

// One warp's 16 value rows of the state through one chunk; leaves its Y in the stage. U is computed as its transpose, [value,
// token], in which the state and every product are the next product's operand as they lie.
__device__ __forceinline__ void advance_chunk(float (&s)[8][4], Stage& stage, int warp, int lane) {
  const SharedAddress at_a = address_of(&stage) + place_a(lane), at_b = address_of(&stage) + place_b(lane);
  constexpr uint32_t kA = offsetof(Stage, a), kR = offsetof(Stage, r), kB = offsetof(Stage, b), kK = offsetof(Stage, k);
  uint32_t v[4], square[4];  // v: V^T
  load_transposed(v, columns(at_b, warp) + offsetof(Stage, v));
  Product z{}, z_too{}, u{};  // z: U before T, in two sums, for the next chunk waits for what is made of them
  as_operand(stage.squares[kAK][lane], square);
  multiply(z, v, square);
  uint32_t state[4][4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    state[q][0] = halves(s[2 * q][0], s[2 * q][1]), state[q][1] = halves(s[2 * q][2], s[2 * q][3]);
    state[q][2] = halves(s[2 * q + 1][0], s[2 * q + 1][1]), state[q][3] = halves(s[2 * q + 1][2], s[2 * q + 1][3]);
    uint32_t a[4];
    load_matrices(a, columns(at_b, q) + kA);
    Product& sum = q % 2 == 0 ? z_too : z;
    mma(sum[0], state[q], a[0], a[1]);
    mma(sum[1], state[q], a[2], a[3]);
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t k[4];
    load_transposed(k, columns(at_a, q) + kK);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&part)[4] = s[2 * q + i];
      const float2 decay = reinterpret_cast<const float2*>(&stage.whole[lane % 4 / 2][2 * q + i])[lane % 2];
      part[0] *= decay.x, part[1] *= decay.y, part[2] *= decay.x, part[3] *= decay.y;
      mma(part, v, k[2 * i], k[2 * i + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[n][i] += z_too[n][i];
  }
  uint32_t operand[4];
  as_operand(z, operand);
  as_operand(stage.squares[kT][lane], square);
  multiply(u, operand, square);
  as_operand(u, operand);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t b[4];
    load_transposed(b, columns(at_a, q) + kB);
    mma(s[2 * q], operand, b[0], b[1]);
    mma(s[2 * q + 1], operand, b[2], b[3]);
  }

  Product y{};  // [token, value]
  as_operand(stage.squares[kRK][lane], square);
  multiply(y, square, v);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t r[4];
    load_matrices(r, columns(at_a, q) + kR);
    multiply(y, r, state[q]);
  }
  as_operand(stage.squares[kRB][lane], square);
  multiply(y, square, operand);
  const SharedAddress y_tile = address_of(&stage.y[warp]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SharedAddress target = y_tile + place_of_y(lane / 4 + i * 8, n * 2 + lane % 4 / 2) + lane % 2 * 8;
      store_shared_pair(target, y[n][2 * i], y[n][2 * i + 1]);
    }
  }
}

__device__ __forceinline__ float2 load_pair(const float* source) { return *reinterpret_cast<const float2*>(source); }
__device__ __forceinline__ float2 load_pair(const __half* source) {
  return __half22float2(*reinterpret_cast<const __half2*>(source));
}
__device__ __forceinline__ void store_pair(float* target, float x, float y) {
  *reinterpret_cast<float2*>(target) = make_float2(x, y);
}
__device__ __forceinline__ void store_pair(__half* target, float x, float y) {
  *reinterpret_cast<__half2*>(target) = __floats2half2_rn(x, y);
}

// A lane's part of 16 value rows, as mma leaves a product: rows lane / 4 and lane / 4 + 8, keys 8 n + 2 (lane % 4) and the next.
template <typename State>
__device__ __forceinline__ void load_rows(const State* rows, int lane, float (&s)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const State* const source = rows + lane / 4 * kHeadSize + n * 8 + lane % 4 * 2;
    const float2 upper = load_pair(source), lower = load_pair(source + 8 * kHeadSize);
    s[n][0] = upper.x, s[n][1] = upper.y, s[n][2] = lower.x, s[n][3] = lower.y;
  }
}
template <typename State>
__device__ __forceinline__ void store_rows(State* rows, int lane, const float (&s)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    State* const target = rows + lane / 4 * kHeadSize + n * 8 + lane % 4 * 2;
    store_pair(target, s[n][0], s[n][1]);
    store_pair(target + 8 * kHeadSize, s[n][2], s[n][3]);
  }
}

// A consumer's way through the block's rows.
template <typename State, int kProducers>
__device__ __forceinline__ void consume(
    const TmixPrefillParams& p, int64_t head, int warp, int lane, Shared<kProducers>& shared) {
  int stage = 0, parity = 0;
  Row row;
  for (RowWalk walk(p, lane); walk.next(row);) {
    State* const state = head_state<State>(p.state, p.state_stride, p.num_slots, row.slot, head) + warp * 16 * kHeadSize;
    float s[8][4];
    load_rows(state, lane, s);
    for (int left = row.num_chunks(); left > 0; --left) {
      wait_barrier(address_of(&shared.full[stage]), parity);
      __syncwarp();  // lanes may leave the wait one after the other; ldmatrix and mma want them together
      advance_chunk(s, shared.stages[stage], warp, lane);
      __syncwarp();
      if (lane == 0) arrive(address_of(&shared.empty[stage]));
      if (++stage == kProducers) stage = 0, parity ^= 1;
    }
    store_rows(state, lane, s);
  }
}

}  // namespace albatross
