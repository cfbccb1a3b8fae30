// Proof of life: an open-file-description lock on one byte of the pool's lock file.
//
// The lock belongs to the open file, and a mapping keeps the file open after its descriptor is
// closed. So it ends with the last address space that maps the page, forked children included: later
// than the process's threads, its descriptors and its pid.
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

// True while someone else than `fd`'s own open file holds the byte.
bool lock_holder_alive(int fd, int64_t offset);

}  // namespace kvdock
