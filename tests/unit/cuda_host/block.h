// What the parts of the emulator know of the block that runs. Threads have vector clocks: an event is a thread and its time, and
// a thread knows of all events that barriers have ordered before its own.
#pragma once

#include "emulator.h"

#include <vector>

namespace emu {

using Clock = std::vector<uint32_t>;  // by thread: up to which of its times all is known

struct Event {
  int thread;
  uint32_t time;
};

extern int current;  // the thread that runs; -1 outside of kernels
extern int num_threads;

Event now();
bool happened_before(const Event& event, int thread);
Clock& clock_of(int thread);

// scheduler.cpp
void maybe_yield();                                           // lets others go on, if the order is random
void wait_until(const std::function<bool()>& is_ready);       // lets them go on until then
void join_clocks(int first, int count);                       // orders what `count` threads did before what they will do
bool is_stack(const void* address);

// memory.cpp
void begin_memory(size_t shared_bytes);
void check_shared(SharedAddress address, int bytes, bool is_write, int first, int count);  // an access of `count` threads
void reserve_barrier(SharedAddress barrier);                                               // no memory from here on
void check_global(const void* address, int bytes, bool is_write);
void mark_copy(SharedAddress target, int bytes, bool is_pending);  // this thread writes there now, or is about to
unsigned char* shared_bytes_at(SharedAddress address);

// copies.cpp
void begin_copies();
void end_copies();  // the thread ends

// banks.cpp
void begin_banks();
void begin_counting();
void count_shared(const void* place, int thread, SharedAddress address, int bytes, bool is_write);
void end_accesses(int warp);  // its lanes have met: what they did up to here belongs to no later instruction

// barriers.cpp, warp.cpp
void begin_barriers();
void begin_warps();

// As printf does.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emu
