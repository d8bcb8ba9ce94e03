// The value matrix of the channel mix for few rows: about nine in ten of a squared ReLU's outputs are zero in a trained model, and
// a row of the weight whose factor is zero in every token need not be read. Nothing is lost: the sum is the same.
//
// A block makes 128 outputs from one part of F. It lists the numbers of the part that are not zero in every token, packs
// them in shared memory, and brings the listed rows of the weight there, 256 bytes each, some kStages * kUnit ahead of the tensor
// cores. Each part's sums go to the workspace, and the last block of an output to arrive adds them in the parts' order.
// Moves: the listed rows of the weight once, x once a block (L2 cache).
#include "launch.cuh"
#include "linear.cuh"

#include <staging.cuh>  // the order of the include path chooses between csrc/cuda and csrc/hip

#include <algorithm>

namespace albatross {
inline namespace linear_sparse_file {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kOutputs = 16 * kWarps;   // of a block
constexpr int kPieces = kOutputs / 8;   // of 16 bytes in a row's segment
constexpr int kUnit = 32;               // rows of the weight that are brought in at once
constexpr int kStageBytes = kUnit * kOutputs * 2;
constexpr int kRound = kThreads * 8;    // numbers of F that are looked at in one go: eight a thread

// Where piece `piece` of row `row` lies in a buffer of rows of kRowPieces pieces: the pieces of neighbouring rows are
// exchanged so that eight rows' pieces of one column lie in different banks.
template <int kRowPieces>
__device__ __forceinline__ uint32_t place(int row, int piece) {
  return static_cast<uint32_t>(row * kRowPieces + (piece ^ (row % 8))) * 16;
}

// With few tokens there is room for a long part: one block on a multiprocessor, beside which the next kernel's can begin.
// Copies that are not asynchronous need no room to run ahead in, and leave it to other blocks.
template <int kTokens_>
struct Shared {
  static constexpr int kTokens = kTokens_;
  static constexpr int kStages = !kHasAsyncCopies ? 2 : kTokens <= 2 ? 8 : 6;
  static constexpr int kBlocks = kTokens <= 4 ? 1 : 2;  // on a multiprocessor
  static constexpr int kPart = kRound * (kHasAsyncCopies && kTokens <= 4 ? 2 : 1);
  unsigned char stages[kStages][kStageBytes];
  __half packed[kTokens][kPart + 8];  // the factors; 16 bytes more keep the tokens in different banks
  uint16_t list[kPart];
};

// Eight numbers of F, one thread's share of a round, of every token.
template <int kTokens>
struct Factors {
  Packed<__half, 8> tokens[kTokens];

  __device__ __forceinline__ void load(const LinearParams& p, int k, int end_k) {
    const LinearProduct& product = p.products[0];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      tokens[token] = Packed<__half, 8>{};
      if (token < product.num_rows && k < end_k) {
        tokens[token] = load_packed<__half, 8>(static_cast<const __half*>(product.x) + token * product.x_stride + k);
      }
    }
  }
  __device__ __forceinline__ bool is_wanted(int i) const {
    uint32_t any = 0;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) any |= tokens[token].words[i / 2];
    return (any >> (i % 2 * 16) & 0x7fffu) != 0;  // minus zero is zero
  }
  __device__ __forceinline__ __half get(int token, int i) const {
    return __ushort_as_half(static_cast<uint16_t>(tokens[token].words[i / 2] >> (i % 2 * 16)));
  }
};

// Lists the part's numbers that are not zero in every token, packs their factors, and returns how many there are. Behind them stand
// zeros up to a whole unit.
template <typename S>
__device__ __forceinline__ int list_nonzero(const LinearParams& p, S& shared, int first_k, int end_k) {
  constexpr int kRounds = S::kPart / kRound;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Factors<S::kTokens> factors[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    factors[round].load(p, first_k + round * kRound + static_cast<int>(threadIdx.x) * 8, end_k);
  }

  // Where this thread's entries of a round begin: those of earlier rounds, warps and lanes come first.
  __shared__ int warp_counts[kRounds][kWarps];
  int before[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) own += factors[round].is_wanted(i);
    before[round] = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = GPU_SHFL_UP(before[round], distance);
      if (lane >= distance) before[round] += other;
    }
    if (lane == 31) warp_counts[round][warp] = before[round];
    before[round] -= own;
  }
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    before[round] += total;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before[round] += warp_counts[round][i];
      total += warp_counts[round][i];
    }
  }

#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    int position = before[round];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!factors[round].is_wanted(i)) continue;
      shared.list[position] = static_cast<uint16_t>(round * kRound + static_cast<int>(threadIdx.x) * 8 + i);
#pragma unroll
      for (int token = 0; token < S::kTokens; ++token) shared.packed[token][position] = factors[round].get(token, i);
      ++position;
    }
  }
  const int padded = (total + kUnit - 1) / kUnit * kUnit;
  for (int id = threadIdx.x; id < (padded - total) * S::kTokens; id += kThreads) {
    shared.packed[id % S::kTokens][total + id / S::kTokens] = __ushort_as_half(0);
  }
  __syncthreads();
  return total;
}

