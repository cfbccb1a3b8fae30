// One GPU in this process: the primary context (in which torch works), the copy kernels loaded into it, and the
// checksum keys on the device.
//
// Ownership: one Device for each GPU, for the life of the process; streams and memory belong to their makers.
// Thread safety: all methods. A ContextGuard makes the driver calls that need a context.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/errors.h"
#include "copy/direction.h"
#include "cuda/driver.h"

namespace kvdock::cuda {

struct DeviceInfo {
  int index;
  std::string name, uuid;  // uuid: 32 hex digits
  int compute;             // 90 for sm_90
  int driver;              // the CUDA version that the driver supports: 13000 for 13.0
  int multiprocessors;
  size_t memory_bytes;
};

std::vector<DeviceInfo> devices();

// Chooses a kernel: see kernels.cu.
struct Variant {
  Direction direction;
  bool alike, wide;
};

enum class PackStep { learn, pack, finish, unpack };

class Device {
 public:
  // Throws Refused{cuda}: no such device, no kernels in this build, no kernel for this GPU.
  static Device& get(int index);

  Context context() const { return context_; }
  const DeviceInfo& info() const { return info_; }
  Function kernel(const Variant& variant) const;
  Function kernel(PackStep step, bool wide) const;
  unsigned pack_threads(PackStep step) const;  // of a thread block of a packing kernel
  unsigned pack_shared_bytes() const;           // of one

  struct Keys {
    DevicePtr nh, level2;
  };
  // Uploads checksum keys for parts of up to `stripes` stripes, unless the device has them already, and waits for the
  // upload. Earlier tables stay valid, because copies may use them. Throws Refused{cuda}, or Refused{copy} when the CPU
  // has no such keys.
  void grow_keys(size_t stripes);
  Keys keys() const;  // the keys of the longest table

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

 private:
  explicit Device(int index);

  DeviceInfo info_{};
  Context context_ = nullptr;
  Module module_ = nullptr;
  Function kernels_[8] = {}, pack_kernels_[8] = {};
  unsigned pack_threads_ = 0;
  mutable std::mutex mutex_;  // guards what follows
  Keys keys_{};
  size_t key_stripes_ = 0;
};

// Makes a context current on this thread while the guard lives.
class ContextGuard : public Calls {
 public:
  explicit ContextGuard(const Device& device) : ContextGuard(device.context()) {}
  explicit ContextGuard(Context context) { check((*this)->cuCtxPushCurrent_v2(context), "cuCtxPushCurrent"); }
  ~ContextGuard() {
    Context dropped;
    (*this)->cuCtxPopCurrent_v2(&dropped);
  }
};

// Calls f with the device's context current, and ignores Refused: after the driver's end, everything that f would free
// or wait for is gone.
template <class F>
void unless_gone(const Device& device, F&& f) try {
  const ContextGuard cu(device);
  f(cu);
} catch (const Refused&) {
}

template <auto kDestroy>
struct Destroyer {
  Device* device;
  void operator()(auto* handle) const {
    unless_gone(*device, [&](const Calls& cu) { (cu.operator->()->*kDestroy)(handle); });
  }
};
using OwnedStream = std::unique_ptr<StreamOpaque, Destroyer<&Driver::cuStreamDestroy_v2>>;
using OwnedEvent = std::unique_ptr<EventOpaque, Destroyer<&Driver::cuEventDestroy_v2>>;

OwnedEvent make_event(Device& device, unsigned flags = kEventDisableTiming);

// A stream that does not wait for the legacy default stream.
OwnedStream make_stream(Device& device);

}  // namespace kvdock::cuda
