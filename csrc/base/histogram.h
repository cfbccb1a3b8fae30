// A histogram with fixed bounds: it counts values, and never grows.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvdock {

template <size_t N>
class Histogram {
 public:
  // `bounds`: the largest value of each bucket, in rising order; one more bucket takes what is larger.
  explicit constexpr Histogram(const std::array<uint64_t, N>& bounds) : bounds_(bounds) {}

  void add(uint64_t value) {
    ++counts_[static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin())];
    sum_ += value;
  }
  const std::array<uint64_t, N>& bounds() const { return bounds_; }
  const std::array<uint64_t, N + 1>& counts() const { return counts_; }
  uint64_t sum() const { return sum_; }

 private:
  std::array<uint64_t, N> bounds_;
  std::array<uint64_t, N + 1> counts_{};
  uint64_t sum_ = 0;
};

}  // namespace kvdock
