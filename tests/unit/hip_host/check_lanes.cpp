// Every function of csrc/hip and the aliases of common.cuh for lanes, on a block of host threads, against plain loops.
#include <mma.cuh>
#include <staging.cuh>

#include <limits>
#include <random>

namespace {

using albatross::SharedAddress;

constexpr int kThreads = 128;
std::mt19937 generator(7);

void require(bool is_true, const char* what) {
  if (!is_true) host::fail(what);
}

__half random_half(float scale) { return __float2half_rn(std::normal_distribution<float>(0.0f, scale)(generator)); }

uint32_t two(const __half& first, const __half& second) {
  uint16_t bits[2];
  std::memcpy(&bits[0], &first, 2);
  std::memcpy(&bits[1], &second, 2);
  return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
}

// Each warp has matrices of its own, and sums from before.
struct Product {
  __half a[16][16], b[16][8];
  float before[16][8], d[16][8];
};

void check_mma(float scale) {
  static Product warps[kThreads / 32];
  for (Product& p : warps) {
    for (auto& row : p.a) std::generate(std::begin(row), std::end(row), [&] { return random_half(scale); });
    for (auto& row : p.b) std::generate(std::begin(row), std::end(row), [&] { return random_half(1.0f); });
    for (auto& row : p.before) std::generate(std::begin(row), std::end(row), [&] { return __half2float(random_half(scale)); });
  }
  host::run_block(kThreads, [] {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Product& p = warps[threadIdx.x / 32];
    const auto pair_a = [&](int row, int k) { return two(p.a[row][k], p.a[row][k + 1]); };
    const auto pair_b = [&](int k) { return two(p.b[k][g], p.b[k + 1][g]); };
    float d[4] = {p.before[g][2 * t], p.before[g][2 * t + 1], p.before[g + 8][2 * t], p.before[g + 8][2 * t + 1]};
    albatross::mma(d, pair_a(g, 2 * t), pair_a(g + 8, 2 * t), pair_a(g, 2 * t + 8), pair_a(g + 8, 2 * t + 8), pair_b(2 * t),
                   pair_b(2 * t + 8));
    for (int i = 0; i < 4; ++i) p.d[g + i / 2 * 8][2 * t + i % 2] = d[i];
  });
  for (const Product& p : warps) {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        double sum = p.before[row][column], size = std::fabs(sum);
        for (int k = 0; k < 16; ++k) {
          const double term = double{__half2float(p.a[row][k])} * double{__half2float(p.b[k][column])};
          sum += term, size += std::fabs(term);
        }
        require(std::fabs(p.d[row][column] - sum) <= 2e-6 * size, "mma: a sum differs from the plain loop's");
      }
    }
  }
}

void check_staging() {
  alignas(16) static uint16_t source[kThreads / 32][32][8];
  alignas(16) static unsigned char shared[kThreads / 32][32][16];
  static uint32_t found[kThreads][4];
  for (auto& warp : source) {
    for (auto& row : warp) std::generate(std::begin(row), std::end(row), [] { return static_cast<uint16_t>(generator()); });
  }
  std::memset(shared, 0xff, sizeof shared);
  host::run_block(kThreads, [] {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = (lane * 5 + 3) % 32;  // rows need not lie in order
    const SharedAddress target = albatross::address_of(shared[warp]) + place * 16;
    albatross::copy_async(target, source[warp][lane], lane != 9);
    albatross::commit_copies();
    albatross::wait_for_copies<0>();
    __syncthreads();
    albatross::load_transposed(found[threadIdx.x], target);
  });
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < 4; ++i) {
      const int lane = thread % 32, row = i * 8 + lane % 4 * 2;
      const auto number = [&](int r) -> uint32_t { return r == 9 ? 0 : source[thread / 32][r][lane / 4]; };
      require(found[thread][i] == (number(row) | number(row + 1) << 16), "load_transposed: a number in the wrong lane");
    }
  }
}

void check_aliases() {
  static uint32_t ballots[kThreads];
  static int read[kThreads], up[kThreads], crossed[kThreads];
  static float sums[kThreads];
  host::run_block(kThreads, [] {
    const int thread = threadIdx.x;
    // Warps take turns of different length, as they do over a row's tiles.
    for (int turn = 0; turn <= thread / 32; ++turn) {
      ballots[thread] = GPU_BALLOT(thread % 3 == turn % 3);
      read[thread] = GPU_SHFL(thread, 5);
      up[thread] = GPU_SHFL_UP(thread, 4u);
      crossed[thread] = GPU_SHFL_XOR(thread, 16);
      sums[thread] = albatross::lane_sum<32>(static_cast<float>(thread));
    }
  });
  for (int thread = 0; thread < kThreads; ++thread) {
    const int first = thread / 32 * 32, lane = thread % 32;
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>((first + i) % 3 == thread / 32 % 3) << i;
    require(ballots[thread] == bits, "GPU_BALLOT: not the bits of this warp");
    require(read[thread] == first + 5, "GPU_SHFL: not the lane of this warp");
    require(up[thread] == (lane < 4 ? thread : thread - 4), "GPU_SHFL_UP: not the lane of this warp");
    require(crossed[thread] == (thread ^ 16), "GPU_SHFL_XOR: not the lane of this warp");
    require(sums[thread] == static_cast<float>(first * 32 + 496), "lane_sum: not the sum of this warp");
  }
}

void check_conversion() {
  constexpr float infinite = std::numeric_limits<float>::infinity();
  const std::pair<float, uint32_t> cases[] = {
      {0.99f, 0}, {3.7f, 3}, {4294967040.0f, 4294967040u}, {4294967296.0f, ~0u}, {infinite, ~0u}, {-1.0f, 0},
      {-infinite, 0}, {std::numeric_limits<float>::quiet_NaN(), 0}};
  for (const auto& [value, expected] : cases) require(GPU_FLOAT_TO_UINT(value) == expected, "GPU_FLOAT_TO_UINT: does not saturate");
}

}  // namespace

int main() {
  check_mma(1.0f);
  check_mma(1e-6f);  // subnormal in fp16
  check_staging();
  check_aliases();
  check_conversion();
}
