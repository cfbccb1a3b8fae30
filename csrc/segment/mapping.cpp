#include "segment/mapping.h"
#include "base/os_error.h"
#include "base/pause.h"
#include "segment/huge_pages.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvdock {

Mapping::Mapping(int fd, size_t bytes, bool writable) : data_(nullptr), bytes_(bytes), writable_(writable) {
  struct stat st;
  if (fstat(fd, &st) != 0) fail_errno("fstat");
  if (bytes == 0 || size_t(st.st_size) < bytes)
    throw std::invalid_argument("mapping: found an object of " + std::to_string(st.st_size) +
                                " bytes, wanted at least " + std::to_string(bytes ? bytes : 1));
  void* p = reserve_aligned(bytes);  // so that a huge page of the object is one in the page table, too
  if (p == nullptr) fail_errno("mmap");
  const bool mapped = mmap(p, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, 0) == p;
  // Not for children, and not for core dumps: they would hold everybody's prompts, and be as large as the pool.
  if (!mapped || madvise(p, bytes, MADV_DONTFORK) != 0 || madvise(p, bytes, MADV_DONTDUMP) != 0) {
    const int error = errno;
    munmap(p, bytes);
    errno = error;
    fail_errno(mapped ? "madvise(MADV_DONTFORK, MADV_DONTDUMP)" : "mmap");
  }
  data_ = static_cast<char*>(p);
  KVDOCK_PAUSE("map.mapped");
}

Mapping::~Mapping() { close(); }

void Mapping::close() {
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
}

void Mapping::populate(size_t offset, size_t bytes) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  if (data_ == nullptr) throw std::invalid_argument("populate: the mapping is closed");
  if (offset % page != 0 || offset > bytes_ || bytes > bytes_ - offset)
    throw std::invalid_argument("populate: found [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                                "), wanted a page-aligned range within " + std::to_string(bytes_) + " bytes");
  KVDOCK_PAUSE("prefault.before");
  while (bytes != 0 && madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) return;  // alignment was checked: the kernel is older than 5.14
    if (errno != EINTR && errno != EAGAIN) fail_errno("madvise(MADV_POPULATE_WRITE)");
  }
  KVDOCK_PAUSE("prefault.after");
}

bool Mapping::reaches_end() const {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  if (data_ == nullptr) return false;
  char* last = data_ + (bytes_ - 1) / page * page;
  while (madvise(last, page, MADV_POPULATE_READ) != 0) {
    if (errno == EINVAL) return true;  // the kernel is older than 5.14
    if (errno != EINTR && errno != EAGAIN) return false;  // EFAULT in place of SIGBUS
  }
  return true;
}

bool Mapping::advise_huge() { return data_ != nullptr && madvise(data_, bytes_, MADV_HUGEPAGE) == 0; }

}  // namespace kvdock
