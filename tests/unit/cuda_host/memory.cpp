// Every access of a kernel to memory: whether it lies within bounds, reads what was written, and is ordered against the others.
#include "block.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace emu {

unsigned char* shared_memory = nullptr;

namespace {

constexpr SharedAddress kSharedBase = 0x1000;  // so that an offset or a zero is no address by chance

struct Word {
  bool is_written = false, is_barrier = false;
  bool is_pending = false;  // an asynchronous copy by `writer` may write it at any time
  Event writer{};
  std::vector<Event> readers;  // since it was written
};
std::vector<Word> words;
size_t num_shared_bytes;

struct Region {
  uintptr_t end;
  bool may_write;
};
std::map<uintptr_t, Region> regions;  // by their beginning

void check_pending(uint32_t index, bool is_write) {
  const Word& word = words[index];
  if (!word.is_pending) return;
  const char* const what = is_write ? "written" : "read";
  fail(format("shared word %u is %s, and thread %d has not waited for its copy there", index, what, word.writer.thread));
}

void check_order(uint32_t index, bool is_write, int thread) {
  const Word& word = words[index];
  const char* const what = is_write ? "written" : "read";
  if (word.is_written && !happened_before(word.writer, thread)) {
    fail(format("race: shared word %u is written by thread %d and %s by thread %d", index, word.writer.thread, what, thread));
  }
  if (!is_write) return;
  for (const Event& reader : word.readers) {
    if (!happened_before(reader, thread)) {
      fail(format("race: shared word %u is read by thread %d and written by thread %d", index, reader.thread, thread));
    }
  }
}

bool is_shared(const void* pointer) {
  const auto* const byte = static_cast<const unsigned char*>(pointer);
  return byte >= shared_memory && byte < shared_memory + kMaxShared;
}

}  // namespace

void allow_memory(const void* begin, size_t bytes, bool may_write) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  regions[first] = {first + bytes, may_write};
}
void forget_memory() { regions.clear(); }

void begin_memory(size_t shared_bytes) {
  num_shared_bytes = shared_bytes;
  words.assign((shared_bytes + 3) / 4, Word{});
  std::memset(shared_memory, 0xff, kMaxShared);  // not a number, whatever reads it
}

SharedAddress shared_address(const void* pointer) {
  if (!is_shared(pointer)) fail("a pointer is taken for one to shared memory");
  return kSharedBase + static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory);
}
unsigned char* shared_bytes_at(SharedAddress address) { return shared_memory + (address - kSharedBase); }

void check_global(const void* address, int bytes, bool is_write) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto after = regions.upper_bound(begin);
  const char* const what = is_write ? "store" : "load";
  if (begin % bytes != 0) fail(format("global access of %d bytes is misaligned", bytes));
  if (after == regions.begin() || begin + bytes > std::prev(after)->second.end) {
    fail(format("global %s of %d bytes is out of bounds", what, bytes));
  }
  if (is_write && !std::prev(after)->second.may_write) fail("global store to what may only be read");
}

void check_shared(SharedAddress address, int bytes, bool is_write, int first, int count) {
  const size_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > num_shared_bytes) {
    const char* const what = is_write ? "store" : "load";
    fail(format("shared %s of %d bytes at %zu is out of the block's %zu", what, bytes, offset, num_shared_bytes));
  }
  if (offset % bytes != 0) fail(format("shared access of %d bytes is misaligned", bytes));
  for (uint32_t index = offset / 4; index < (offset + bytes + 3) / 4; ++index) {
    Word& word = words[index];
    if (word.is_barrier) fail("an mbarrier is read or written as memory");
    check_pending(index, is_write);
    if (!is_write && !word.is_written) fail(format("shared word %u is read, and nobody has written it", index));
    for (int thread = first; thread < first + count; ++thread) check_order(index, is_write, thread);
    if (is_write) {
      word.is_written = true, word.writer = now();
      word.readers.clear();
      continue;
    }
    const auto known = std::find_if(word.readers.begin(), word.readers.end(), [](const Event& e) { return e.thread == current; });
    if (known == word.readers.end()) word.readers.push_back(now());
    else known->time = now().time;
  }
}

void mark_copy(SharedAddress target, int bytes, bool is_pending) {
  for (uint32_t index = (target - kSharedBase) / 4; index < (target - kSharedBase + bytes) / 4; ++index) {
    words[index].is_pending = is_pending, words[index].writer = now();
  }
}

void reserve_barrier(SharedAddress barrier) {
  if (barrier % 8 != 0) fail("an mbarrier is not 8-byte aligned");
  if (barrier < kSharedBase || barrier - kSharedBase + 8 > num_shared_bytes) fail("an mbarrier is out of bounds");
  for (uint32_t index : {(barrier - kSharedBase) / 4, (barrier - kSharedBase) / 4 + 1}) {
    check_pending(index, true);
    words[index].is_barrier = true;
  }
}

void touch(const void* address, int bytes, bool is_write, const void* place) {
  if (current < 0 || is_stack(address)) return;
  if (is_shared(address)) {
    const SharedAddress shared = shared_address(address);
    check_shared(shared, bytes, is_write, current, 1);
    count_shared(place, current, shared, bytes, is_write);
  } else {
    check_global(address, bytes, is_write);
  }
  maybe_yield();
}

__attribute__((noinline)) void copy(void* target, const void* source, int bytes) {
  touch(source, bytes, false, __builtin_return_address(0));
  unsigned char value[16];  // a random order may change over in between
  std::memcpy(value, source, bytes);
  touch(target, bytes, true, __builtin_return_address(0));
  std::memcpy(target, value, bytes);
}

__attribute__((noinline)) void load_shared(SharedAddress source, void* value, int bytes) {
  check_shared(source, bytes, false, current, 1);
  count_shared(__builtin_return_address(0), current, source, bytes, false);
  std::memcpy(value, shared_bytes_at(source), bytes);
  maybe_yield();
}
__attribute__((noinline)) void store_shared(SharedAddress target, const void* value, int bytes) {
  check_shared(target, bytes, true, current, 1);
  count_shared(__builtin_return_address(0), current, target, bytes, true);
  std::memcpy(shared_bytes_at(target), value, bytes);
  maybe_yield();
}

}  // namespace emu

// A kernel's file is compiled with -fsanitize=thread, without its library: the compiler calls these ahead of each access that is
// none of the vector types' (cuda/cuda_runtime.h). Which of them it calls depends on its release.
#define WATCH(bytes)                                                                                            \
  void __tsan_read##bytes(void* address) { emu::touch(address, bytes, false, __builtin_return_address(0)); }    \
  void __tsan_write##bytes(void* address) { emu::touch(address, bytes, true, __builtin_return_address(0)); }
#define WATCH_UNALIGNED(bytes)                                                                                  \
  void __tsan_unaligned_read##bytes(void* address) { __tsan_read##bytes(address); }                             \
  void __tsan_unaligned_write##bytes(void* address) { __tsan_write##bytes(address); }
extern "C" {
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
WATCH_UNALIGNED(2)
WATCH_UNALIGNED(4)
WATCH_UNALIGNED(8)
WATCH_UNALIGNED(16)
// Arrays in registers, as a card has them; here they are on a thread's stack.
static void require_stack(void* address) {
  if (emu::current >= 0 && !emu::is_stack(address)) emu::fail("memory is read or written by no size of 1, 2, 4, 8 or 16 bytes");
}
void __tsan_read_range(void* address, long) { require_stack(address); }
void __tsan_write_range(void* address, long) { require_stack(address); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
