// Whether a member's process still exists: an open-file-description lock on one byte of the pool's lock file.
//
// Ownership: a MemberLock holds its byte until close() or its end.
// Thread safety: one thread uses a MemberLock at a time. lock_holder_alive() may be called from any thread.
// Invariant: the lock belongs to the open file, and a mapping keeps the file open after its descriptor is closed. So
//   the lock is freed with the last address space that maps the page: after the process's threads and pid have ended.
//   Process safety: MADV_DONTFORK, as for the slots (segment/mapping.h). A forked child has neither the slots nor the
//   threads that copy, so it cannot touch the memory that the lock protects, and does not keep the lock. With a GPU
//   this is different: a child inherits the open files of the GPU's driver, which keep the dead parent's context alive:
//   its submitted work still runs, and writes to registered memory. On an H200 a kernel wrote 5.5 s after its process
//   was killed, because a child lived; without a child no kernel did. So a process that copies with a GPU takes its
//   lock `with_children`, and the lock lasts as long as the process or any of its children. A child that is forked
//   while a constructor runs may keep the lock too: longer than needed, which is safe.
#pragma once

#include <cstdint>
#include <string>

namespace kvdock {

class MemberLock {
 public:
  // Throws std::system_error (EAGAIN: another open file holds the byte), std::invalid_argument when the
  // file is shorter than a page or the offset is negative. `with_children`: forked children keep the lock, too.
  MemberLock(const std::string& path, int64_t offset, bool with_children);
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
