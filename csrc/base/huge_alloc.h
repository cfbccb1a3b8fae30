// Memory for the table's large derived arrays, so that random access to a million entries does not miss the TLB each
// time. Huge pages are asked for when an array is in use, and the kernel makes them in the background: whoever touches
// a huge page first waits until all of it is there, which may be milliseconds.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace kvdock {

constexpr size_t kHugePage = 2u << 20;  // of x86-64, and of arm64 with pages of 4 KiB

// Asks for the whole huge pages between both: advice only, it works without them, too.
inline void advise_huge(const void* begin, const void* end) {
  uintptr_t from = (reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t until = reinterpret_cast<uintptr_t>(end) / kHugePage * kHugePage;
  if (from < until) madvise(reinterpret_cast<void*>(from), until - from, MADV_HUGEPAGE);
}

// Aligns what is larger than a huge page. Small arrays come from the ordinary heap.
template <class T>
struct HugeAllocator {
  using value_type = T;

  HugeAllocator() = default;
  template <class U>
  HugeAllocator(const HugeAllocator<U>&) {}

  T* allocate(size_t n) {
    size_t bytes = n * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    void* at = std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) / kHugePage * kHugePage);
    if (!at) throw std::bad_alloc();
    return static_cast<T*>(at);
  }
  void deallocate(T* at, size_t n) {
    if (n * sizeof(T) < kHugePage)
      ::operator delete(at);
    else
      std::free(at);
  }
  bool operator==(const HugeAllocator&) const { return true; }
};

}  // namespace kvdock
