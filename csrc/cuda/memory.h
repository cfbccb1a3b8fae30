// Memory that copies may use: host memory registered for DMA, and memory on the device.
//
// Thread safety: all. Invariant: a slot that is not wholly inside one known range is refused, since the
// driver would copy it synchronously, or fail across two registrations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/device.h"

namespace kvdock::cuda {

enum class Place { host, device };

struct Range {
  uintptr_t begin, end;
  Place place;
};

// Throws Refused{cuda} unless first and last byte are memory of `device`.
void require_on_device(const Device& device, uintptr_t address, size_t bytes);

// The range that holds all of [address, address + bytes).
std::optional<Range> find_range(uintptr_t address, size_t bytes);

// Lets slots lie in [address, address + bytes) while it lives: registers host memory (for every context of
// this process), or checks that device memory is this device's. Closing it while a copy uses it is undefined.
class SlotMemory {
 public:
  // Throws Refused{cuda}.
  SlotMemory(Device& device, uintptr_t address, size_t bytes, Place place);
  ~SlotMemory() { close(); }
  void close();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

 private:
  Device& device_;
  uintptr_t address_;
  Place place_;
  bool open_ = false;
};

// Memory of our own: staging, rings, scratch. `for_slots`: slots may lie in it.
class Buffer {
 public:
  Buffer(Device& device, size_t bytes, Place place, bool for_slots = false);
  ~Buffer();
  uintptr_t address() const { return address_; }
  char* host() const { return reinterpret_cast<char*>(address_); }
  size_t bytes() const { return bytes_; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  Device& device_;
  uintptr_t address_ = 0;
  size_t bytes_;
  Place place_;
  bool for_slots_;
};

// A stream of its own and two events on it: times what is ordered between start and stop.
class Stopwatch {
 public:
  explicit Stopwatch(Device& device);
  ~Stopwatch();
  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_.get()); }
  void start();
  double stop_ms();                                                       // waits for the stream
  void copy(uintptr_t to, uintptr_t from, size_t bytes, bool to_device);  // one plain asynchronous copy
  void fill(uintptr_t device_address, unsigned char value, size_t bytes);
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Device& device_;
  OwnedStream stream_;
  Event start_ = nullptr, stop_ = nullptr;
};

}  // namespace kvdock::cuda