template <typename S>
__device__ __forceinline__ void fetch(const LinearProduct& product, S& shared, int first_k, int unit, int count) {
  const SharedAddress target = address_of(shared.stages[unit % S::kStages]);
  const __half* const weight = static_cast<const __half*>(product.weight) + first_k * product.weight_stride;
#pragma unroll
  for (int i = 0; i < kUnit * kPieces / kThreads; ++i) {
    const int id = threadIdx.x + i * kThreads, row = id / kPieces, piece = id % kPieces;
    const int entry = unit * kUnit + row, column = blockIdx.x * kOutputs + piece * 8;
    const bool is_in = entry < count && column < product.n;
    const __half* const source = is_in ? weight + shared.list[entry] * product.weight_stride + column : weight;
    copy_async(target + place<kPieces>(row, piece), source, is_in);
  }
}

template <typename S>
__device__ __forceinline__ void multiply(S& shared, int unit, float (&sums)[4]) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, line = lane % 8, warp = threadIdx.x / 32;
  const SharedAddress stage = address_of(shared.stages[unit % S::kStages]);
#pragma unroll
  for (int step = 0; step < kUnit / 16; ++step) {
    uint32_t a[4];
    load_transposed(a, stage + place<kPieces>(step * 16 + line + matrix / 2 * 8, warp * 2 + matrix % 2));
    const __half* const b = &shared.packed[lane / 4 % S::kTokens][unit * kUnit + step * 16 + lane % 4 * 2];
    // Columns past the last token repeat others and are not written.
    mma(sums, a[0], a[1], a[2], a[3], *reinterpret_cast<const uint32_t*>(b), *reinterpret_cast<const uint32_t*>(b + 8));
  }
}

// Adds up all parts' sums. True in the last block to arrive, which then holds them.
__device__ __forceinline__ bool combine(const LinearParams& p, float (&sums)[4]) {
  float4* const partials = reinterpret_cast<float4*>(p.workspace.partials) + int64_t{blockIdx.x} * gridDim.y * kThreads + threadIdx.x;
  partials[blockIdx.y * kThreads] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* const counter = p.workspace.counters + blockIdx.x;
    is_last = atomicAdd(counter, 1) == static_cast<int>(gridDim.y) - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll 4
  for (unsigned part = 0; part < gridDim.y; ++part) {
    const float4 v = GPU_LOAD_L2(partials + part * kThreads);
    sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
  }
  return true;
}

template <typename S>
__global__ void GPU_LAUNCH_BOUNDS(kThreads, 2) linear_sparse_kernel(const LinearParams p) {
  extern __shared__ __align__(128) unsigned char buffer[];
  S& shared = *reinterpret_cast<S*>(buffer);
  const LinearProduct& product = p.products[0];
  const int eighths = product.k / 8;
  const int first_k = static_cast<int>(int64_t{eighths} * blockIdx.y / gridDim.y) * 8;
  const int end_k = static_cast<int>(int64_t{eighths} * (blockIdx.y + 1) / gridDim.y) * 8;
  allow_dependents();
  wait_for_inputs();
  const int count = list_nonzero(p, shared, first_k, end_k);

  const int units = (count + kUnit - 1) / kUnit;
  float sums[4] = {};
#pragma unroll
  for (int unit = 0; unit < S::kStages - 1; ++unit) {
    if (unit < units) fetch(product, shared, first_k, unit, count);
    commit_copies();
  }
  for (int unit = 0; unit < units; ++unit) {
    wait_for_copies<S::kStages - 2>();
    __syncthreads();
    if (unit + S::kStages - 1 < units) fetch(product, shared, first_k, unit + S::kStages - 1, count);
    commit_copies();
    multiply(shared, unit, sums);
  }
  if (gridDim.y > 1 && !combine(p, sums)) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = blockIdx.x * kOutputs + threadIdx.x / 32 * 16 + lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
    if (column < product.n && row < product.num_rows) write_out(product, p.scale, row, column, sums[i]);
  }
}

template <typename S>
const char* launch(const LinearParams& p, gpu_stream_t stream) {
  const LinearProduct& product = p.products[0];
  const int columns = (product.n + kOutputs - 1) / kOutputs;
  const int fewest = (product.k + S::kPart - 1) / S::kPart, most = std::max(fewest, product.k / 256);
  const int resident = resident_blocks(linear_sparse_kernel<S>, kThreads, sizeof(S));
  if (resident == 0) return launch_error();
  const int parts = std::clamp(multiprocessors() * S::kBlocks / columns, fewest, most);
  if (static_cast<size_t>(columns) > p.workspace.num_counters ||
      sizeof(float4) * kThreads * parts * columns > p.workspace.partials_bytes) {
    return "the workspace is too small";
  }
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(parts));
  return launch_dependent(linear_sparse_kernel<S>, grid, kThreads, sizeof(S), stream, p);
}

}  // namespace linear_sparse_file

const char* launch_linear_sparse(LinearParams params, void* stream) {
  if (params.num_products != 1) return "one product at a time is possible";
  const int num_rows = params.products[0].num_rows;
  if (num_rows > kSparseRows) return "at most 8 rows are possible";
  if (num_rows == 0 || params.products[0].n == 0) return nullptr;
  const auto gpu_stream = static_cast<gpu_stream_t>(stream);
  if (num_rows == 1) return launch<Shared<1>>(params, gpu_stream);
  if (num_rows == 2) return launch<Shared<2>>(params, gpu_stream);
  if (num_rows <= 4) return launch<Shared<4>>(params, gpu_stream);
  return launch<Shared<8>>(params, gpu_stream);
}

}  // namespace albatross
