// Matrix products of at most eight rows (the decode of few sequences): bound by reading the weights once.
//
// The weight is the 16-row operand of the tensor cores and the tokens are its eight columns, so that up to eight rows cost
// the same instructions. A tile is 16 outputs; the warps of a block take turns over K in runs of 32, and every lane loads its part
// of the fragments straight from memory, 16 bytes at a time: which k stands where within a run does not matter as long as
// weight and x agree, so a lane takes k = 8t .. 8t + 7 of rows g and g + 8.
//
// The steps of all tiles of all products form one line, cut into equal pieces, one for each block that the card holds at once.
// So a tile may belong to two blocks: the first of them computes its part before anything else and leaves the sums in
// the workspace, the second computes its part after everything else and adds them. Loads run ahead across tiles.
// Moves: the weights once, x once a tile (from the caches).
#include "launch.cuh"
#include "linear.cuh"

#include <algorithm>

namespace albatross {
inline namespace linear_rows_file {

constexpr int kTile = 16;  // outputs of a tile
constexpr int kRun = 32;   // numbers of K that a warp takes in a step: two instructions' worth
constexpr int kMaxRows = 8;

// Part of a tile: steps [begin, end) of the tile `tile` of `product`; an empty one is at the end of a block's work.
struct Job {
  int product;
  int tile;
  int begin;
  int end;
};

template <int kThreads, int kDepth>
struct Piece {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStep = kWarps * kRun;

  const LinearParams& p;
  Job first, last;  // what the piece begins with and ends before
  int num_jobs, num_whole;
  bool has_tail, has_head;

  static __host__ __device__ __forceinline__ int steps(const LinearProduct& product) { return (product.k + kStep - 1) / kStep; }

  __device__ __forceinline__ Job locate(int unit) const {
    Job job{};
    if (unit >= p.unit_begin[p.num_products]) {
      job.tile = p.tile_begin[p.num_products];
      return job;
    }
    job.product = find_product(p.unit_begin, p.num_products, unit);
    const int inside = unit - p.unit_begin[job.product], length = steps(p.products[job.product]);
    job.tile = p.tile_begin[job.product] + inside / length;
    job.begin = inside % length;
    job.end = length;
    return job;
  }

  __device__ __forceinline__ explicit Piece(const LinearParams& params) : p(params), first(), last() {
    const int64_t total = p.unit_begin[p.num_products], index = blockIdx.x, blocks = gridDim.x;
    if (blocks == p.tile_begin[p.num_products]) {  // a tile each
      first.tile = static_cast<int>(index);
      last.tile = first.tile + 1;
    } else {
      first = locate(static_cast<int>(total * index / blocks));
      last = locate(static_cast<int>(total * (index + 1) / blocks));
    }
    has_head = first.begin > 0;
    has_tail = last.begin > 0;
    num_whole = last.tile - first.tile - has_head;
    num_jobs = num_whole + has_head + has_tail;
  }

  // The tile shared with the next block comes first, the one shared with the block before comes last.
  __device__ __forceinline__ Job job(int index) const {
    if (index >= num_jobs) return Job{};
    if (has_tail && index == 0) return {last.product, last.tile, 0, last.begin};
    if (has_head && index == num_jobs - 1) return first;
    Job whole{};
    whole.tile = first.tile + has_head + index - has_tail;
    whole.product = find_product(p.tile_begin, p.num_products, whole.tile);
    whole.end = steps(p.products[whole.product]);
    return whole;
  }
};

// Where a lane reads its parts of a job's weights.
template <int kThreads, int kDepth>
struct Source {
  using P = Piece<kThreads, kDepth>;
  const __half* upper;
  const __half* lower;
  int step, end, k;

  __device__ __forceinline__ Source(const LinearParams& p, const Job& job) : step(job.begin), end(job.end) {
    const LinearProduct& product = p.products[job.product];
    const int row = (job.tile - p.tile_begin[job.product]) * kTile + static_cast<int>(threadIdx.x) % 32 / 4;
    const int begin = static_cast<int>(threadIdx.x) / 32 * kRun + static_cast<int>(threadIdx.x) % 4 * 8;
    const __half* const weight = static_cast<const __half*>(product.weight) + begin;
    // Rows past the last are computed from the last and not written.
    upper = weight + min(row, product.n - 1) * product.weight_stride;
    lower = weight + min(row + 8, product.n - 1) * product.weight_stride;
    k = product.k - begin;
  }
  __device__ __forceinline__ void load(uint4& a, uint4& b, int i) const {
    const int offset = (step + i) * P::kStep;
    const bool is_in = step + i < end && offset < k;
    a = load_weight(upper + offset, is_in);
    b = load_weight(lower + offset, is_in);
  }
};

template <int kThreads, int kDepth, int kBlocks>
__global__ void GPU_LAUNCH_BOUNDS(kThreads, kBlocks) linear_rows_kernel(const LinearParams p) {
  using P = Piece<kThreads, kDepth>;
  __shared__ float parts[2][P::kWarps][32][4];
  const P piece(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = warp * kRun + lane % 4 * 8;

  allow_dependents();
  Job job = piece.job(0);
  Source<kThreads, kDepth> source(p, job);
  uint4 a[kDepth], b[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) source.load(a[i], b[i], i);
  wait_for_inputs();

  for (int index = 0; index < piece.num_jobs; ++index) {
    const LinearProduct& product = p.products[job.product];
    const bool is_row = lane / 4 < product.num_rows;
    const __half* const x = static_cast<const __half*>(product.x) + begin + (is_row ? lane / 4 : 0) * product.x_stride;
    const Job next = piece.job(index + 1);
    float sums[2][4] = {};
    for (int step = job.begin; step < job.end; step += kDepth) {
      uint4 v[kDepth];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int offset = (step + i) * P::kStep;
        const bool is_in = is_row && step + i < job.end && begin + offset < product.k;
        v[i] = is_in ? *reinterpret_cast<const uint4*>(x + offset) : make_uint4(0, 0, 0, 0);
      }
      if (step + kDepth < job.end) {
        source.step += kDepth;
      } else {
        source = Source<kThreads, kDepth>(p, next);
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        mma(sums[0], a[i].x, b[i].x, a[i].y, b[i].y, v[i].x, v[i].y);
        mma(sums[1], a[i].z, b[i].z, a[i].w, b[i].w, v[i].z, v[i].w);
        source.load(a[i], b[i], i);
      }
    }

    float(*const part)[32][4] = parts[index % 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[warp][lane][i] = sums[0][i] + sums[1][i];
    __syncthreads();
    const bool is_tail = piece.has_tail && index == 0, is_head = piece.has_head && index == piece.num_jobs - 1;
    const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
    const int output = (job.tile - p.tile_begin[job.product]) * kTile + column;
    const bool is_writer = row < product.num_rows && output < product.n;
    float sum = 0.0f;
    if (is_writer) {
#pragma unroll
      for (int i = 0; i < P::kWarps; ++i) sum += part[i][column % 8 * 4 + row / 2][column / 8 * 2 + row % 2];
    }
    float* const shared_sum = p.workspace.partials + job.tile * (kTile * kMaxRows) + threadIdx.x;
    int32_t* const flag = p.workspace.counters + job.tile;
    if (is_tail) {
      if (is_writer) *shared_sum = sum;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) atomicExch(flag, 1);
    } else {
      if (is_head) {
        if (threadIdx.x == 0) {
          while (atomicAdd(flag, 0) == 0) {
          }
          *flag = 0;
          __threadfence();
        }
        __syncthreads();
        if (is_writer) sum = GPU_LOAD_L2(shared_sum) + sum;
      }
      if (is_writer) write_out(product, p.scale, row, output, sum);
    }
    job = next;
  }
}

template <int kThreads, int kDepth, int kBlocks>
const char* launch(LinearParams& p, void* stream) {
  int tiles = 0, units = 0, longest = 1;
  for (int i = 0; i < p.num_products; ++i) {
    const int own = (p.products[i].n + kTile - 1) / kTile, steps = Piece<kThreads, kDepth>::steps(p.products[i]);
    p.tile_begin[i] = tiles, p.unit_begin[i] = units;
    tiles += own, units += own * steps;
    longest = std::max(longest, steps);
  }
  p.tile_begin[p.num_products] = tiles, p.unit_begin[p.num_products] = units;
  if (units == 0) return nullptr;
  const int resident = resident_blocks(linear_rows_kernel<kThreads, kDepth, kBlocks>, kThreads, 0);
  if (resident == 0) return launch_error();
  // Short tiles are not worth a division of the work, and no tile may belong to more than two blocks.
  const int blocks = longest <= kDepth || tiles <= resident ? tiles : std::min(resident, units / longest);
  if (static_cast<size_t>(tiles) > p.workspace.num_counters || sizeof(float) * kTile * kMaxRows * tiles > p.workspace.partials_bytes) {
    return "the workspace is too small";
  }
  return launch_dependent(linear_rows_kernel<kThreads, kDepth, kBlocks>, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
                          static_cast<gpu_stream_t>(stream), p);
}

}  // namespace linear_rows_file

const char* launch_linear_rows(LinearParams params, void* stream) {
  int longest = 0;
  for (int i = 0; i < params.num_products; ++i) {
    if (params.products[i].num_rows > kMaxRows) return "at most 8 rows are possible";
    longest = std::max(longest, params.products[i].k);
  }
  // Few warps a tile for short sums, so that none is without work; by measurement on an H200.
  if (longest <= 512) return launch<128, 2, 8>(params, stream);
  return longest < 4096 ? launch<128, 8, 4>(params, stream) : launch<256, 4, 2>(params, stream);
}

}  // namespace albatross
