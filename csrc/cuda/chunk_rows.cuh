// Which rows and chunks a block of the chunked kernel (tmix_prefill.cu) reads.
#pragma once

#include "chunk.cuh"

namespace albatross {

struct Row {
  int begin, end;  // tokens, at least one
  int slot;

  __device__ __forceinline__ int num_chunks() const { return (end - begin + kChunk - 1) / kChunk; }
};

// Goes through every gridDim.x-th of the rows that have tokens and a slot, in their order, from the blockIdx.x-th on. All lanes
// of a warp go together; each warp finds the rows for itself, so that none waits for another.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const TmixPrefillParams& p, int lane)
      : p_(p), lane_(lane), num_others_(static_cast<int>(blockIdx.x)) {
    look();
  }

  // The next row, the same in all lanes; false if there is none.
  __device__ __forceinline__ bool next(Row& row) {
    while (true) {
      while (there_ == 0) {
        first_ += 32;
        if (first_ >= p_.num_rows) return false;
        look();
      }
      const int lane = __ffs(static_cast<int>(there_)) - 1;
      there_ &= there_ - 1;
      if (num_others_-- > 0) continue;
      num_others_ = static_cast<int>(gridDim.x) - 1;
      row = {GPU_SHFL(own_.begin, lane), GPU_SHFL(own_.end, lane), GPU_SHFL(own_.slot, lane)};
      if (row.begin < 0 || row.end > p_.num_tokens) GPU_TRAP();
      return true;
    }
  }

 private:
  // At 32 rows, one a lane.
  __device__ __forceinline__ void look() {
    const int64_t row = first_ + lane_;
    own_ = {0, 0, -1};
    if (row < p_.num_rows) own_ = {p_.cu_seqlens[row], p_.cu_seqlens[row + 1], p_.slots[row]};
    there_ = GPU_BALLOT(own_.slot >= 0 && own_.begin < own_.end);
  }

  const TmixPrefillParams& p_;
  const int lane_;
  int num_others_;  // rows to pass by before the next that is this block's
  int64_t first_ = 0;
  uint32_t there_;  // those of the 32 that are left, a bit each
  Row own_;
};

// The tokens of one chunk, of which the first `count` are there.
struct Span {
  int64_t first = 0;
  int count = 1;
};

// Goes through those chunks of the block's rows that are one producer's: every kProducers-th, counted through all rows.
template <int kProducers>
class ChunkWalk {
 public:
  __device__ __forceinline__ ChunkWalk(const TmixPrefillParams& p, int producer, int lane) : rows_(p, lane), next_(producer) {}

  // The next one, the same in all lanes; false if there is none, and then not to be asked again.
  __device__ __forceinline__ bool next(Span& span) {
    while (next_ >= num_chunks_) {
      next_ -= num_chunks_;
      if (!rows_.next(row_)) return false;
      num_chunks_ = row_.num_chunks();
    }
    const int first = row_.begin + next_ * kChunk;
    span = {first, min(row_.end - first, kChunk)};
    next_ += kProducers;
    return true;
  }

 private:
  RowWalk rows_;
  Row row_;
  int next_, num_chunks_ = 0;  // of the present row
};

}  // namespace albatross
