// Bank conflicts. Shared memory has 32 banks of 4 bytes; a warp's access goes in passes of at most 128 bytes, of lanes one after
// the other, and a pass takes as long as the most different words that it wants of one bank.
#include "block.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <tuple>

namespace emu {

namespace {

// One instruction of a warp, as far as its lanes have come to it.
struct Access {
  std::array<bool, kWarp> is_active{};
  std::array<SharedAddress, kWarp> address{};
};
using Place = std::tuple<const void*, bool, int>;  // code, whether it writes, bytes of a lane
struct Visits {
  std::array<int, kWarp> counts{};  // by lane, since the warp last met: a lane's n-th is the other lanes' n-th
  std::vector<Access> accesses;
};
std::map<Place, Visits> visits[kMaxThreads / kWarp];
std::map<Place, long> excess;
bool is_counting;

// Passes beyond those that there must be.
int excess_of(const Access& access, int bytes) {
  const int lanes = bytes <= 4 ? kWarp : 128 / bytes;
  int too_many = 0;
  for (int first = 0; first < kWarp; first += lanes) {
    std::array<std::set<uint32_t>, 32> banks;
    for (int lane = first; lane < first + lanes; ++lane) {
      if (!access.is_active[lane]) continue;
      for (int byte = 0; byte < bytes; byte += 4) {
        const uint32_t word = (access.address[lane] + byte) / 4;
        banks[word % 32].insert(word);
      }
    }
    const auto worst = std::max_element(banks.begin(), banks.end(), [](auto& x, auto& y) { return x.size() < y.size(); });
    too_many += std::max(static_cast<int>(worst->size()) - 1, 0);
  }
  return too_many;
}

}  // namespace

void begin_banks() {
  is_counting = false;
  for (auto& warp : visits) warp.clear();
}
void begin_counting() { is_counting = options.counts_banks; }

void count_shared(const void* place, int thread, SharedAddress address, int bytes, bool is_write) {
  if (!is_counting) return;
  const int lane = thread % kWarp;
  Visits& here = visits[thread / kWarp][{place, is_write, bytes}];
  const size_t n = here.counts[lane]++;
  if (here.accesses.size() <= n) here.accesses.resize(n + 1);
  here.accesses[n].is_active[lane] = true;
  here.accesses[n].address[lane] = address;
}

void end_accesses(int warp) {
  for (const auto& [place, here] : visits[warp]) {
    for (const Access& access : here.accesses) excess[place] += excess_of(access, std::get<2>(place));
  }
  visits[warp].clear();
}

std::string conflicts() {
  Dl_info library{};
  dladdr(reinterpret_cast<const void*>(&conflicts), &library);
  std::string text;
  for (const auto& [place, passes] : excess) {
    const auto& [code, is_write, bytes] = place;
    const auto offset = static_cast<const char*>(code) - static_cast<const char*>(library.dli_fbase);
    if (passes > 0) text += format("%#tx %s %d %ld\n", offset, is_write ? "store" : "load", bytes, passes);
  }
  return text;
}
void forget_conflicts() { excess.clear(); }

}  // namespace emu
