// The CUDA driver, opened at run time: neither libcuda nor libcudart is linked, and no CUDA header is
// needed to build, so one build serves machines with and without a GPU. Types and values are those of
// the driver's stable ABI (NVIDIA, "CUDA Driver API").
//
// Ownership: the library stays open for the life of the process. Thread safety: all calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvdock::cuda {

using Result = int;
using DevicePtr = uint64_t;
using DeviceHandle = int;
using Context = struct ContextOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = struct StreamOpaque*;
using Event = struct EventOpaque*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kNotReady = 600;
inline constexpr Result kAlreadyRegistered = 712;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;  // cuMemHostAlloc and cuMemHostRegister
inline constexpr unsigned kHostDeviceMap = 2;

enum Attribute : int { kMultiprocessors = 16, kComputeMajor = 75, kComputeMinor = 76 };
enum PointerAttribute : int { kMemoryType = 2, kDeviceOrdinal = 9 };
inline constexpr unsigned kMemoryTypeDevice = 2;

struct Uuid {
  unsigned char bytes[16];
};

// How a batch of copies treats its sources: in stream order, no hints.
struct MemcpyAttributes {
  int source_access_order = 1;
  int hints[4] = {0, 0, 0, 0};
  unsigned flags = 0;
};

// Entry points by their exported names; a suffix names the version of the ABI that we speak.
struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(DeviceHandle*, int);
  Result (*cuDeviceGetName)(char*, int, DeviceHandle);
  Result (*cuDeviceGetUuid_v2)(Uuid*, DeviceHandle);
  Result (*cuDeviceTotalMem_v2)(size_t*, DeviceHandle);
  Result (*cuDeviceGetAttribute)(int*, int, DeviceHandle);
  Result (*cuDevicePrimaryCtxRetain)(Context*, DeviceHandle);
  Result (*cuDevicePrimaryCtxRelease_v2)(DeviceHandle);
  Result (*cuCtxPushCurrent_v2)(Context);
  Result (*cuCtxPopCurrent_v2)(Context*);
  Result (*cuModuleLoadData)(Module*, const void*);
  Result (*cuModuleGetFunction)(Function*, Module, const char*);
  Result (*cuMemAlloc_v2)(DevicePtr*, size_t);
  Result (*cuMemFree_v2)(DevicePtr);
  Result (*cuMemHostAlloc)(void**, size_t, unsigned);
  Result (*cuMemFreeHost)(void*);
  Result (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  Result (*cuMemHostUnregister)(void*);
  Result (*cuMemcpyHtoDAsync_v2)(DevicePtr, const void*, size_t, Stream);
  Result (*cuMemcpyDtoHAsync_v2)(void*, DevicePtr, size_t, Stream);
  Result (*cuMemsetD8Async)(DevicePtr, unsigned char, size_t, Stream);
  Result (*cuPointerGetAttribute)(void*, int, DevicePtr);
  Result (*cuStreamCreate)(Stream*, unsigned);
  Result (*cuStreamDestroy_v2)(Stream);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuStreamWaitEvent)(Stream, Event, unsigned);
  Result (*cuEventCreate)(Event*, unsigned);
  Result (*cuEventDestroy_v2)(Event);
  Result (*cuEventRecord)(Event, Stream);
  Result (*cuEventQuery)(Event);
  Result (*cuEventSynchronize)(Event);
  Result (*cuEventElapsedTime)(float*, Event, Event);
  Result (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream,
                           void**, void**);
  // Since CUDA 12.8; null before. Many copies cost hardly more than one (about 0.3 against 3 µs each on an H200).
  Result (*cuMemcpyBatchAsync)(DevicePtr*, DevicePtr*, size_t*, size_t, MemcpyAttributes*, size_t*, size_t, size_t*,
                               Stream);
};

// "" when the driver is open and sees a GPU, else one sentence that says what is missing.
const std::string& why_unavailable();

// Throws Refused{cuda} with that sentence.
const Driver& driver();

// Throws Refused{cuda} with the driver's own text when `what` failed.
void check(Result result, const char* what);

}  // namespace kvdock::cuda
