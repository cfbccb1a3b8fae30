// A shared mapping of an open file or shared-memory object.
//
// Ownership: the mapping keeps no descriptor; it ends with close() or with the object. Buffers given to Python and to
//   native code count as users; close() is refused while there is one.
// Thread safety: populate() may run in many threads; close() must not race with other calls.
// Process safety: MADV_DONTFORK. A forked child does not have these pages, so it cannot touch memory that its parent's
//   grants protect.
// Invariant: the object is at least `bytes` long when it is mapped, so access within bounds raises no SIGBUS, unless
//   the owner shortens the object later, which reaches_end() detects.
#pragma once

#include <atomic>
#include <cstddef>

namespace kvdock {

class Mapping {
 public:
  // Throws std::system_error, or std::invalid_argument when the object is shorter than `bytes`.
  Mapping(int fd, size_t bytes, bool writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }  // nullptr once closed
  size_t bytes() const { return bytes_; }
  bool writable() const { return writable_; }

  // Makes every page of [offset, offset + bytes) present and writable, or throws std::system_error.
  // On a kernel without MADV_POPULATE_WRITE it does nothing: the caller has allocated the object's memory, so later
  // access costs minor faults but cannot fail.
  void populate(size_t offset, size_t bytes);
  // False when the object has become shorter than the mapping, so that access would raise SIGBUS. The object may be
  // shortened at any moment after the call. Costs less than a microsecond. On a kernel without MADV_POPULATE_READ:
  // always true.
  bool reaches_end() const;
  // Returns whether the kernel accepted the advice; tmpfs may be mounted without huge pages.
  bool advise_huge();

  void pin() { ++pins_; }
  void unpin() { --pins_; }
  bool pinned() const { return pins_ > 0; }
  void close();  // REQUIRES: !pinned()

 private:
  char* data_;
  size_t bytes_;
  bool writable_;
  std::atomic<int> pins_{0};
};

}  // namespace kvdock
