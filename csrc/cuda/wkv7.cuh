// One token's arithmetic of the WKV-7 recurrence, and how a head's state lies over the threads of a block. Included by prefill
// (wkv7.cu) and decode (tmix_decode.cu).
//
// A value row of the state [value, key] needs nothing of any other row, so four neighbouring lanes own one row: lane q holds
// keys 8q..8q+7 and 32+8q..32+8q+7, sums over keys are two shuffles, and the vectors of a token come from shared memory as float.
#pragma once

#include "common.cuh"
#include "constants.h"

namespace albatross {

constexpr int kWkvThreads = 128;
constexpr int kLanes = 4;                           // lanes that own one value row
constexpr int kKeys = kHeadSize / kLanes;           // keys a lane holds
constexpr int kRun = 8;                             // consecutive keys: 16 bytes of fp16
constexpr int kRowsPerPass = kWkvThreads / kLanes;  // value rows that a block's threads hold with one row each
static_assert(kHeadSize == 64 && kKeys == 2 * kRun, "the key layout is written for heads of 64");

// A token's vectors in shared memory; those in global memory have the same order, with the decay's logit for the decay.
enum Vector { kR, kDecay, kK, kV, kA, kB, kNumVectors };
using Token = float[kNumVectors][kHeadSize];

__device__ __forceinline__ float decay_of(float logit) { return expf(__fdividef(-kDecayScale, 1.0f + expf(-logit))); }

// Key at which the run holding a lane's element `e` begins.
__device__ __forceinline__ int run_begin(int lane, int e) { return e / kRun * (kHeadSize / 2) + lane * kRun; }

// Where a head's state begins. A slot outside the pool would corrupt memory, so it ends the kernel and with it the process: it
// is a caller's bug.
template <typename State>
__device__ __forceinline__ State* head_state(void* pool, int64_t slot_stride, int64_t num_slots, int64_t slot, int64_t head) {
  if (slot >= num_slots) GPU_TRAP();
  return static_cast<State*>(pool) + slot * slot_stride + head * (kHeadSize * kHeadSize);
}

// One lane's keys of one value row.
template <typename State>
struct RowState {
  Packed<State, kRun> runs[kKeys / kRun];

  __device__ __forceinline__ void load(const State* row, int lane) {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) runs[i] = load_packed<State, kRun>(row + run_begin(lane, i * kRun));
  }
  __device__ __forceinline__ void store(State* row, int lane) const {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) store_packed(row + run_begin(lane, i * kRun), runs[i]);
  }
  __device__ __forceinline__ void read(float (&s)[kKeys]) const {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) unpack(runs[i], s + i * kRun);
  }
  __device__ __forceinline__ void write(const float (&s)[kKeys]) {
#pragma unroll
    for (int i = 0; i < kKeys / kRun; ++i) pack(s + i * kRun, runs[i]);
  }
};

// S a for kRows value rows.
template <int kRows>
__device__ __forceinline__ void multiply_state(
    const float (&s)[kRows][kKeys], const float (&a)[kHeadSize], int lane, float (&sa)[kRows]) {
  float sums[kRows][4] = {};  // four chains hide the latency of dependent additions
#pragma unroll
  for (int e = 0; e < kKeys; e += 4) {
    const float4 part = *reinterpret_cast<const float4*>(&a[run_begin(lane, e) + e % kRun]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i][0] = fmaf(s[i][e], part.x, sums[i][0]);
      sums[i][1] = fmaf(s[i][e + 1], part.y, sums[i][1]);
      sums[i][2] = fmaf(s[i][e + 2], part.z, sums[i][2]);
      sums[i][3] = fmaf(s[i][e + 3], part.w, sums[i][3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) sa[i] = lane_sum<kLanes>((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
}

// S = S diag(d) + sa b^T + v k^T in place for kRows value rows, and y = S r; all lanes of a row get y.
template <int kRows>
__device__ __forceinline__ void advance(float (&s)[kRows][kKeys], const Token& token, int lane, const float (&sa)[kRows],
                                        const float (&v)[kRows], float (&y)[kRows]) {
  float sums[kRows][4] = {};
#pragma unroll
  for (int e = 0; e < kKeys; e += 4) {
    const int key = run_begin(lane, e) + e % kRun;
    float d[4], b[4], k[4], r[4];
    unpack(load_packed<float, 4>(&token[kDecay][key]), d);
    unpack(load_packed<float, 4>(&token[kB][key]), b);
    unpack(load_packed<float, 4>(&token[kK][key]), k);
    unpack(load_packed<float, 4>(&token[kR][key]), r);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][e + j] = fmaf(sa[i], b[j], fmaf(s[i][e + j], d[j], v[i] * k[j]));
        sums[i][j] = fmaf(s[i][e + j], r[j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) y[i] = lane_sum<kLanes>((sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
}

}  // namespace albatross
