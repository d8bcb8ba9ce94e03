// Runs one block of a CUDA kernel on one thread of this processor, and refuses what a card would answer with wrong numbers: every
// CUDA thread is a fiber, operations of a whole warp wait for its 32 lanes, and the order of all else is the caller's choice.
// Knows no kernel. cuda/ has the headers that kernels are compiled with instead of CUDA's; tests/cuda_host_cases.py builds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emu {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr size_t kMaxShared = 227 * 1024;  // that a block may have on an H100

// Whose turn it is, where several threads could go on. A random order also changes over behind accesses to memory.
enum class Order { kRoundRobin, kReversed, kRandom, kFirstWarps, kLastWarps };

struct Options {
  Order order;
  uint64_t seed;      // of a random order
  bool counts_banks;  // see conflicts()
};
extern Options options;               // of the blocks that run next
extern unsigned char* shared_memory;  // the dynamic part, kMaxShared bytes: who runs a kernel says where its own lies

// Nothing but these bytes of global memory may be touched, until `forget_memory`.
void allow_memory(const void* begin, size_t bytes, bool may_write);
void forget_memory();

struct Index3 {
  unsigned x, y, z;
};

// Returns nullptr, or what the kernel did wrong: the text is good until the next call.
const char* run_block(const std::function<void()>& kernel, int num_threads, size_t shared_bytes, Index3 block, Index3 grid);

// What accesses to shared memory cost beyond one pass of 128 bytes after the other, one place in the code a line: its offset in
// this library, "load" or "store", the bytes of a lane, and the passes that were too many. Counts a block from its first
// __syncthreads on, all blocks since `forget_conflicts`.
std::string conflicts();
void forget_conflicts();

// ---- What the threads of a kernel call. A place is the code that made an access.

[[noreturn]] void fail(const std::string& what);
Index3 thread_index();
Index3 block_index();
Index3 grid_size();

void touch(const void* address, int bytes, bool is_write, const void* place);
void copy(void* target, const void* source, int bytes);  // one load and one store
using SharedAddress = uint32_t;
SharedAddress shared_address(const void* pointer);
void load_shared(SharedAddress source, void* value, int bytes);
void store_shared(SharedAddress target, const void* value, int bytes);

// cp.async of 16 bytes, or of zeros: they come with the wait for their group, and nothing may touch the target meanwhile.
void copy_async(SharedAddress target, const void* source, bool is_wanted);
void commit_copies();                  // makes a group of what the thread issued since its last one
void wait_for_copies(int num_latest);  // for all of the thread's groups but its latest so many

void sync_threads();
void sync_warp();
uint32_t shuffle(uint32_t value, int source_lane);
uint32_t reduce_max(uint32_t value);
uint32_t reduce_or(uint32_t value);
uint32_t transpose(uint32_t matrix);                                             // movmatrix
void load_matrices(uint32_t (&m)[4], SharedAddress row, bool is_transposed);     // ldmatrix .x4
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);  // mma.m16n8k16, fp16 to fp32
void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);  // mma.m16n8k8

void init_barrier(SharedAddress barrier, int count);  // mbarriers
void arrive(SharedAddress barrier);
void wait_barrier(SharedAddress barrier, int parity);

}  // namespace emu
