// A set of keys that takes 2 to 5 bytes a key. At most once in a thousand times it seems to have a key that it lacks.
// Keys can be removed. Fan, Andersen, Kaminsky and Mitzenmacher, "Cuckoo Filter: Practically Better Than Bloom" (CoNEXT
// 2014); it grows by stages, as in Chen, Liao, Jin and Wu, "The Dynamic Cuckoo Filter" (ICNP 2017).
//
// A key that looks like one that is there is not added again. If one of the two is removed, both are.
// Thread safety: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/zeroed_array.h"

namespace kvdock {

class KeyFilter {
 public:
  // `salt`: random, so that no caller can choose keys that collide. `most_keys`: about how many fit.
  KeyFilter(uint64_t salt, size_t most_keys) : salt_(salt), most_keys_(most_keys) { open_stage(); }

  // False: it is full, and does not have the key.
  bool add(uint64_t key) {
    if (has(key)) return true;
    const Place place = place_of(key);
    if (stages_.back().keys >= kFill * stages_.back().slots() && !open_stage()) return false;
    return stages_.back().put(place) || (open_stage() && stages_.back().put(place));
  }

  void remove(uint64_t key) {
    const Place place = place_of(key);
    for (Stage& stage : stages_)
      if (stage.remove(place)) return;
  }

  bool has(uint64_t key) const {
    const Place place = place_of(key);
    for (const Stage& stage : stages_)
      if (stage.has(place)) return true;
    return false;
  }

  size_t size() const {
    size_t keys = 0;
    for (const Stage& stage : stages_) keys += stage.keys;
    return keys;
  }
  size_t bytes() const { return slots() * sizeof(uint16_t); }

 private:
  static constexpr size_t kWays = 4, kFirstBuckets = 1 << 14, kMostMoves = 256;
  static constexpr double kFill = 0.92;  // a fuller stage has to move ever more marks for each key

  // `mark`: what is kept of a key; 0 stands for a free slot.
  struct Place {
    uint64_t hash;
    uint16_t mark;
  };

  struct Move {
    size_t at, way;
  };

  struct Stage {
    explicit Stage(size_t count) : buckets(count) {}

    ZeroedArray<std::array<uint16_t, kWays>> buckets;  // the pages of a new stage come as it fills: none is cleared now
    size_t keys = 0;

    auto& bucket(size_t at) { return buckets.data()[at]; }
    const auto& bucket(size_t at) const { return buckets.data()[at]; }
    size_t slots() const { return buckets.size() * kWays; }
    size_t first(Place place) const { return place.hash & (buckets.size() - 1); }
    // The other bucket of a mark that is in the bucket `at`.
    size_t other(size_t at, uint16_t mark) const {
      return (at ^ (mark * uint64_t{0x5bd1e995})) & (buckets.size() - 1);
    }

    static bool exchange(std::array<uint16_t, kWays>& in, uint16_t from, uint16_t to) {
      for (uint16_t& slot : in)
        if (slot == from) {
          slot = to;
          return true;
        }
      return false;
    }

    bool has(Place place) const {
      const auto& one = bucket(first(place));
      const auto& two = bucket(other(first(place), place.mark));
      bool found = false;
      for (size_t i = 0; i < kWays; ++i) found |= one[i] == place.mark || two[i] == place.mark;
      return found;
    }

    bool remove(Place place) {
      const size_t at = first(place);
      const bool done = exchange(bucket(at), place.mark, 0) || exchange(bucket(other(at, place.mark)), place.mark, 0);
      keys -= done;
      return done;
    }

    // Moves marks to their other buckets until there is a free slot. False: there is none, and all is as before.
    bool put(Place place) {
      size_t at = first(place);
      uint16_t mark = place.mark;
      uint64_t random = place.hash;
      std::array<Move, kMostMoves> moved;  // not cleared: most keys move none
      size_t moves = 0;
      while (!exchange(bucket(at), 0, mark) && !exchange(bucket(other(at, mark)), 0, mark)) {
        if (moves == kMostMoves) {
          while (moves) {
            const Move last = moved[--moves];
            std::swap(bucket(last.at)[last.way], mark);
          }
          return false;
        }
        at = other(at, mark);
        random = random * 6364136223846793005 + 1442695040888963407;
        const size_t way = random >> 62;
        moved[moves++] = {at, way};
        std::swap(bucket(at)[way], mark);
      }
      ++keys;
      return true;
    }
  };

  // The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
  Place place_of(uint64_t key) const {
    uint64_t x = key + salt_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    return {x, uint16_t(x >> 48 ? x >> 48 : 1)};
  }

  size_t slots() const {
    size_t slots = 0;
    for (const Stage& stage : stages_) slots += stage.slots();
    return slots;
  }

  // Each is as large as all before it together. False: it would have too many keys.
  bool open_stage() {
    if (slots() >= most_keys_ && !stages_.empty()) return false;
    stages_.emplace_back(stages_.empty() ? kFirstBuckets : slots() / kWays);
    return true;
  }

  const uint64_t salt_;
  const size_t most_keys_;
  std::vector<Stage> stages_;
};

}  // namespace kvdock
