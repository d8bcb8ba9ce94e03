// How the kernels of a step follow each other: programmatic dependent launch, where the card has it (sm_90 and later).
//
// A kernel launched with `launch_dependent` may begin while the one before it on the stream still runs. It reads weights and
// other constants at once, and calls `wait_for_inputs` before it touches anything that an earlier kernel may have written or may
// still read. Once all its blocks have called `allow_dependents`, the kernel after it may begin to do the same: kernels that read
// weights call it first of all, others after their wait, as measurement has it. Every thread must call `wait_for_inputs` on
// every path: a kernel that ended without it would let the next one run ahead of the one before.
#pragma once

#include "common.cuh"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace albatross {

__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#if defined(__HIP__) || defined(__HIPCC__)
constexpr auto kMultiprocessorCount = hipDeviceAttributeMultiprocessorCount;
#else
constexpr auto kMultiprocessorCount = cudaDevAttrMultiProcessorCount;

// Whether the present card runs code in which `wait_for_inputs` waits: not where it runs what was compiled for an older one.
// One look at any kernel of the library answers for all.
inline bool has_dependent_launch(const void* kernel) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> answers[kMaxDevices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    const bool is_new = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
    answer = is_new ? 1 : -1;
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer > 0;
}
#endif

// What the present card has of something; 0 with an error left for launch_error.
template <typename Attribute>
int card_attribute(Attribute attribute) {
  int device = 0, value = 0;
  return GPU_API(GetDevice)(&device) == GPU_API(Success) &&
                 GPU_API(DeviceGetAttribute)(&value, attribute, device) == GPU_API(Success)
             ? value
             : 0;
}
inline int multiprocessors() { return card_attribute(kMultiprocessorCount); }
#if !defined(__HIP__) && !defined(__HIPCC__)
inline int shared_memory() { return card_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes that a block may have
#endif

// How many blocks of a kernel the present card holds at once, or 0 with an error left for launch_error. Asked once for each kernel
// and card; also allows the kernel as much shared memory as is named here.
template <typename Params>
int resident_blocks(void (*kernel)(Params), int threads, int shared_bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> known;
  const void* const address = reinterpret_cast<const void*>(kernel);
  int device = 0, processors = 0, each = 0;
  if (GPU_API(GetDevice)(&device) != GPU_API(Success)) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{address, device}];
  if (blocks != 0) return blocks;
  if (GPU_API(DeviceGetAttribute)(&processors, kMultiprocessorCount, device) != GPU_API(Success) ||
      GPU_API(FuncSetAttribute)(address, GPU_API(FuncAttributeMaxDynamicSharedMemorySize), shared_bytes) != GPU_API(Success) ||
      GPU_API(OccupancyMaxActiveBlocksPerMultiprocessor)(&each, kernel, threads, shared_bytes) != GPU_API(Success)) {
    return 0;
  }
  blocks = processors * each;
  return blocks;
}

// Launches kernel(params) on `stream` and returns nullptr, or what the driver refused.
template <typename Params>
const char* launch_dependent(void (*kernel)(Params), dim3 grid, int threads, size_t shared_bytes, gpu_stream_t stream,
                             const Params& params) {
#if defined(__HIP__) || defined(__HIPCC__)
  hipLaunchKernelGGL(kernel, grid, dim3(static_cast<unsigned>(threads)), shared_bytes, stream, params);
#else
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = has_dependent_launch(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, params);
#endif
  return launch_error();
}

}  // namespace albatross
