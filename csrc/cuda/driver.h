// The CUDA driver, opened at run time: neither libcuda nor libcudart is linked, and no CUDA header is needed to build,
// so one build serves machines with and without a GPU. Types and values are those of the driver's stable ABI.
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
inline constexpr Result kNotReady = 600;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventWithTime = 0;
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

// Entry points by their exported names, with what they take; a suffix names the version of the ABI that we speak.
#define KVDOCK_DRIVER_CALLS(CALL) \
  CALL(cuInit, unsigned) \
  CALL(cuDriverGetVersion, int*) \
  CALL(cuGetErrorString, Result, const char**) \
  CALL(cuDeviceGetCount, int*) \
  CALL(cuDeviceGet, DeviceHandle*, int) \
  CALL(cuDeviceGetName, char*, int, DeviceHandle) \
  CALL(cuDeviceGetUuid_v2, Uuid*, DeviceHandle) \
  CALL(cuDeviceTotalMem_v2, size_t*, DeviceHandle) \
  CALL(cuDeviceGetAttribute, int*, int, DeviceHandle) \
  CALL(cuDevicePrimaryCtxRetain, Context*, DeviceHandle) \
  CALL(cuDevicePrimaryCtxRelease_v2, DeviceHandle) \
  CALL(cuCtxPushCurrent_v2, Context) \
  CALL(cuCtxPopCurrent_v2, Context*) \
  CALL(cuModuleLoadData, Module*, const void*) \
  CALL(cuModuleGetFunction, Function*, Module, const char*) \
  CALL(cuMemAlloc_v2, DevicePtr*, size_t) \
  CALL(cuMemFree_v2, DevicePtr) \
  CALL(cuMemHostAlloc, void**, size_t, unsigned) \
  CALL(cuMemFreeHost, void*) \
  CALL(cuMemHostRegister_v2, void*, size_t, unsigned) \
  CALL(cuMemHostUnregister, void*) \
  CALL(cuMemcpyHtoDAsync_v2, DevicePtr, const void*, size_t, Stream) \
  CALL(cuMemcpyDtoHAsync_v2, void*, DevicePtr, size_t, Stream) \
  CALL(cuMemsetD8Async, DevicePtr, unsigned char, size_t, Stream) \
  CALL(cuPointerGetAttribute, void*, int, DevicePtr) \
  CALL(cuStreamCreate, Stream*, unsigned) \
  CALL(cuStreamDestroy_v2, Stream) \
  CALL(cuStreamSynchronize, Stream) \
  CALL(cuStreamWaitEvent, Stream, Event, unsigned) \
  CALL(cuEventCreate, Event*, unsigned) \
  CALL(cuEventDestroy_v2, Event) \
  CALL(cuEventRecord, Event, Stream) \
  CALL(cuEventQuery, Event) \
  CALL(cuEventSynchronize, Event) \
  CALL(cuEventElapsedTime, float*, Event, Event) \
  CALL(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, \
        void**, void**)

struct Driver {
#define KVDOCK_DECLARE(name, ...) Result (*name)(__VA_ARGS__);
  KVDOCK_DRIVER_CALLS(KVDOCK_DECLARE)
#undef KVDOCK_DECLARE
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
