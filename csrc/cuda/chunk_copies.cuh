// How raw products come to a chunk's stage (tmix_prefill.cu), and which part of them is whose.
#pragma once

#include "chunk_rows.cuh"
#include "tmix.cuh"

#include <cstddef>

namespace albatross {

// A lane's piece of its tokens. In the place of tokens that a chunk lacks stands its last one, so that all lanes do alike;
// whoever uses them takes from those all by which they would change the state.
struct Share {
  const TmixPrefillParams& p;
  const Span span;
  const int64_t head;
  const int piece, first;

  __device__ __forceinline__ Share(const TmixPrefillParams& params, const Span& chunk, int64_t its_head, int lane)
      : p(params), span(chunk), head(its_head), piece(lane % kPieces), first(lane / kPieces * kTokens) {}
  __device__ __forceinline__ const __half* source(const Rows& rows, int i) const {
    const __half* const begin = begin_of<__half>(rows, span.first) + head * kHeadSize;  // the same for all lanes
    return begin + (min(first + i, span.count - 1) * static_cast<uint32_t>(rows.stride) + piece * kPack);
  }
  __device__ __forceinline__ bool has(int i) const { return first + i < span.count; }
};

constexpr uint32_t kTileA = offsetof(Stage, a), kTileR = offsetof(Stage, r), kTileB = offsetof(Stage, b);
constexpr uint32_t kTileK = offsetof(Stage, k), kTileV = offsetof(Stage, v);
constexpr uint32_t kTileGate = offsetof(Stage, gate), kTileFirst = offsetof(Stage, v_first);
constexpr uint32_t kScoreA = offsetof(Stage, scores), kScoreR = kScoreA + sizeof(Tile);
constexpr uint32_t kScoreB = kScoreR + sizeof(Tile), kScoreK = kScoreB + sizeof(Tile);

// The same piece i rows further on, from a row that is a multiple of 4, i less than 4.
__device__ __forceinline__ SharedAddress next_row(SharedAddress address, int i) { return (address ^ (i << 4)) + i * 128; }

// Where raw products wait: in the place of what is made of them. For a summary, where nothing else lies, or nothing while the
// consumers work, so that the next chunk's come meanwhile.
template <Pass kPass>
struct Raw;
template <>
struct Raw<Pass::kOutput> {
  static constexpr uint32_t kW = kTileA, kK = kTileK, kA = kTileB, kR = kTileR, kV = kTileV;
};
template <>
struct Raw<Pass::kSummary> {
  static constexpr uint32_t kW = kScoreR, kK = kScoreK, kA = kScoreB, kV = kTileR;
};

// What a chunk reads comes long before it is needed, and each lane copies what it will read itself: its own `wait_for_copies` is
// all that it needs.
template <Pass kPass>
class InputCopies {
 public:
  __device__ __forceinline__ InputCopies(const Share& share, Stage& stage)
      : share_(share), place_(address_of(&stage) + place_of(share.first, share.piece)) {}

  __device__ __forceinline__ void keys() const {
    const TmixProducts& products = share_.p.products;
    copy(products.w, Raw<kPass>::kW), copy(products.k, Raw<kPass>::kK), copy(products.a, Raw<kPass>::kA);
    if constexpr (kPass == Pass::kOutput) copy(share_.p.r, Raw<kPass>::kR);
  }
  __device__ __forceinline__ void values() const {
    const TmixProducts& products = share_.p.products;
    copy(products.v, Raw<kPass>::kV);
    if (products.v_gate.data != nullptr) copy(products.v_gate, kTileGate), copy(products.v_first, kTileFirst);
  }
  __device__ __forceinline__ void output_gates() const { copy(share_.p.g, kTileGate); }  // once V is made

 private:
  __device__ __forceinline__ void copy(const Rows& rows, uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) copy_async(next_row(place_, i) + tile, share_.source(rows, i), true);
  }

  const Share share_;
  const SharedAddress place_;
};

// One piece as it came: where it was copied to, or, once that is written over, from memory.
template <bool kIsCopied>
__device__ __forceinline__ uint4 piece_of(const Share& share, const Rows& rows, int i, SharedAddress copied) {
  if constexpr (kIsCopied) return load_shared(copied);
  else return load_global(share.source(rows, i));
}

}  // namespace albatross
