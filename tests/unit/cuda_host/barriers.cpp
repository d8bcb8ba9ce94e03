// mbarriers: they count arrivals, and change their parity with the last one that they wait for.
#include "block.h"

#include <algorithm>
#include <map>

namespace emu {

namespace {

struct Barrier {
  int count, pending, parity;  // parity: of the phase that is not complete
  Clock arriving, complete;    // what came before the arrivals of this phase, and before those of the phases behind it
  Event initialisation;
};
std::map<SharedAddress, Barrier> barriers;

void join(Clock& clock, const Clock& other) {
  std::transform(clock.begin(), clock.end(), other.begin(), clock.begin(), [](auto x, auto y) { return std::max(x, y); });
}

Barrier& barrier_at(SharedAddress address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail("an mbarrier is used that nobody has initialised");
  if (!happened_before(found->second.initialisation, current)) fail("race: an mbarrier is used, and may not be initialised yet");
  return found->second;
}

}  // namespace

void begin_barriers() { barriers.clear(); }

void init_barrier(SharedAddress barrier, int count) {
  reserve_barrier(barrier);
  barriers[barrier] = {count, count, 0, Clock(num_threads, 0), Clock(num_threads, 0), now()};
}

void arrive(SharedAddress address) {
  Barrier& barrier = barrier_at(address);
  join(barrier.arriving, clock_of(current));
  ++clock_of(current)[current];
  if (--barrier.pending == 0) barrier.parity ^= 1, barrier.pending = barrier.count, barrier.complete = barrier.arriving;
  maybe_yield();
}

void wait_barrier(SharedAddress address, int parity) {
  const Barrier& barrier = barrier_at(address);
  if (barrier.parity == parity) wait_until([&barrier, parity] { return barrier.parity != parity; });
  join(clock_of(current), barrier.complete);
  maybe_yield();
}

}  // namespace emu
