#include "cuda/memory.h"

#include <map>
#include <shared_mutex>

#include "base/errors.h"

namespace kvdock::cuda {

namespace {

std::shared_mutex g_mutex;            // guards g_ranges
std::map<uintptr_t, Range> g_ranges;  // by begin; never overlapping

std::string range_text(uintptr_t begin, size_t bytes) {
  return std::to_string(bytes) + " bytes at " + std::to_string(begin);
}

void add_range(const Range& range) {
  const std::lock_guard<std::shared_mutex> guard(g_mutex);
  const auto next = g_ranges.lower_bound(range.begin);
  const bool meets_next = next != g_ranges.end() && next->second.begin < range.end;
  const bool meets_last = next != g_ranges.begin() && std::prev(next)->second.end > range.begin;
  if (meets_next || meets_last)
    refuse(Refusal::cuda, "memory for slots", range_text(range.begin, range.end - range.begin),
           "memory not yet in use for slots");
  g_ranges[range.begin] = range;
}

void drop_range(uintptr_t begin) {
  const std::lock_guard<std::shared_mutex> guard(g_mutex);
  g_ranges.erase(begin);
}

}  // namespace

void require_on_device(const Device& device, uintptr_t address, size_t bytes) {
  for (const uintptr_t at : {address, address + bytes - 1}) {
    unsigned type = 0;
    int ordinal = -1;
    const Calls cu;
    const bool known = cu->cuPointerGetAttribute(&type, kMemoryType, at) == kSuccess &&
                       cu->cuPointerGetAttribute(&ordinal, kDeviceOrdinal, at) == kSuccess;
    if (known && type == kMemoryTypeDevice && ordinal == device.info().index) continue;
    const std::string found = known ? "memory type " + std::to_string(type) + " of device " + std::to_string(ordinal)
                                    : "memory unknown to the driver";
    refuse(Refusal::cuda, "address " + std::to_string(at), found,
           "memory of device " + std::to_string(device.info().index));
  }
}

std::optional<Range> find_range(uintptr_t address, size_t bytes) {
  const std::shared_lock<std::shared_mutex> guard(g_mutex);
  auto next = g_ranges.upper_bound(address);
  if (next == g_ranges.begin()) return std::nullopt;
  const Range& range = std::prev(next)->second;
  if (address + bytes > range.end) return std::nullopt;
  return range;
}

SlotMemory::SlotMemory(Device& device, uintptr_t address, size_t bytes, MemoryKind kind)
    : device_(device), address_(address), kind_(kind) {
  if (address == 0 || bytes == 0)
    refuse(Refusal::cuda, "memory for slots", range_text(address, bytes), "a range");
  const ContextGuard cu(device);
  add_range({address, address + bytes, kind});
  try {
    if (kind == MemoryKind::host)
      check(cu->cuMemHostRegister_v2(reinterpret_cast<void*>(address), bytes, kHostPortable | kHostDeviceMap),
            "registering host memory");
    else require_on_device(device, address, bytes);
  } catch (...) {
    drop_range(address);
    throw;
  }
  open_ = true;
}

void SlotMemory::close() {
  if (!open_) return;
  open_ = false;
  drop_range(address_);
  if (kind_ == MemoryKind::device) return;
  unless_gone(device_, [&](const Calls& cu) { cu->cuMemHostUnregister(reinterpret_cast<void*>(address_)); });
}

Buffer::Buffer(Device& device, size_t bytes, MemoryKind kind, MemoryUse use)
    : device_(device), bytes_(bytes), kind_(kind), use_(use) {
  const ContextGuard cu(device);
  if (kind == MemoryKind::device) {
    DevicePtr memory = 0;
    check(cu->cuMemAlloc_v2(&memory, bytes), "device memory");
    address_ = memory;
  } else {
    void* memory = nullptr;
    check(cu->cuMemHostAlloc(&memory, bytes, kHostPortable | kHostDeviceMap), "page-locked host memory");
    address_ = reinterpret_cast<uintptr_t>(memory);
  }
  if (use == MemoryUse::slots) add_range({address_, address_ + bytes, kind});  // fresh memory: nothing can overlap it
}

Buffer::~Buffer() {
  if (use_ == MemoryUse::slots) drop_range(address_);
  unless_gone(device_, [&](const Calls& cu) {
    if (kind_ == MemoryKind::device) cu->cuMemFree_v2(address_);
    else cu->cuMemFreeHost(reinterpret_cast<void*>(address_));
  });
}

void upload_now(Device& device, uintptr_t to, const void* from, size_t bytes) {
  const ContextGuard cu(device);
  const OwnedStream stream = make_stream(device);
  check(cu->cuMemcpyHtoDAsync_v2(to, from, bytes, stream.get()), "upload of a layout");
  check(cu->cuStreamSynchronize(stream.get()), "upload of a layout");
}

Stopwatch::Stopwatch(Device& device)
    : device_(device), stream_(make_stream(device)), start_(make_event(device, 0)), stop_(make_event(device, 0)) {}

void Stopwatch::start() {
  const ContextGuard cu(device_);
  check(cu->cuEventRecord(start_.get(), stream_.get()), "cuEventRecord");
}

double Stopwatch::stop_ms() {
  const ContextGuard cu(device_);
  check(cu->cuEventRecord(stop_.get(), stream_.get()), "cuEventRecord");
  check(cu->cuEventSynchronize(stop_.get()), "cuEventSynchronize");
  float ms = 0;
  check(cu->cuEventElapsedTime(&ms, start_.get(), stop_.get()), "cuEventElapsedTime");
  return ms;
}

void Stopwatch::copy(uintptr_t to, uintptr_t from, size_t bytes, Direction direction) {
  const ContextGuard cu(device_);
  if (direction == Direction::scatter)
    check(cu->cuMemcpyHtoDAsync_v2(to, reinterpret_cast<void*>(from), bytes, stream_.get()), "copy");
  else check(cu->cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to), from, bytes, stream_.get()), "copy");
}

void Stopwatch::fill(uintptr_t device_address, unsigned char value, size_t bytes) {
  const ContextGuard cu(device_);
  check(cu->cuMemsetD8Async(device_address, value, bytes, stream_.get()), "fill");
}

}  // namespace kvdock::cuda
