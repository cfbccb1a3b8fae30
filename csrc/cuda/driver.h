// The CUDA driver, opened at run time: neither libcuda nor libcudart is linked, and no CUDA header is needed to build,
// so one build serves machines with and without a GPU. Types and values are those of the driver's stable ABI.
//
// An engine may capture a CUDA graph at any time; most do so when they start. While a thread captures in the global
// mode, which is the usual one, the driver refuses many calls in all threads of the process and spoils the capture:
// cuMemHostRegister, cuMemAlloc, cuEventQuery and more. It allows them in threads that are in the relaxed mode.
// Invariant: outside driver.cpp the driver is called through Calls alone, and a thread that has a Calls is in the
// relaxed mode.
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
enum class CaptureMode : int { global = 0, local = 1, relaxed = 2 };  // of a thread
inline constexpr int kNotCapturing = 0;                                // of a stream

inline constexpr unsigned kHostPortable = 1;  // cuMemHostAlloc and cuMemHostRegister
inline constexpr unsigned kHostDeviceMap = 2;

enum Attribute : int { kMultiprocessors = 16, kMostSharedBytes = 97, kComputeMajor = 75, kComputeMinor = 76 };
enum FunctionAttribute : int { kMostDynamicSharedBytes = 8 };
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

// Entry points by their exported names, with their arguments; a suffix names the version of the ABI that is used.
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
  CALL(cuFuncSetAttribute, Function, int, int) \
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
  CALL(cuStreamIsCapturing, Stream, int*) \
  CALL(cuThreadExchangeStreamCaptureMode, CaptureMode*) \
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

// "" when the driver is open and finds a GPU, else one sentence with the reason.
const std::string& why_unavailable();

// Gives access to the driver. While a Calls lives, its thread is in the relaxed capture mode; then the thread gets its
// earlier mode back, because it may be one of the engine's own threads.
class Calls {
 public:
  // Throws Refused{cuda} with why_unavailable().
  Calls();
  ~Calls();
  const Driver* operator->() const { return &table_; }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

 private:
  const Driver& table_;
  CaptureMode before_ = CaptureMode::relaxed;
};

// Puts this thread in the relaxed mode for good, for threads that also call torch.cuda. Does nothing while this
// process has not opened the driver.
void relax_thread();

// Throws Refused{cuda} when a graph is being captured on `stream`. An event of such a stream belongs to the graph: a
// stream that waits for it is captured as well.
void refuse_captured(const Calls& cu, Stream stream);

// Throws Refused{cuda} with the driver's own text when `what` failed.
void check(Result result, const char* what);

}  // namespace kvdock::cuda
