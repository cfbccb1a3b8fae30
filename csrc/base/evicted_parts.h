// Parts that the tier on disk has evicted: how often and when they were used last, in 5 to 11 bytes for each part that
// it has. One that is stored again goes on from there. The oldest may be forgotten, and one may be taken for another
// (once in many million times). Thread safety: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvdock {

class EvictedParts {
 public:
  struct Part {
    unsigned uses;
    uint64_t age;
  };

  // Forgets all. `parts`: how many there is room for, a power of two, at least kWays.
  void resize(size_t parts) { cells_.assign(parts, 0); }

  size_t room() const { return cells_.size(); }
  size_t bytes() const { return cells_.size() * sizeof(uint64_t); }

  // In place of the oldest of its bucket. `uses`: at most 3. `used`: the moment of the last use.
  void remember(uint64_t hash, unsigned uses, uint64_t used) {
    uint64_t* bucket = bucket_of(hash);
    std::copy_backward(bucket, bucket + kWays - 1, bucket + kWays);
    bucket[0] = mark_of(hash) << kMarkAt | uint64_t(uses) << kUsesAt | uint32_t(used);
  }

  // Forgets the part, and returns it.
  std::optional<Part> take(uint64_t hash, uint64_t now) {
    uint64_t* bucket = bucket_of(hash);
    for (uint64_t* one = bucket; one != bucket + kWays; ++one) {
      if (*one >> kMarkAt != mark_of(hash)) continue;
      const Part part = part_of(*one, now);
      std::copy(one + 1, bucket + kWays, one);
      bucket[kWays - 1] = 0;
      return part;
    }
    return std::nullopt;
  }

  // The part in the cell `at`, which is below room().
  std::optional<Part> at(size_t at, uint64_t now) const {
    return cells_[at] ? std::optional(part_of(cells_[at], now)) : std::nullopt;
  }

 private:
  static constexpr size_t kWays = 4;
  static constexpr int kUsesAt = 32, kMarkAt = 34;

  static uint64_t mark_of(uint64_t hash) { return std::max<uint64_t>(1, hash >> kMarkAt); }
  uint64_t* bucket_of(uint64_t hash) { return &cells_[(hash & (cells_.size() / kWays - 1)) * kWays]; }
  static Part part_of(uint64_t cell, uint64_t now) {
    return {unsigned(cell >> kUsesAt) & 3, uint32_t(uint32_t(now) - uint32_t(cell))};
  }

  std::vector<uint64_t> cells_;  // the mark, then the uses, then the lowest 32 bits of the moment
};

}  // namespace kvdock
