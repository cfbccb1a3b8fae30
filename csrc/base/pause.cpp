#include "base/pause.h"

#ifdef KVDOCK_PAUSE_POINTS

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvdock {

namespace {

struct PausePage {
  char point[56];    // written by the test; empty: none
  uint32_t skip;     // how often the process still passes the point before it stops there
  uint32_t reached;  // 1 once the process has stopped at the point
};

PausePage* control() {
  const char* path = std::getenv("KVDOCK_PAUSE_PAGE");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return nullptr;
  void* page = mmap(nullptr, sizeof(PausePage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return page == MAP_FAILED ? nullptr : static_cast<PausePage*>(page);
}

}  // namespace

void pause_at(const char* point) {
  static PausePage* const page = control();
  std::atomic_signal_fence(std::memory_order_seq_cst);  // earlier stores are made before the point is reached
  if (!page || std::strncmp(page->point, point, sizeof page->point) != 0) return;
  if (page->skip > 0) {
    --page->skip;
    return;
  }
  std::atomic_ref<uint32_t>(page->reached).store(1, std::memory_order_release);
  while (std::strncmp(page->point, point, sizeof page->point) == 0) usleep(1000);
}

}  // namespace kvdock

#endif
