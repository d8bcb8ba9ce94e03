// The threads of a block as fibers, whose turn it is, and what orders their deeds.
#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>

// Keeps the caller's registers on its stack, whose end goes to *save, and goes on with the stack at `load`.
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch, . - emu_switch
)");

namespace emu {

Options options{};
int current = -1, num_threads = 0;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kSavedRegisters = 6;

struct Fiber {
  void* stack_pointer;
  const std::function<bool()>* is_ready;  // null: always
  bool is_done;
  Clock clock;
};

std::vector<Fiber> fibers;
unsigned char* stacks;
void* scheduler_stack;
const std::function<void()>* body;
Index3 block, grid;
std::string failure;
int turn, num_waiting_for_all, generation;
uint64_t random_state;

uint64_t next_random() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

void yield() { emu_switch(&fibers[current].stack_pointer, scheduler_stack); }

void enter() {
  (*body)();
  end_copies();
  fibers[current].is_done = true;
  yield();
  std::abort();
}

void begin_fiber(int thread) {
  void** top = reinterpret_cast<void**>(stacks + kStackBytes * (thread + 1)) - 8;
  *--top = nullptr;  // where `enter` would return to; keeps the stack aligned as a call does
  *--top = reinterpret_cast<void*>(enter);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fibers[thread] = {top, nullptr, false, Clock(num_threads, 0)};
  fibers[thread].clock[thread] = 1;
}

bool can_run(const Fiber& fiber) { return !fiber.is_done && (fiber.is_ready == nullptr || (*fiber.is_ready)()); }

// A thread of this warp that can go on, or -1.
int choose_lane(int warp) {
  int ready[kWarp], count = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (can_run(fibers[warp * kWarp + lane])) ready[count++] = warp * kWarp + lane;
  }
  if (count == 0) return -1;
  if (options.order == Order::kRandom) return ready[next_random() % count];
  return options.order == Order::kReversed ? ready[count - 1] : ready[0];
}

int choose_thread() {
  std::vector<int> warps(num_threads / kWarp);
  std::iota(warps.begin(), warps.end(), 0);
  const auto change_places = [&](int i) { std::swap(warps[i], warps[next_random() % (i + 1)]); };
  switch (options.order) {
    case Order::kRandom:
      for (int i = static_cast<int>(warps.size()) - 1; i > 0; --i) change_places(i);
      break;
    case Order::kRoundRobin:
    case Order::kReversed:
      std::rotate(warps.begin(), warps.begin() + ++turn % warps.size(), warps.end());
      break;
    case Order::kLastWarps:
      std::reverse(warps.begin(), warps.end());
      break;
    case Order::kFirstWarps:
      break;
  }
  for (const int warp : warps) {
    const int thread = choose_lane(warp);
    if (thread >= 0) return thread;
  }
  return -1;
}

std::string who_waits() {
  std::string text = "deadlock: threads wait for ever in warps";
  for (int warp = 0; warp < num_threads / kWarp; ++warp) {
    const auto first = fibers.begin() + warp * kWarp;
    if (std::any_of(first, first + kWarp, [](const Fiber& fiber) { return !fiber.is_done; })) text += format(" %d", warp);
  }
  return text;
}

}  // namespace

std::string format(const char* pattern, ...) {
  char text[400];
  va_list values;
  va_start(values, pattern);
  std::vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}

// Does not come back: the fibers are left as they stand.
void fail(const std::string& what) {
  failure = what + format(" (block %u, %u; warp %d, lane %d)", block.x, block.y, current / kWarp, current % kWarp);
  yield();
  std::abort();
}

Index3 thread_index() { return {static_cast<unsigned>(current), 0, 0}; }
Index3 block_index() { return block; }
Index3 grid_size() { return grid; }

Event now() { return {current, fibers[current].clock[current]}; }
bool happened_before(const Event& event, int thread) {
  return event.thread == thread || fibers[thread].clock[event.thread] >= event.time;
}
Clock& clock_of(int thread) { return fibers[thread].clock; }

void join_clocks(int first, int count) {
  Clock all(num_threads, 0);
  for (int i = first; i < first + count; ++i) {
    std::transform(all.begin(), all.end(), fibers[i].clock.begin(), all.begin(), [](auto x, auto y) { return std::max(x, y); });
  }
  for (int i = first; i < first + count; ++i) {
    fibers[i].clock = all;
    ++fibers[i].clock[i];
  }
}

void maybe_yield() {
  if (options.order == Order::kRandom && next_random() % 16 == 0) yield();
}
void wait_until(const std::function<bool()>& is_ready) {
  fibers[current].is_ready = &is_ready;
  yield();
  fibers[current].is_ready = nullptr;
}
bool is_stack(const void* address) {
  const auto* const byte = static_cast<const unsigned char*>(address);
  return byte >= stacks && byte < stacks + kStackBytes * kMaxThreads;
}

void sync_threads() {
  const int own = generation;
  if (++num_waiting_for_all == num_threads) {
    num_waiting_for_all = 0, ++generation;
    join_clocks(0, num_threads);
    for (int warp = 0; warp < num_threads / kWarp; ++warp) end_accesses(warp);
    begin_counting();
  }
  wait_until([own] { return generation != own; });  // who came last has no advantage
}

const char* run_block(const std::function<void()>& kernel, int threads, size_t shared_bytes, Index3 index, Index3 size) {
  if (stacks == nullptr) {
    void* const memory = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return "no memory for the stacks of a block";
    stacks = static_cast<unsigned char*>(memory);
  }
  if (threads % kWarp != 0 || threads > kMaxThreads) return "a block must have whole warps, at most 1,024 threads";
  if (shared_bytes > kMaxShared) return "more shared memory than a block may have";
  num_threads = threads, body = &kernel, block = index, grid = size, failure.clear();
  turn = num_waiting_for_all = generation = 0;
  random_state = (options.seed + 1) * 0x9e3779b97f4a7c15ull + index.x * 977 + index.y;
  begin_memory(shared_bytes), begin_copies(), begin_barriers(), begin_warps(), begin_banks();
  fibers.resize(threads);
  for (int thread = 0; thread < threads; ++thread) begin_fiber(thread);
  for (int alive = threads; alive > 0 && failure.empty();) {
    current = choose_thread();
    if (current < 0) {
      failure = who_waits();
      break;
    }
    emu_switch(&scheduler_stack, fibers[current].stack_pointer);
    alive -= fibers[current].is_done;
  }
  current = -1;
  return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace emu
