#include "segment/liveness.h"
#include "base/os_error.h"
#include "base/pause.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace kvdock {

namespace {

size_t page_bytes() { return size_t(sysconf(_SC_PAGESIZE)); }

struct flock one_byte(int64_t offset) {
  if (offset < 0) throw std::invalid_argument("lock offset: found " + std::to_string(offset) + ", wanted >= 0");
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  return lock;
}

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

}  // namespace

MemberLock::MemberLock(const std::string& path, int64_t offset, bool with_children)
    : offset_(offset), page_(nullptr) {
  struct flock lock = one_byte(offset);
  const Descriptor file{open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (file.fd < 0) fail_errno(path.c_str());
  struct stat st;
  if (fstat(file.fd, &st) != 0) fail_errno("fstat");
  if (size_t(st.st_size) < page_bytes())
    throw std::invalid_argument("lock file " + path + ": found " + std::to_string(st.st_size) +
                                " bytes, wanted at least " + std::to_string(page_bytes()));
  if (fcntl(file.fd, F_OFD_SETLK, &lock) != 0) {
    if (errno == EACCES) errno = EAGAIN;  // both mean that the byte is held: callers get one error
    fail_errno("F_OFD_SETLK");
  }
  KVDOCK_PAUSE("lock.taken");
  // From here on the mapping holds the file open, and with it the lock.
  void* p = mmap(nullptr, page_bytes(), PROT_READ, MAP_SHARED, file.fd, 0);
  if (p == MAP_FAILED) fail_errno("mmap");
  page_ = p;
  // Not for core dumps: the page has the pool's secret.
  if (madvise(p, page_bytes(), MADV_DONTDUMP) != 0 ||
      (!with_children && madvise(p, page_bytes(), MADV_DONTFORK) != 0)) {
    const int error = errno;
    close();
    errno = error;
    fail_errno("madvise(MADV_DONTDUMP, MADV_DONTFORK)");
  }
  KVDOCK_PAUSE("lock.mapped");
}

MemberLock::~MemberLock() { close(); }

void MemberLock::close() {
  if (page_ != nullptr) munmap(page_, page_bytes());
  page_ = nullptr;
}

bool lock_holder_alive(int fd, int64_t offset) {
  struct flock lock = one_byte(offset);
  if (fcntl(fd, F_OFD_GETLK, &lock) != 0) fail_errno("F_OFD_GETLK");
  return lock.l_type != F_UNLCK;
}

}  // namespace kvdock
