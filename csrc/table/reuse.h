// Whether chunks live long enough to be used again: how old they are when lookups find them and when they are evicted,
// and how many lookups found them before that.
//
// An age is the time since the last use of the chunk: since it was stored, a lookup found it, or a store named it.
// Ownership: on the heap; a new server starts at 0. The age of a chunk that it adopted is not known before its next
// use, and how often it was found before is never known.
#pragma once

#include "base/histogram.h"

namespace kvdock {

struct Reuse {
  static constexpr uint64_t kMinute = 60, kHour = 60 * kMinute, kDay = 24 * kHour;
  static constexpr std::array<uint64_t, 14> kAges{
      1, 5, 15, kMinute, 5 * kMinute, 15 * kMinute, kHour, 3 * kHour, 12 * kHour, kDay, 3 * kDay, 7 * kDay, 14 * kDay,
      28 * kDay};  // seconds
  static constexpr std::array<uint64_t, 10> kUses{0, 1, 2, 3, 5, 10, 20, 50, 100, 1000};

  Histogram<kAges.size()> hit_age{kAges}, eviction_age{kAges};
  Histogram<kUses.size()> eviction_uses{kUses};
};

}  // namespace kvdock
