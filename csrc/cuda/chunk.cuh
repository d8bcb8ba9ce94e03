// What producers and consumers of the chunked kernel (tmix_prefill.cu) share: how a chunk lies in shared memory and in the
// registers of tensor cores, and the numbers' conversions.
#pragma once

#include "constants.h"
#include "tensor_core.cuh"
#include "tmix.h"

namespace albatross {

constexpr int kChunk = 16, kMiddle = kChunk / 2 - 1;
constexpr int kConsumers = 4;                       // warps, each with 16 value rows
constexpr int kPack = 8;                            // numbers of a 16-byte piece
constexpr int kPieces = kHeadSize / kPack;          // of a row of a tile; lanes that hold a token's channels
constexpr int kGroups = 32 / kPieces;               // of lanes, each with consecutive tokens
constexpr int kTokens = kChunk / kGroups;           // of a lane
constexpr float kLog2E = 1.4426950408889634f;
constexpr uint32_t kInfinity = 0x7c00;  // in fp16
static_assert(kHeadSize == 64 && kGroups == 4 && kTokens == 4 && kMiddle % kTokens == kTokens - 1, "the producers' layout");

// 16 tokens of 64 fp16 numbers: rows of 128 bytes, whose 16-byte pieces change places by the row, so that eight rows of one
// column lie in different banks: piece i of row t lies at 128 t + 16 (i ^ t % 8).
struct alignas(128) Tile {
  uint4 pieces[kChunk][kPieces];
};

// The 16x16 products of a chunk, in the order of Stage::squares.
enum Square { kT, kAK, kRB, kRK, kNumSquares };  // T, and the lower triangles of A K^T (strictly), R B^T and R K^T

// What a chunk hands to the consumers, and gets back.
struct alignas(128) Stage {
  Tile a, r, b, k, v;    // A exp(G_m), R exp(G_m), B exp(G_C - G_m), K exp(G_C - G_m), V; first w, r, a, k, v as they came
  Tile gate, v_first;    // v_gate and v_first as they came; g takes v_gate's place
  union {
    Tile scores[4];  // A, R, B, K; once they are multiplied:
    struct {
      uint4 squares[kNumSquares][32];       // as operands a, by lane
      float4 y[kHeadSize / 16][kChunk][4];  // Y, [value / 16][token][16 values]
    };
  };
  float4 whole[2][kPieces + 1];  // exp(G_C), of each piece's eight keys the first four, then the others, in other banks
  float bonus[kChunk];     // sum of r k r_k
  float unscale;           // what R was divided by, and with it Y and the bonus
};

// Where lanes find a tile's numbers, from the tile's beginning. For the four 8x8 matrices of a 16x16 operand a, or of a
// transposed b: the first 8 rows of the first 16 columns, the second 8, then the next 8 columns.
__device__ __forceinline__ SharedAddress place_a(int lane) { return lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4); }
// For an operand b whose columns are the tile's rows, or a transposed a: the first 8 rows' 16 columns, then the second 8 rows'.
__device__ __forceinline__ SharedAddress place_b(int lane) {
  return (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4);
}
// The same 16 q columns further on, given the address, whose bits below 128 are the place's alone.
__device__ __forceinline__ SharedAddress columns(SharedAddress address, int q) { return address ^ (q << 5); }
// One 16-byte piece.
__device__ __forceinline__ SharedAddress place_of(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }
// Of one row of 16 values of Y in fp32 one of the four 16-byte pieces. They change places by the row, so that neither the stores
// of a product's pairs nor the loads of eight rows' pieces meet in a bank.
__device__ __forceinline__ SharedAddress place_of_y(int row, int piece) {
  return row * 64 + ((piece ^ (row & 2) ^ (row >> 2 & 1)) << 4);
}

// One head's constants: of each piece's eight the first four, then the others, so that lanes that read one after the other find
// them in different banks. The biases of sigmoids are multiplied by -log2(e), as `sigmoid_of` wants them.
enum Constant { kW0, kA0, kV0, kKk, kKa, kRk, kLnWeight, kLnBias, kNumConstants };
using Constants = float[kNumConstants][kHeadSize];

using Product = float[2][4];  // 16x16: [n tile][as mma leaves it]

__device__ __forceinline__ uint32_t halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 floats(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }
__device__ __forceinline__ uint4 pieces_of(const float (&values)[kPack]) {
  return make_uint4(halves(values[0], values[1]), halves(values[2], values[3]), halves(values[4], values[5]),
                    halves(values[6], values[7]));
}
__device__ __forceinline__ void read_piece(uint4 piece, float (&values)[kPack]) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = floats(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void read_constants(const float (&source)[kHeadSize], int piece, float (&values)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; i += 4) {
    const float4 part = reinterpret_cast<const float4*>(source)[i / 4 * kPieces + piece];
    values[i] = part.x, values[i + 1] = part.y, values[i + 2] = part.z, values[i + 3] = part.w;
  }
}
__device__ __forceinline__ float sigmoid_of(float x, float bias) { return reciprocal(1.0f + exp2_of(fmaf(x, -kLog2E, bias))); }

// The larger of a pair of halves and the absolutes of four pairs. What is not a number loses.
__device__ __forceinline__ uint32_t largest_of(uint32_t most, uint4 pairs) {
  return larger(larger(larger(larger(most, pairs.x), pairs.y), pairs.z), pairs.w);
}
// Whether one of such a pair passed fp16's range, in any lane.
__device__ __forceinline__ bool passes_range(uint32_t most) {
  return any_of_warp((most & 0xffffu) >= kInfinity || most >> 16 >= kInfinity);
}

// A product as operand a of the next.
__device__ __forceinline__ void as_operand(const Product& d, uint32_t (&a)[4]) {
  a[0] = halves(d[0][0], d[0][1]), a[1] = halves(d[0][2], d[0][3]);
  a[2] = halves(d[1][0], d[1][1]), a[3] = halves(d[1][2], d[1][3]);
}
__device__ __forceinline__ void as_operand(uint4 square, uint32_t (&a)[4]) {
  a[0] = square.x, a[1] = square.y, a[2] = square.z, a[3] = square.w;
}
__device__ __forceinline__ uint4 as_square(const Product& d) {
  uint32_t a[4];
  as_operand(d, a);
  return make_uint4(a[0], a[1], a[2], a[3]);
}
// d += a b^T for 16x16 operands, both given as operand a.
__device__ __forceinline__ void multiply(Product& d, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma(d[0], a, b[0], b[2]);
  mma(d[1], a, b[1], b[3]);
}
// Zero where the column is beyond row + offset, which is 0 or -1.
__device__ __forceinline__ void keep_lower(Product& d, int lane, int offset) {
  d[1][0] = d[1][1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane % 4 * 2 + i > lane / 4 + offset) d[0][i] = d[1][2 + i] = 0.0f;
  }
}

// Of the rows of a call.
struct Plan {
  int num_rows;    // of which only the last may be read: all behind are padding or have no tokens
  int num_chunks;  // of those that have tokens and a slot; 0: none is split
};

template <int kProducers>
struct Shared {
  Stage stages[kProducers];
  Constants constants;
  Plan plan;
  uint64_t full[kProducers], empty[kProducers];  // barriers: a producer has filled its stage; the consumers are done with it
};

}  // namespace albatross
