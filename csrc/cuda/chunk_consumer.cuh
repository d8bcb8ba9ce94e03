// The consumers of the chunked kernels (tmix_prefill.cu): the state, from the first token to the last.
#pragma once

#include "chunk_segments.cuh"

#include <cstddef>

namespace albatross {

// One warp's 16 value rows of each state through one chunk; for the output leaves Y in the stage. The first state has the chunk's
// values, a second none. U is computed as its transpose, [value, token], in which the state and every product are the next
// product's operand as they lie.
template <Pass kPass, int kStates>
__device__ __forceinline__ void advance_chunk(float (&s)[kStates][8][4], Stage& stage, int warp, int lane) {
  const SharedAddress at_a = address_of(&stage) + place_a(lane), at_b = address_of(&stage) + place_b(lane);
  constexpr uint32_t kA = offsetof(Stage, a), kR = offsetof(Stage, r), kB = offsetof(Stage, b), kK = offsetof(Stage, k);
  uint32_t v[4], square[4];  // v: V^T
  load_transposed(v, columns(at_b, warp) + offsetof(Stage, v));
  Product z[kStates]{}, z_too[kStates]{};  // U before T, in two sums, for the next chunk waits for what is made of them
  as_operand(stage.squares[kAK][lane], square);
  multiply(z[0], v, square);
  uint32_t state[kStates][4][4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t a[4];
    load_matrices(a, columns(at_b, q) + kA);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      uint32_t (&operand)[4] = state[i][q];
#pragma unroll
      for (int j = 0; j < 4; ++j) operand[j] = halves(s[i][2 * q + j / 2][j % 2 * 2], s[i][2 * q + j / 2][j % 2 * 2 + 1]);
      Product& sum = q % 2 == 0 ? z_too[i] : z[i];
      mma(sum[0], operand, a[0], a[1]);
      mma(sum[1], operand, a[2], a[3]);
    }
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t k[4];
    load_transposed(k, columns(at_a, q) + kK);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 decay = reinterpret_cast<const float2*>(&stage.whole[lane % 4 / 2][2 * q + n])[lane % 2];
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        float (&part)[4] = s[i][2 * q + n];
        part[0] *= decay.x, part[1] *= decay.y, part[2] *= decay.x, part[3] *= decay.y;
      }
      mma(s[0][2 * q + n], v, k[2 * n], k[2 * n + 1]);
    }
  }
  uint32_t u[kStates][4];
  as_operand(stage.squares[kT][lane], square);
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) z[i][n][j] += z_too[i][n][j];
    }
    Product product{};
    as_operand(z[i], u[i]);
    multiply(product, u[i], square);
    as_operand(product, u[i]);
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t b[4];
    load_transposed(b, columns(at_a, q) + kB);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      mma(s[i][2 * q], u[i], b[0], b[1]);
      mma(s[i][2 * q + 1], u[i], b[2], b[3]);
    }
  }
  if constexpr (kPass == Pass::kOutput) {
    Product y{};  // [token, value]
    as_operand(stage.squares[kRK][lane], square);
    multiply(y, square, v);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t r[4];
      load_matrices(r, columns(at_a, q) + kR);
      multiply(y, r, state[0][q]);
    }
    as_operand(stage.squares[kRB][lane], square);
    multiply(y, square, u[0]);
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
}

// A consumer warp's way round the stages.
template <Pass kPass, int kProducers>
class StageWalk {
 public:
  __device__ __forceinline__ StageWalk(Shared<kProducers>& shared, int warp, int lane)
      : shared_(shared), warp_(warp), lane_(lane) {}

  // Its rows of the states through the next `chunks`.
  template <int kStates>
  __device__ __forceinline__ void advance(float (&s)[kStates][8][4], int chunks) {
    for (; chunks > 0; --chunks) {
      wait_barrier(address_of(&shared_.full[stage_]), parity_);
      __syncwarp();  // lanes may leave the wait one after the other; ldmatrix and mma want them together
      advance_chunk<kPass>(s, shared_.stages[stage_], warp_, lane_);
      __syncwarp();
      if (lane_ == 0) arrive(address_of(&shared_.empty[stage_]));
      if (++stage_ == kProducers) stage_ = 0, parity_ ^= 1;
    }
  }

 private:
  Shared<kProducers>& shared_;
  const int warp_, lane_;
  int stage_ = 0, parity_ = 0;
};

// A consumer's way through the block's rows and segments.
template <typename State, int kProducers>
__device__ __forceinline__ void consume(
    const TmixPrefillParams& p, int64_t head, int warp, int lane, Shared<kProducers>& shared) {
  StageWalk<Pass::kOutput, kProducers> stages(shared, warp, lane);
  Item item;
  for (ItemWalk<Pass::kOutput> walk(p, shared.plan, lane); walk.next(item);) {
    State* const state = head_state<State>(p.state, p.state_stride, p.num_slots, item.slot, head) + warp * kRowsOfWarp;
    float s[1][8][4];
    if (item.num_segments == 1) load_rows(state, lane, s[0]);
    else load_start(p, item, head, warp, lane, s[0]);
    stages.advance(s, item.num_chunks());
    if (item.is_last()) store_rows(state, lane, s[0]);
  }
}

// The same for summaries of segments.
template <int kProducers>
__device__ __forceinline__ void consume_summaries(
    const TmixPrefillParams& p, int64_t head, int warp, int lane, Shared<kProducers>& shared) {
  StageWalk<Pass::kSummary, kProducers> stages(shared, warp, lane);
  Item item;
  for (ItemWalk<Pass::kSummary> walk(p, shared.plan, lane); walk.next(item);) {
    if (item.segment == 0) keep_start(p, item, head, warp, lane);
    float s[2][8][4]{};
    set_identity(s[1], warp, lane);
    stages.advance(s, item.num_chunks());
    store_summary(p, item, head, warp, lane, s);
  }
}

}  // namespace albatross
