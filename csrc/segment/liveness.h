// Whether a member's process still exists: an open-file-description lock on one byte of the pool's lock file.
//
// Ownership: a MemberLock holds its byte until close() or its end.
// Thread safety: none; one thread uses a MemberLock at a time. lock_holder_alive() may be called from any thread.
// Invariant: the lock belongs to the open file, and a mapping keeps the file open after its descriptor is closed. So
//   the lock ends with the last address space that maps the page, those of forked children included: after the threads,
//   the descriptors and the pid of the process.
#pragma once

#include <cstdint>
#include <string>

namespace kvdock {

class MemberLock {
 public:
  // Throws std::system_error (EAGAIN: someone else holds the byte), std::invalid_argument when the
  // file is shorter than a page or the offset is negative.
  MemberLock(const std::string& path, int64_t offset);
  ~MemberLock();
  MemberLock(const MemberLock&) = delete;
  MemberLock& operator=(const MemberLock&) = delete;

  int64_t offset() const { return offset_; }
  void close();

 private:
  int64_t offset_;
  void* page_;
};

// True while an open file other than `fd`'s own holds the byte.
bool lock_holder_alive(int fd, int64_t offset);

}  // namespace kvdock
