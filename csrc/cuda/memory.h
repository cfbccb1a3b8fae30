// Memory that copies may use: page-locked host memory, registered with the driver, and memory on the device.
//
// Thread safety: all functions. Invariant: a slot that is not inside one known range is refused, since the driver would
// copy it synchronously, or fail where one registration ends and another begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "copy/direction.h"
#include "cuda/device.h"

namespace kvdock::cuda {

enum class MemoryKind { host, device };
enum class MemoryUse { own, slots };  // `slots`: slots may lie in the memory

struct Range {
  uintptr_t begin, end;
  MemoryKind kind;
};

// Throws Refused{cuda} unless the first and the last byte are memory of `device`.
void require_on_device(const Device& device, uintptr_t address, size_t bytes);

// The known range that contains [address, address + bytes); nullopt if there is none.
std::optional<Range> find_range(uintptr_t address, size_t bytes);

// While this object lives, slots may lie in [address, address + bytes). It registers host memory (for every context of
// this process), or checks that device memory belongs to `device`. Do not close it while a copy uses the memory.
class SlotMemory {
 public:
  // Throws Refused{cuda}.
  SlotMemory(Device& device, uintptr_t address, size_t bytes, MemoryKind kind);
  ~SlotMemory() { close(); }
  void close();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

 private:
  Device& device_;
  uintptr_t address_;
  MemoryKind kind_;
  bool open_ = false;
};

// Memory that this process allocates: staging, rings, scratch.
class Buffer {
 public:
  Buffer(Device& device, size_t bytes, MemoryKind kind, MemoryUse use = MemoryUse::own);
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
  MemoryKind kind_;
  MemoryUse use_;
};

// Copies to the device, and waits for it. Throws Refused{cuda}.
void upload_now(Device& device, uintptr_t to, const void* from, size_t bytes);

// Times, with two events, the work between start and stop on a stream of its own.
class Stopwatch {
 public:
  explicit Stopwatch(Device& device);
  uintptr_t stream() const { return reinterpret_cast<uintptr_t>(stream_.get()); }
  void start();
  double stop_ms();  // waits for the stream
  // One plain asynchronous copy: to the device (scatter) or to the host (gather).
  void copy(uintptr_t to, uintptr_t from, size_t bytes, Direction direction);
  void fill(uintptr_t device_address, unsigned char value, size_t bytes);
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Device& device_;
  OwnedStream stream_;
  OwnedEvent start_, stop_;
};

}  // namespace kvdock::cuda
