#include "cuda/device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "copy/checksum.h"
#include "base/errors.h"
#include "cuda/kernel_image.h"
#include "cuda/pack_args.h"

namespace kvdock::cuda {

namespace {

int attribute(DeviceHandle device, Attribute name) {
  int value = 0;
  const Calls cu;
  check(cu->cuDeviceGetAttribute(&value, name, device), "cuDeviceGetAttribute");
  return value;
}

DeviceInfo describe(int index) {
  const Calls cu;
  DeviceHandle handle;
  check(cu->cuDeviceGet(&handle, index), "cuDeviceGet");
  DeviceInfo info{};
  info.index = index;
  std::array<char, 256> name{};
  check(cu->cuDeviceGetName(name.data(), int(name.size()), handle), "cuDeviceGetName");
  info.name = name.data();
  Uuid uuid;
  check(cu->cuDeviceGetUuid_v2(&uuid, handle), "cuDeviceGetUuid");
  for (const unsigned char byte : uuid.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    info.uuid += kDigits[byte >> 4];
    info.uuid += kDigits[byte & 15];
  }
  check(cu->cuDeviceTotalMem_v2(&info.memory_bytes, handle), "cuDeviceTotalMem");
  info.compute = 10 * attribute(handle, kComputeMajor) + attribute(handle, kComputeMinor);
  check(cu->cuDriverGetVersion(&info.driver), "cuDriverGetVersion");
  info.multiprocessors = attribute(handle, kMultiprocessors);
  return info;
}

int device_count() {
  int count = 0;
  const Calls cu;
  check(cu->cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

}  // namespace

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  for (int i = 0, count = device_count(); i < count; ++i) found.push_back(describe(i));
  return found;
}

Device& Device::get(int index) {
  static std::mutex mutex;
  static std::map<int, Device*> open;  // never closed: torch uses the contexts, too, until the process ends
  const std::lock_guard<std::mutex> guard(mutex);
  Device*& device = open[index];
  if (device == nullptr) device = new Device(index);
  return *device;
}

Device::Device(int index) {
  const Calls cu;
  const int count = device_count();
  if (index < 0 || index >= count) refuse(Refusal::cuda, "CUDA device", index, "0.." + std::to_string(count - 1));
  if (kKernelImageBytes == 0)
    refuse(Refusal::cuda, "CUDA kernels", "none in this build", "a build made where nvcc is installed");
  info_ = describe(index);
  DeviceHandle handle;
  check(cu->cuDeviceGet(&handle, index), "cuDeviceGet");
  check(cu->cuDevicePrimaryCtxRetain(&context_, handle), "cuDevicePrimaryCtxRetain");
  try {
    const ContextGuard current(context_);
    check(cu->cuModuleLoadData(&module_, kKernelImage), "loading the copy kernels");
    static constexpr const char* kNames[8] = {  // in the order of kernel()
        "kvdock_scatter",       "kvdock_gather",       "kvdock_scatter_narrow",       "kvdock_gather_narrow",
        "kvdock_scatter_mixed", "kvdock_gather_mixed", "kvdock_scatter_mixed_narrow", "kvdock_gather_mixed_narrow"};
    for (size_t i = 0; i < 8; ++i) check(cu->cuModuleGetFunction(&kernels_[i], module_, kNames[i]), kNames[i]);
    static constexpr const char* kPackNames[8] = {  // in the order of PackStep, wide and narrow
        "kvdock_learn", "kvdock_pack",        "kvdock_finish", "kvdock_unpack",
        "kvdock_learn", "kvdock_pack_narrow", "kvdock_finish", "kvdock_unpack_narrow"};
    constexpr unsigned kOthers = 2048;  // what the kernels have besides, with what aligns it
    const auto most = unsigned(attribute(handle, kMostSharedBytes));
    pack_threads_ = std::min(kMostPackThreads, (most - kOthers - kPackSharedBytes) / kPackWarpBytes * 32);
    for (size_t i = 0; i < 8; ++i) {
      check(cu->cuModuleGetFunction(&pack_kernels_[i], module_, kPackNames[i]), kPackNames[i]);
      check(cu->cuFuncSetAttribute(pack_kernels_[i], kMostDynamicSharedBytes, int(pack_shared_bytes())), kPackNames[i]);
    }
  } catch (...) {
    cu->cuDevicePrimaryCtxRelease_v2(handle);
    throw;
  }
}

Function Device::kernel(const Variant& v) const {
  return kernels_[size_t(v.direction == Direction::gather) | size_t(!v.wide) << 1 | size_t(!v.alike) << 2];
}

Function Device::kernel(PackStep step, bool wide) const { return pack_kernels_[size_t(step) + (wide ? 0 : 4)]; }

unsigned Device::pack_threads(PackStep step) const {
  return step == PackStep::unpack ? std::min(pack_threads_, kMostUnpackThreads) : pack_threads_;
}

unsigned Device::pack_shared_bytes() const { return kPackSharedBytes + pack_threads_ / 32 * kPackWarpBytes; }

Device::Keys Device::keys() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return keys_;
}

void Device::grow_keys(size_t stripes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (stripes <= key_stripes_) return;
  const auto host = checksum_keys(stripes);
  const ContextGuard cu(*this);
  const size_t level2_bytes = host->level2.size() * sizeof(uint64_t);
  // One allocation: the NH keys, then level two. Copies may use a shorter table, so it is not freed; each table is at
  // least twice as long as the one before, so all earlier ones together are no larger than the last.
  DevicePtr memory = 0;
  check(cu->cuMemAlloc_v2(&memory, 2 * kChecksumStripeBytes + level2_bytes), "memory for checksum keys");
  const OwnedStream stream = make_stream(*this);
  Result result = kSuccess;
  const auto upload = [&](DevicePtr to, const void* from, size_t bytes) {
    if (result == kSuccess) result = cu->cuMemcpyHtoDAsync_v2(to, from, bytes, stream.get());
  };
  upload(memory, host->first, kChecksumStripeBytes);
  upload(memory + kChecksumStripeBytes, host->second, kChecksumStripeBytes);
  upload(memory + 2 * kChecksumStripeBytes, host->level2.data(), level2_bytes);
  if (result == kSuccess) result = cu->cuStreamSynchronize(stream.get());
  if (result != kSuccess) cu->cuMemFree_v2(memory);
  check(result, "upload of checksum keys");
  keys_ = {memory, memory + 2 * kChecksumStripeBytes};
  key_stripes_ = host->stripes();
}

OwnedEvent make_event(Device& device, unsigned flags) {
  const ContextGuard cu(device);
  Event event = nullptr;
  check(cu->cuEventCreate(&event, flags), "cuEventCreate");
  return OwnedEvent(event, {&device});
}

OwnedStream make_stream(Device& device) {
  const ContextGuard cu(device);
  Stream stream = nullptr;
  check(cu->cuStreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate");
  return OwnedStream(stream, {&device});
}

}  // namespace kvdock::cuda
