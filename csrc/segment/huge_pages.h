// Huge pages for an object of shared memory, also where the machine's setting (shmem_enabled) is "never", as in most
// distributions. Storage reads and writes such memory faster, and it is there in a fifth of the time.
#pragma once

#include "base/huge_alloc.h"

#include <cstddef>

namespace kvdock {

// Allocates the beginning of a new, empty object in huge pages, as far as the kernel gives them within three seconds a
// GiB; returns how many bytes. They are zero. The caller allocates what is behind, where single pages may be there, and
// learns then what is wrong. 0 where there are no huge pages: before Linux 6.1, with shmem_enabled "deny", or without
// free memory in one piece.
size_t allocate_huge(int fd, size_t bytes);

// Addresses for at least `bytes` that begin where a huge page may; nullptr with errno set where there are none. The
// caller maps them with MAP_FIXED, and gives them back with munmap().
char* reserve_aligned(size_t bytes);

}  // namespace kvdock
