// Allocator for the table's large derived arrays: it asks for huge pages, so that random access to a million entries
// does not miss the TLB each time. Small arrays come from the ordinary heap.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvdock {

template <class T>
struct HugeAllocator {
  using value_type = T;
  static constexpr size_t kHugePage = 2u << 20;

  HugeAllocator() = default;
  template <class U>
  HugeAllocator(const HugeAllocator<U>&) {}

  T* allocate(size_t n) {
    size_t bytes = n * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* at = std::aligned_alloc(kHugePage, rounded);
    if (!at) throw std::bad_alloc();
    madvise(at, rounded, MADV_HUGEPAGE);  // advice only: it works without huge pages, too
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
