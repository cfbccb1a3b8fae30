#include "segment/huge_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvdock {
namespace {

constexpr size_t kStepBytes = size_t(64) << 20;  // a call of the kernel waits for all processors once
constexpr double kMostSecondsPerByte = 3.0 / (1 << 30);  // .06 as a rule; 2.3 where a host gives its guest memory late

// One page in each huge page of the range, since the kernel makes none where nothing is.
bool begin_each(int fd, size_t begin, size_t end) {
  const off_t page = off_t(sysconf(_SC_PAGESIZE));
  for (size_t at = begin; at < end; at += kHugePage)
    if (fallocate(fd, 0, off_t(at), page) != 0) return false;
  return true;
}

// Whether the object has all its memory up to `end`. The kernel says "done", too, where it had nothing to do, since its
// huge pages are larger.
bool is_allocated(int fd, size_t end) {
  struct stat st;
  return fstat(fd, &st) == 0 && size_t(st.st_blocks) * 512 >= end;
}

// Or the file system does not say.
bool has_space(int fd, size_t bytes) {
  struct statvfs there;
  return fstatvfs(fd, &there) == 0 && (there.f_blocks == 0 || size_t(there.f_bavail) * there.f_frsize >= bytes);
}

}  // namespace

char* reserve_aligned(size_t bytes) {
  const size_t whole = bytes + kHugePage;
  void* p = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* const from = static_cast<char*>(p);
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const size_t before = (kHugePage - address % kHugePage) % kHugePage;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t used = (bytes + page - 1) / page * page;
  if (before != 0) munmap(from, before);
  if (before + used < whole) munmap(from + before + used, whole - before - used);
  return from + before;
}

size_t allocate_huge(int fd, size_t bytes) {
  const size_t whole = bytes / kHugePage * kHugePage;
  if (whole == 0 || !has_space(fd, bytes) || ftruncate(fd, off_t(whole)) != 0) return 0;
  char* const data = reserve_aligned(whole);
  if (data == nullptr) return 0;
  const bool mapped = mmap(data, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == data;
  size_t done = 0;
  const auto began = std::chrono::steady_clock::now();
  const auto is_slow = [&] {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    return took.count() > kMostSecondsPerByte * double(done + kStepBytes);
  };
  while (mapped && done < whole && !is_slow()) {
    const size_t end = std::min(done + kStepBytes, whole);
    if (!begin_each(fd, done, end) || madvise(data + done, end - done, MADV_COLLAPSE) != 0 || !is_allocated(fd, end))
      break;
    done = end;
  }
  munmap(data, whole);
  return done;
}

}  // namespace kvdock
