// An array of zeros. A large one costs memory only where it is touched; a small one comes from the ordinary heap.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

namespace kvdock {

template <class T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t size) : size_(size) {
    void* at = is_mapped() ? mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                           : std::calloc(size, sizeof(T));
    if (!at || at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(at);
  }
  ZeroedArray(ZeroedArray&& other) noexcept { swap(other); }
  ZeroedArray& operator=(ZeroedArray&& other) noexcept {
    ZeroedArray(std::move(other)).swap(*this);
    return *this;
  }
  ~ZeroedArray() {
    if (is_mapped())
      munmap(data_, bytes());
    else
      std::free(data_);
  }

  void swap(ZeroedArray& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  size_t size() const { return size_; }
  T* data() const { return data_; }

 private:
  static constexpr size_t kMapped = 2u << 20;
  size_t bytes() const { return size_ * sizeof(T); }
  bool is_mapped() const { return bytes() >= kMapped; }

  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvdock
