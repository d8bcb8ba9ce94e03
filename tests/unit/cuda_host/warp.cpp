// Operations of a whole warp, as the PTX manual defines them: each waits for its 32 lanes, and only __syncwarp orders memory.
#include "block.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace emu {

namespace {

using Lanes = std::array<void*, kWarp>;  // each lane's arguments
struct Operation {
  const char* name;
  void (*compute)(const Lanes&, int first_thread);
};
struct Warp {
  const Operation* operation;
  Lanes lanes;
  int num_arrived, generation;
};
std::vector<Warp> warps;

void meet(const Operation& operation, void* arguments) {
  Warp& warp = warps[current / kWarp];
  if (warp.num_arrived > 0 && warp.operation != &operation) {
    fail(format("the lanes of a warp meet in %s and in %s", warp.operation->name, operation.name));
  }
  const int own = warp.generation;
  warp.operation = &operation, warp.lanes[current % kWarp] = arguments;
  if (++warp.num_arrived == kWarp) {
    operation.compute(warp.lanes, current / kWarp * kWarp);
    end_accesses(current / kWarp);
    warp.num_arrived = 0, ++warp.generation;
  }
  wait_until([&warp, own] { return warp.generation != own; });  // who came last has no advantage
}

template <typename T>
T& of(const Lanes& lanes, int lane) {
  return *static_cast<T*>(lanes[lane]);
}

float half_of(uint32_t pair, int i) {
  _Float16 halves[2];
  std::memcpy(halves, &pair, sizeof pair);
  return static_cast<float>(halves[i]);
}

struct Shuffle {
  uint32_t value, result;
  int source;
};
const Operation kShuffle{"a shuffle", [](const Lanes& lanes, int) {
  for (int lane = 0; lane < kWarp; ++lane) {
    auto& own = of<Shuffle>(lanes, lane);
    own.result = of<Shuffle>(lanes, own.source).value;
  }
}};

const Operation kReduceMax{"a maximum", [](const Lanes& lanes, int) {
  uint32_t largest = 0;
  for (int lane = 0; lane < kWarp; ++lane) largest = std::max(largest, of<uint32_t>(lanes, lane));
  for (int lane = 0; lane < kWarp; ++lane) of<uint32_t>(lanes, lane) = largest;
}};

const Operation kReduceOr{"a ballot", [](const Lanes& lanes, int) {
  uint32_t all = 0;
  for (int lane = 0; lane < kWarp; ++lane) all |= of<uint32_t>(lanes, lane);
  for (int lane = 0; lane < kWarp; ++lane) of<uint32_t>(lanes, lane) = all;
}};

const Operation kSyncWarp{"__syncwarp", [](const Lanes&, int first_thread) { join_clocks(first_thread, kWarp); }};

// An 8x8 matrix of 16-bit numbers lies over a warp: lane 4 g + t holds of row g the columns 2t and 2t + 1.
using Matrix = uint16_t[8][8];
uint32_t pair_of(const Matrix& m, int lane, bool is_transposed) {
  const int g = lane / 4, t = lane % 4 * 2;
  return is_transposed ? m[t][g] | uint32_t{m[t + 1][g]} << 16 : m[g][t] | uint32_t{m[g][t + 1]} << 16;
}

const Operation kTranspose{"movmatrix", [](const Lanes& lanes, int) {
  Matrix m;
  for (int lane = 0; lane < kWarp; ++lane) {
    const uint32_t pair = of<uint32_t>(lanes, lane);
    m[lane / 4][lane % 4 * 2] = pair & 0xffff, m[lane / 4][lane % 4 * 2 + 1] = pair >> 16;
  }
  for (int lane = 0; lane < kWarp; ++lane) of<uint32_t>(lanes, lane) = pair_of(m, lane, true);
}};

struct Load {
  uint32_t* result;
  SharedAddress row;
  bool is_transposed;
  const void* place;
};
// Every lane gets something of every row, by name of the lane that gave its address.
const Operation kLoadMatrices{"ldmatrix", [](const Lanes& lanes, int first_thread) {
  const int last = current;
  for (int i = 0; i < 4; ++i) {
    Matrix m;
    for (int row = 0; row < 8; ++row) {
      current = first_thread + 8 * i + row;
      const Load& load = of<Load>(lanes, 8 * i + row);
      check_shared(load.row, 16, false, first_thread, kWarp);
      count_shared(load.place, current, load.row, 16, false);
      std::memcpy(m[row], shared_bytes_at(load.row), 16);
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      const Load& load = of<Load>(lanes, lane);
      load.result[i] = pair_of(m, lane, load.is_transposed);
    }
  }
  current = last;
}};

struct Product {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
// Lane 4 g + t holds of a, b and d the numbers at these places, i counting its own.
constexpr int row_of_a(int g, int i) { return i / 2 % 2 == 0 ? g : g + 8; }
constexpr int column_of_a(int t, int i) { return 2 * t + i % 2 + i / 4 * 8; }
constexpr int row_of_b(int t, int i) { return 2 * t + i % 2 + i / 2 * 8; }
constexpr int row_of_d(int g, int i) { return g + i / 2 * 8; }
constexpr int column_of_d(int t, int i) { return 2 * t + i % 2; }

const Operation kMultiply{"mma", [](const Lanes& lanes, int) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& own = of<Product>(lanes, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) a[row_of_a(g, i)][column_of_a(t, i)] = half_of(own.a[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) b[row_of_b(t, i)][g] = half_of(own.b[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) d[row_of_d(g, i)][column_of_d(t, i)] = own.d[i];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) of<Product>(lanes, lane).d[i] = d[row_of_d(lane / 4, i)][column_of_d(lane % 4, i)];
  }
}};

// Beyond its 10 bits of fraction a card ignores a number of TF32; here it is an error.
float tf32_of(uint32_t bits) {
  if (bits % (1u << 13) != 0) fail("an operand is not of TF32");
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

const Operation kMultiplyTf32{"mma of TF32", [](const Lanes& lanes, int) {
  float a[16][8], b[8][8], d[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& own = of<Product>(lanes, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32_of(own.a[i]);
    for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32_of(own.b[i]);
    for (int i = 0; i < 4; ++i) d[row_of_d(g, i)][column_of_d(t, i)] = own.d[i];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 8; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) of<Product>(lanes, lane).d[i] = d[row_of_d(lane / 4, i)][column_of_d(lane % 4, i)];
  }
}};

}  // namespace

void begin_warps() { warps.assign(num_threads / kWarp, Warp{}); }

void sync_warp() { meet(kSyncWarp, nullptr); }

uint32_t shuffle(uint32_t value, int source_lane) {
  Shuffle own{value, 0, source_lane};
  meet(kShuffle, &own);
  return own.result;
}

uint32_t reduce_max(uint32_t value) {
  meet(kReduceMax, &value);
  return value;
}

uint32_t reduce_or(uint32_t value) {
  meet(kReduceOr, &value);
  return value;
}

uint32_t transpose(uint32_t matrix) {
  meet(kTranspose, &matrix);
  return matrix;
}

__attribute__((noinline)) void load_matrices(uint32_t (&m)[4], SharedAddress row, bool is_transposed) {
  Load own{m, row, is_transposed, __builtin_return_address(0)};
  meet(kLoadMatrices, &own);
}

void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product own{d, a, {b0, b1}};
  meet(kMultiply, &own);
}
void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product own{d, a, {b0, b1}};
  meet(kMultiplyTf32, &own);
}

}  // namespace emu
