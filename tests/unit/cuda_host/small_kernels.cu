// Small kernels, each whole and with one mistake planted, for the test of the emulator itself (tests/unit/test_cuda_host.py).
#include "launch.cuh"
#include "tensor_core.cuh"

#include <cstring>

namespace albatross {
inline namespace small_kernels_file {

constexpr int kThreads = 64, kNumbers = 64, kBytes = 64 * 1024;

struct Params {
  uint32_t* numbers;
  const uint32_t* constants;
};

alignas(1024) unsigned char raw[emu::kMaxShared];
uint32_t* words() { return reinterpret_cast<uint32_t*>(raw); }

// Every word has been written, and every thread knows.
void fill() {
  words()[threadIdx.x] = threadIdx.x;
  __syncthreads();
}

template <bool kIsBroken>
void exchange_in_a_warp(Params p) {
  fill();
  words()[threadIdx.x] = 1;
  if (!kIsBroken) __syncwarp();
  p.numbers[threadIdx.x] = words()[threadIdx.x ^ 1];
}

template <bool kIsBroken>
void exchange_between_warps(Params p) {
  fill();
  words()[threadIdx.x] = 1;
  if (kIsBroken) __syncwarp();
  else __syncthreads();
  p.numbers[threadIdx.x] = words()[(threadIdx.x + 32) % kThreads];
}

// The second warp overwrites what the first may not have read.
template <bool kIsBroken>
void overwrite(Params p) {
  fill();
  if (threadIdx.x < 32) p.numbers[threadIdx.x] = words()[threadIdx.x];
  if (!kIsBroken) __syncthreads();
  if (threadIdx.x >= 32) words()[threadIdx.x - 32] = 1;
}

template <bool kIsBroken>
void read_what_was_written(Params p) {
  fill();
  p.numbers[threadIdx.x] = words()[threadIdx.x + (kIsBroken ? 1 : 0)];
}

template <bool kIsBroken>
void store_in_shared_memory(Params) {
  words()[kBytes / 4 - kThreads + threadIdx.x + (kIsBroken ? 1 : 0)] = 1;
}

template <bool kIsBroken>
void store_by_address(Params) {
  store_shared_pair(address_of(raw) + kBytes - 8 * kThreads + 8 * threadIdx.x + (kIsBroken ? 8 : 0), 1, 1);
}

template <bool kIsBroken>
void store_in_global_memory(Params p) {
  p.numbers[threadIdx.x + (kIsBroken ? 1 : 0)] = 1;
}

template <bool kIsBroken>
void keep_constants(Params p) {
  (kIsBroken ? const_cast<uint32_t*>(p.constants) : p.numbers)[threadIdx.x] = p.constants[threadIdx.x];
}

template <bool kIsBroken>
void align_vectors(Params) {
  store_shared(address_of(raw) + 16 * threadIdx.x + (kIsBroken ? 8 : 0), make_uint4(1, 2, 3, 4));
}

template <bool kIsBroken>
void meet_with_all_lanes(Params) {
  if (!kIsBroken || threadIdx.x % 32 < 16) __syncwarp();
}

template <bool kIsBroken>
void meet_in_one_operation(Params p) {
  if (kIsBroken && threadIdx.x % 32 == 5) __syncwarp();
  else p.numbers[threadIdx.x] = reduce_max(threadIdx.x);
}

// The first warp hands words to the second by an mbarrier behind them.
enum class Mistake { kNone, kNoSync, kNoArrival, kWrongParity, kUninitialised, kUnordered, kWritten };
template <Mistake kMistake>
void hand_over(Params p) {
  uint64_t* const memory = reinterpret_cast<uint64_t*>(words() + kThreads);
  const SharedAddress barrier = address_of(memory);
  if (threadIdx.x == 0 && kMistake != Mistake::kUninitialised) init_barrier(barrier, 1);
  if (threadIdx.x == 0 && kMistake == Mistake::kWritten) *memory = 1;
  words()[threadIdx.x] = 0;
  if (kMistake != Mistake::kUnordered) __syncthreads();
  if (threadIdx.x < 32) {
    words()[threadIdx.x] = threadIdx.x;
    if (kMistake != Mistake::kNoSync) __syncwarp();
    if (threadIdx.x == 0 && kMistake != Mistake::kNoArrival) arrive(barrier);
  } else {
    wait_barrier(barrier, kMistake == Mistake::kWrongParity ? 1 : 0);
    p.numbers[threadIdx.x] = words()[threadIdx.x - 32];
  }
}

// Each thread copies 16 bytes and, for a source past the end, 16 bytes of zeros; a thread of the other warp reads them.
enum class CopyMistake {
  kNone, kNoWait, kFewerGroups, kNoCommit, kTarget, kBarrier, kCopy, kSource, kUnordered, kNeverAwaited, kAlignment,
  kTargetAlignment, kBounds, kTargetBounds
};
template <CopyMistake kMistake>
void copy_pieces(Params p) {
  constexpr uint32_t kAll = 16 * kThreads;
  const auto is = [](CopyMistake mistake) __attribute__((always_inline)) { return kMistake == mistake; };
  const int piece = threadIdx.x * 4 % kNumbers, other = threadIdx.x ^ 33;
  const SharedAddress target = address_of(raw), own = target + 16 * threadIdx.x;
  p.numbers[threadIdx.x] = threadIdx.x;
  fill();
  if (is(CopyMistake::kUnordered)) words()[4 * other] = 1;
  const uint32_t* const source = p.numbers + piece + (is(CopyMistake::kAlignment) ? 1 : 0);
  copy_async(own + (is(CopyMistake::kTargetAlignment) ? 4 : 0), source, true);
  commit_copies();
  copy_async(is(CopyMistake::kTargetBounds) ? target + kBytes : own + kAll, p.numbers + kNumbers, is(CopyMistake::kBounds));
  if (!is(CopyMistake::kNoCommit)) commit_copies();
  commit_copies();  // nothing, but a group
  if (is(CopyMistake::kTarget)) words()[4 * threadIdx.x + 3] = 1;
  if (is(CopyMistake::kBarrier)) init_barrier(own + 8, 1);
  if (is(CopyMistake::kCopy)) copy_async(own, source, true);
  if (is(CopyMistake::kSource)) p.numbers[piece + 3] = 1000 + threadIdx.x;
  if (is(CopyMistake::kNeverAwaited)) return;
  if (is(CopyMistake::kNoWait)) p.numbers[threadIdx.x] = words()[4 * threadIdx.x];
  wait_for_copies<kMistake == CopyMistake::kFewerGroups ? 2 : 1>();
  __syncthreads();
  const uint4 first = load_shared(target + 16 * other), second = load_shared(target + 16 * other + kAll);
  const uint32_t begin = other * 4 % kNumbers;
  const bool is_copied = first.x == begin && first.y == begin + 1 && first.z == begin + 2 && first.w == begin + 3;
  if (!is_copied || (second.x | second.y | second.z | second.w) != 0) __trap();
}

// The first warp copies what the second reads.
template <bool kIsBroken>
void sync_after_the_wait(Params p) {
  fill();
  if (threadIdx.x < 32) copy_async(address_of(raw) + 16 * threadIdx.x, p.constants + threadIdx.x * 4 % kNumbers, true);
  commit_copies();
  if (kIsBroken) __syncthreads();
  wait_for_copies<0>();
  if (!kIsBroken) __syncthreads();
  if (threadIdx.x >= 32) p.numbers[threadIdx.x] = words()[4 * (threadIdx.x - 32)];
}

// Lanes store to neighbouring words, or all to one bank.
template <bool kIsBroken>
void spread_over_banks(Params) {
  __syncthreads();
  if (threadIdx.x < 32) words()[threadIdx.x * (kIsBroken ? 32 : 1)] = 1;
  __syncwarp();
}

struct Case {
  const char* name;
  void (*whole)(Params);
  void (*broken)(Params);
};
#define CASE(name) {#name, name<false>, name<true>}
#define HAND_OVER(name, mistake) {#name, hand_over<Mistake::kNone>, hand_over<Mistake::mistake>}
#define COPY(name, mistake) {#name, copy_pieces<CopyMistake::kNone>, copy_pieces<CopyMistake::mistake>}
constexpr Case kCases[] = {
    CASE(exchange_in_a_warp),
    CASE(exchange_between_warps),
    CASE(overwrite),
    CASE(read_what_was_written),
    CASE(store_in_shared_memory),
    CASE(store_by_address),
    CASE(store_in_global_memory),
    CASE(keep_constants),
    CASE(align_vectors),
    CASE(meet_with_all_lanes),
    CASE(meet_in_one_operation),
    CASE(spread_over_banks),
    CASE(sync_after_the_wait),
    HAND_OVER(arrive_after_all_lanes, kNoSync),
    HAND_OVER(arrive, kNoArrival),
    HAND_OVER(wait_for_a_phase_that_ends, kWrongParity),
    HAND_OVER(initialise, kUninitialised),
    HAND_OVER(initialise_first, kUnordered),
    HAND_OVER(leave_barriers_alone, kWritten),
    COPY(wait_for_copies_before_reading, kNoWait),
    COPY(wait_for_enough_groups, kFewerGroups),
    COPY(commit_what_is_awaited, kNoCommit),
    COPY(store_after_the_wait, kTarget),
    COPY(initialise_after_the_wait, kBarrier),
    COPY(copy_once, kCopy),
    COPY(change_the_source_after_the_wait, kSource),
    COPY(copy_over_what_is_done_with, kUnordered),
    COPY(wait_for_copies_before_the_end, kNeverAwaited),
    COPY(align_the_source, kAlignment),
    COPY(align_the_target, kTargetAlignment),
    COPY(copy_from_within_bounds, kBounds),
    COPY(copy_to_within_bounds, kTargetBounds),
};

}  // namespace small_kernels_file
}  // namespace albatross

// Returns nullptr, or what the kernel did wrong.
extern "C" const char* emu_small_kernel(const char* name, int is_broken) {
  using namespace albatross;
  alignas(16) static uint32_t numbers[kNumbers + 4], constants[kNumbers];
  emu::shared_memory = raw;
  shared_bytes = kBytes;
  emu::forget_memory();
  emu::allow_memory(numbers, kNumbers * sizeof(uint32_t), true);
  emu::allow_memory(constants, sizeof constants, false);
  for (const Case& one : kCases) {
    if (std::strcmp(name, one.name) != 0) continue;
    return launch_dependent(is_broken ? one.broken : one.whole, dim3(1), kThreads, kBytes, nullptr, Params{numbers, constants});
  }
  return "no such kernel";
}
