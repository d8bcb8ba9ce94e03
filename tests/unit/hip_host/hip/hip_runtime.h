// A stand-in for HIP's header where there is no card: the kernels of csrc/cuda with csrc/hip's headers, compiled by g++ for this
// processor. The threads of a block are fibers that change over where the threads of a card would meet, and blocks run one after
// the other. It knows the lanes of a wave (-DWAVE=32 or 64) and nothing of time or of caches. Only what the kernels use is here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#define __AMDGCN__ 1
#define __AMDGCN_WAVEFRONT_SIZE WAVE
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // of the one thread that all fibers share; `extern` and block scope are both allowed

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline dim3 threadIdx, blockIdx, gridDim;

namespace host {

inline void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

struct Fiber {
  ucontext_t beginning;
  jmp_buf place;  // where it waits; unlike swapcontext, a jump asks nothing of the kernel
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool has_begun = false, is_done = false;
};
struct Meeting {
  int arrived = 0, generation = 0;
};
inline std::vector<Fiber> fibers;
inline std::map<std::pair<int, int>, Meeting> meetings;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline bool has_moved;
inline uint64_t deposits[1024];

inline void enter() {
  body();
  fibers[threadIdx.x].is_done = has_moved = true;
  _longjmp(scheduler, 1);
}

// Lets thread i go on until it waits or ends.
inline void resume(int i) {
  threadIdx.x = i;
  if (_setjmp(scheduler) != 0) return;
  if (fibers[i].has_begun) _longjmp(fibers[i].place, 1);
  fibers[i].has_begun = true;
  setcontext(&fibers[i].beginning);
}

inline void run_block(int threads, std::function<void()> work) {
  body = std::move(work);
  meetings.clear();
  fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.beginning);
    fiber.beginning.uc_stack.ss_sp = fiber.stack.data();
    fiber.beginning.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.beginning, enter, 0);
  }
  do {
    has_moved = false;
    for (int i = 0; i < threads; ++i) {
      if (!fibers[i].is_done) resume(i);
    }
  } while (has_moved);
  if (std::any_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return !fiber.is_done; })) fail("threads wait for ever");
}

// Returns when the threads first .. first + count - 1 have all called it.
inline void meet(int first, int count) {
  Meeting& meeting = meetings[{first, count}];
  const int generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    has_moved = true;
  }
  Fiber& self = fibers[threadIdx.x];
  while (meeting.generation == generation) {
    if (_setjmp(self.place) == 0) _longjmp(scheduler, 1);
  }
}

// What the thread `source` of the `width` threads around this one gave.
template <typename T>
T exchange(T value, int source, int width) {
  const int first = threadIdx.x / width * width;
  if (source < 0 || source >= width) fail("a lane outside of the group was asked");
  std::memcpy(&deposits[threadIdx.x], &value, sizeof value);
  meet(first, width);
  std::memcpy(&value, &deposits[first + source], sizeof value);
  meet(first, width);
  return value;
}

}  // namespace host

inline unsigned __lane_id() { return threadIdx.x % WAVE; }
inline void __syncthreads() { host::meet(0, static_cast<int>(host::fibers.size())); }
inline void __threadfence() {}
template <typename T>
T __ldg(const T* source) {
  return *source;
}

template <typename T>
T __shfl(T value, int lane, int width) {
  return host::exchange(value, lane, width);
}
template <typename T>
T __shfl_xor(T value, int mask, int width) {
  return host::exchange(value, static_cast<int>(threadIdx.x % width) ^ mask, width);
}
template <typename T>
T __shfl_up(T value, unsigned distance, int width) {
  const int self = threadIdx.x % width, source = self - static_cast<int>(distance);
  return host::exchange(value, source < 0 ? self : source, width);
}
// The halves of a wave of 64 need not be at the same place: bits of the half that is not this thread's are set, whatever it does.
inline uint64_t __ballot(bool predicate) {
  const int half = __lane_id() & 32;
  uint64_t bits = WAVE == 32 ? 0 : 0xffffffffull << (32 - half);
  for (int lane = 0; lane < 32; ++lane) bits |= uint64_t{host::exchange(predicate, lane, 32)} << (half + lane);
  return bits;
}

template <typename T>
T atomicAdd(T* target, T value) {
  return std::exchange(*target, *target + value);
}
template <typename T>
T atomicExch(T* target, T value) {
  return std::exchange(*target, value);
}
constexpr int __HIP_MEMORY_SCOPE_AGENT = 0;
template <typename T>
T __hip_atomic_load(const T* source, int, int) {
  return *source;
}
template <typename T>
T __builtin_nontemporal_load(const T* source) {
  return *source;
}

using std::max;
using std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

using hipStream_t = void*;
enum hipError_t { hipSuccess, hipErrorInvalidValue };
enum hipDeviceAttribute_t { hipDeviceAttributeMultiprocessorCount };
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };
constexpr size_t kSharedBytes = 65536;  // of a workgroup, on every card that is compiled for
namespace host {
inline int processors = 1, blocks_each = 1;
inline hipError_t last_error = hipSuccess;
}  // namespace host
inline hipError_t hipGetLastError() { return std::exchange(host::last_error, hipSuccess); }
inline const char* hipGetErrorString(hipError_t) { return "too much shared memory"; }
inline hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t, int) {
  *value = host::processors;
  return hipSuccess;
}
inline hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, size_t bytes) {
  return host::last_error = bytes <= kSharedBytes ? hipSuccess : hipErrorInvalidValue;
}
template <typename Kernel>
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = host::blocks_each;
  return hipSuccess;
}
template <typename Params>
void hipLaunchKernelGGL(void (*kernel)(Params), dim3 grid, dim3 threads, size_t, hipStream_t, const Params& params) {
  gridDim = grid;
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) host::run_block(static_cast<int>(threads.x), [&] { kernel(params); });
  }
}

#include "matrix_instructions.h"
