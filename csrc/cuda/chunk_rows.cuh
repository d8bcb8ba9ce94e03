// Which rows, segments and chunks a block of the chunked kernels (tmix_prefill.cu) reads.
#pragma once

#include "chunk.cuh"

namespace albatross {

// A long row is split where the heads and rows of a call do not fill the card: one pass makes of each segment but a row's last
// what it does to any state, another reads all segments at once, each from the state that those before it lead to
// (chunk_segments.cuh). Lengths are known on the device alone, so every warp makes this plan for itself.
enum class Pass { kSummary, kOutput };

constexpr int kLeastChunks = 8;    // of a segment: one that is shorter costs more than it saves
constexpr int kLeastSegments = 3;  // of a row that is split: two took as long as one (H200)
constexpr int kMostSegments = 16;  // of a row: the last one's first state takes a product of matrices for each that is before it

__device__ __forceinline__ int num_chunks_of(int tokens) { return (tokens + kChunk - 1) / kChunk; }

// Segments of a row of `chunks`, where all rows together have `all`: its share of `room`, what the caller has room for, so that
// those of rows that are split are no more than that. All have the same length but the last, none is empty.
__device__ __forceinline__ int num_segments_of(int chunks, int all, int64_t room) {
  const int share = min(static_cast<int>(chunks * room / all), min(chunks / kLeastChunks, kMostSegments));
  if (share < kLeastSegments) return 1;
  const int length = (chunks + share - 1) / share;
  return (chunks + length - 1) / length;
}

struct Bounds {
  int begin, end;  // tokens; at least one, unless nothing is to be read
};

// Row `row`, and its slot, or a slot of -1 if it is none, has no tokens or is padding.
__device__ __forceinline__ Bounds look_at(const TmixPrefillParams& p, int64_t row, int& slot) {
  Bounds bounds{0, 0};
  slot = -1;
  if (row < p.num_rows) bounds = {p.cu_seqlens[row], p.cu_seqlens[row + 1]}, slot = p.slots[row];
  if (bounds.begin >= bounds.end) slot = -1;
  return bounds;
}

// By one warp. Rows behind the last that is to be read are left out, since a captured step may have many.
__device__ __forceinline__ Plan plan_of(const TmixPrefillParams& p, int lane) {
  int chunks = 0, slot;
  uint32_t end = 0;
#pragma unroll 8
  for (int64_t row = lane; row < p.num_rows; row += 32) {
    const Bounds bounds = look_at(p, row, slot);
    if (slot >= 0) chunks += num_chunks_of(bounds.end - bounds.begin), end = static_cast<uint32_t>(row) + 1;
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) chunks += GPU_SHFL_XOR(chunks, mask);
  return {static_cast<int>(reduce_max(end)), chunks};
}

// One segment of a row, or a row that is not split.
struct Item : Bounds {
  int slot;
  int segment, num_segments;  // which of its row
  int place;                  // of the row's first segment in the room for segments

  __device__ __forceinline__ int num_chunks() const { return num_chunks_of(end - begin); }
  __device__ __forceinline__ bool is_last() const { return segment + 1 == num_segments; }
};

// Goes through every gridDim.x-th of a pass's items, in the order of the rows, from the blockIdx.x-th on. All lanes of a warp go
// together; each warp finds the items for itself, so that none waits for another.
template <Pass kPass>
class ItemWalk {
 public:
  __device__ __forceinline__ ItemWalk(const TmixPrefillParams& p, const Plan& plan, int lane)
      : p_(p), plan_(plan), lane_(lane), next_(static_cast<int>(blockIdx.x)) {
    look();
  }

  // The next item, the same in all lanes; false if there is none.
  __device__ __forceinline__ bool next(Item& item) {
    while (true) {
      while (there_ == 0) {
        first_ += 32;
        if (first_ >= plan_.num_rows) return false;
        look();
      }
      const int lane = __ffs(static_cast<int>(there_)) - 1, num_segments = GPU_SHFL(num_segments_, lane);
      const int num_items = kPass == Pass::kOutput ? num_segments : num_segments - 1;
      if (next_ >= num_items) {
        next_ -= num_items;
        there_ &= there_ - 1;
        if (num_segments > 1) place_ += num_segments;
        continue;
      }
      const int begin = GPU_SHFL(bounds_.begin, lane), end = GPU_SHFL(bounds_.end, lane);
      if (begin < 0 || end > p_.num_tokens) GPU_TRAP();
      const int chunks = num_chunks_of(end - begin), length = (chunks + num_segments - 1) / num_segments * kChunk;
      item.begin = begin + next_ * length, item.end = min(end, item.begin + length);
      item.slot = GPU_SHFL(slot_, lane);
      item.segment = next_, item.num_segments = num_segments, item.place = place_;
      next_ += static_cast<int>(gridDim.x);
      return true;
    }
  }

 private:
  // At 32 rows, one a lane.
  __device__ __forceinline__ void look() {
    bounds_ = look_at(p_, first_ + lane_, slot_);
    const int chunks = num_chunks_of(bounds_.end - bounds_.begin), all = plan_.num_chunks;
    num_segments_ = all == 0 ? 1 : num_segments_of(chunks, all, p_.num_segments);
    there_ = GPU_BALLOT(slot_ >= 0);
  }

  const TmixPrefillParams& p_;
  const Plan& plan_;
  const int lane_;
  int next_;  // of the present row's items the next that is this block's, counted on through those of the rows behind
  int place_ = 0, first_ = 0;
  uint32_t there_;  // those of the 32 rows that are left, the present one among them, a bit each
  Bounds bounds_;
  int slot_, num_segments_;
};

// The tokens of one chunk, of which the first `count` are there.
struct Span {
  int64_t first = 0;
  int count = 1;
};

// Goes through those chunks of the block's items that are one producer's: every kProducers-th, counted through all items.
template <Pass kPass, int kProducers>
class ChunkWalk {
 public:
  __device__ __forceinline__ ChunkWalk(const TmixPrefillParams& p, const Plan& plan, int producer, int lane)
      : items_(p, plan, lane), next_(producer) {}

  // The next one, the same in all lanes; false if there is none, and then not to be asked again.
  __device__ __forceinline__ bool next(Span& span) {
    while (next_ >= num_chunks_) {
      next_ -= num_chunks_;
      if (!items_.next(item_)) return false;
      num_chunks_ = item_.num_chunks();
    }
    const int first = item_.begin + next_ * kChunk;
    span = {first, min(item_.end - first, kChunk)};
    next_ += kProducers;
    return true;
  }

 private:
  ItemWalk<kPass> items_;
  Item item_;
  int next_, num_chunks_ = 0;  // of the present item
};

}  // namespace albatross
