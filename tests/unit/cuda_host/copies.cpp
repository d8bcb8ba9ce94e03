// Asynchronous copies from global to shared memory. They may be done at any time from the call to the wait for their group, and
// only the thread that waits knows then; so here the call leaves no number behind, and the wait is the store.
#include "block.h"

#include <array>
#include <cstring>
#include <deque>
#include <utility>

namespace emu {

namespace {

constexpr int kBytes = 16;
using Bytes = std::array<unsigned char, kBytes>;

struct Copy {
  SharedAddress target;
  const void* source;  // null: zeros
  Bytes bytes;         // that lay there at the call
};
struct Copies {
  std::deque<std::vector<Copy>> groups;  // the oldest first
  std::vector<Copy> open;                // of no group
};
std::vector<Copies> copies;  // by thread

// The source is read at both ends of the time that a card may read it in: a number that is written too late or overwritten too
// early is found, whichever of them the card would have got.
void complete(const Copy& copy) {
  if (copy.source != nullptr && std::memcmp(copy.source, copy.bytes.data(), kBytes) != 0) {
    fail("the source of an asynchronous copy is written before the wait for the copy");
  }
  mark_copy(copy.target, kBytes, false);
  std::memcpy(shared_bytes_at(copy.target), copy.bytes.data(), kBytes);
}

}  // namespace

void begin_copies() { copies.assign(num_threads, Copies{}); }

void copy_async(SharedAddress target, const void* source, bool is_wanted) {
  if (reinterpret_cast<uintptr_t>(source) % kBytes != 0) fail("the source of an asynchronous copy is misaligned");
  if (is_wanted) check_global(source, kBytes, false);
  check_shared(target, kBytes, true, current, 1);
  mark_copy(target, kBytes, true);
  std::memset(shared_bytes_at(target), 0xff, kBytes);
  Copy copy{target, is_wanted ? source : nullptr, {}};
  if (is_wanted) std::memcpy(copy.bytes.data(), source, kBytes);
  copies[current].open.push_back(copy);
  maybe_yield();
}

void commit_copies() {
  Copies& own = copies[current];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void wait_for_copies(int num_latest) {
  auto& groups = copies[current].groups;
  for (; groups.size() > static_cast<size_t>(num_latest); groups.pop_front()) {
    for (const Copy& copy : groups.front()) complete(copy);
  }
  maybe_yield();
}

void end_copies() {
  size_t count = copies[current].open.size();
  for (const auto& group : copies[current].groups) count += group.size();
  if (count > 0) fail(format("a thread ends, and has not waited for %zu of its asynchronous copies", count));
}

}  // namespace emu
