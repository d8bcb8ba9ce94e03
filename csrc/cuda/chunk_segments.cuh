// What the segments of a row hand on in the caller's room (tmix_prefill.cu), and how a segment's first state is made of it.
//
// S comes out of a segment as S M + Q, since its value rows need nothing of each other and a token takes each to a sum of what is
// linear in it and what does not depend on it: M [64 key, 64 key] is what becomes of the identity where there are no values,
// Q [64 value, 64 key] what becomes of zero.
#pragma once

#include "chunk_rows.cuh"
#include "wkv7.cuh"

namespace albatross {

constexpr int kRowsOfWarp = 16 * kHeadSize;  // numbers of a consumer's rows of a state

// Of a segment that is not its row's last, M transposed and Q. The place of the last has the row's first state, since the block
// that reads that segment may write the slot while others still begin.
enum Part { kTransition, kInput, kStart = kTransition };

__device__ __forceinline__ float* part_of(const TmixPrefillParams& p, int place, int64_t head, Part part) {
  return p.segments + ((place * p.num_heads + head) * 2 + part) * (kHeadSize * kHeadSize);
}
__device__ __forceinline__ float* start_of(const TmixPrefillParams& p, const Item& item, int64_t head, int warp) {
  return part_of(p, item.place + item.num_segments - 1, head, kStart) + warp * kRowsOfWarp;
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

// Rows of the identity.
__device__ __forceinline__ void set_identity(float (&s)[8][4], int warp, int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = n * 8 + lane % 4 * 2 + i % 2 == warp * 16 + lane / 4 + i / 2 * 8 ? 1.0f : 0.0f;
  }
}

// One warp's rows of a row's first state, from its slot to the room.
__device__ __forceinline__ void keep_start(const TmixPrefillParams& p, const Item& item, int64_t head, int warp, int lane) {
  float s[8][4];
  const auto load = [&](auto type) {
    using State = decltype(type);
    load_rows(head_state<State>(p.state, p.state_stride, p.num_slots, item.slot, head) + warp * kRowsOfWarp, lane, s);
  };
  if (p.state_dtype == Dtype::kFloat16) load(__half{});
  else load(float{});
  store_rows(start_of(p, item, head, warp), lane, s);
}

// One warp's rows of Q and M.
__device__ __forceinline__ void store_summary(
    const TmixPrefillParams& p, const Item& item, int64_t head, int warp, int lane, const float (&s)[2][8][4]) {
  const int place = item.place + item.segment;
  store_rows(part_of(p, place, head, kInput) + warp * kRowsOfWarp, lane, s[0]);
  float* const transition = part_of(p, place, head, kTransition) + warp * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) transition[(n * 8 + lane % 4 * 2 + i % 2) * kHeadSize + i / 2 * 8] = s[1][n][i];
  }
}

// A number as the sum of two of TF32, which has fp32's range: all but its last bits. Three products of them then are off by about
// a millionth, far less than what rounding the state to fp16 does in every chunk.
struct Split {
  uint32_t high, low;

  __device__ __forceinline__ explicit Split(float x) {
    constexpr uint32_t kKept = 0xffffe000u;
    high = __float_as_uint(x) & kKept;
    low = __float_as_uint(x - __uint_as_float(high)) & kKept;
  }
};

// next += s M, one warp's rows. Columns of s and rows of M are taken in the order in which a lane has those of s as an operand a.
__device__ __forceinline__ void apply_transition(
    float (&next)[8][4], const float (&s)[8][4], const float* transition, int lane) {
  const float* const source = transition + lane / 4 * kHeadSize + lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Split own[4] = {Split(s[k][0]), Split(s[k][2]), Split(s[k][1]), Split(s[k][3])};
    const uint32_t high[4] = {own[0].high, own[1].high, own[2].high, own[3].high};
    const uint32_t low[4] = {own[0].low, own[1].low, own[2].low, own[3].low};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 pair = load_pair(source + n * 8 * kHeadSize + k * 8);
      const Split first(pair.x), second(pair.y);
      mma_tf32(next[n], low, first.high, second.high);
      mma_tf32(next[n], high, first.low, second.low);
      mma_tf32(next[n], high, first.high, second.high);
    }
  }
}

// One warp's rows of the state before a segment: the row's first state through all segments before it.
__device__ __forceinline__ void load_start(
    const TmixPrefillParams& p, const Item& item, int64_t head, int warp, int lane, float (&s)[8][4]) {
  load_rows(start_of(p, item, head, warp), lane, s);
  for (int segment = 0; segment < item.segment; ++segment) {
    const int place = item.place + segment;
    float next[8][4];
    load_rows(part_of(p, place, head, kInput) + warp * kRowsOfWarp, lane, next);
    apply_transition(next, s, part_of(p, place, head, kTransition), lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = next[n][i];
    }
  }
}

}  // namespace albatross
