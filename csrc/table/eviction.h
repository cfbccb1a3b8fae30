// Which chunk is evicted first: the one least recently used. Chunks decides what may go (READY leaves without pins).
//
// Ownership: derived; rebuilt by offering every candidate again.
// Invariants: one entry per record and generation. When an entry comes to the top, it is dropped if it is no longer a
//   candidate, and listed again if it was used since: O(log n), amortised over the uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "table/layout.h"

namespace kvdock {

struct Candidate {
  uint32_t record;
  uint64_t generation;
  uint64_t last_used;  // use tick when listed
};

inline bool older(const Candidate& a, const Candidate& b) {
  return a.last_used != b.last_used ? a.last_used < b.last_used : a.generation < b.generation;
}

class EvictionList {
 public:
  // `shape` groups records whose parts have the same sizes: evicting one makes room for another.
  void offer(uint32_t shape, const Candidate& c) {
    if (listed_.size() <= c.record) listed_.resize(c.record + 1 + c.record / 2, 0);
    if (listed_[c.record] == c.generation) return;
    listed_[c.record] = c.generation;
    push(heaps_[shape], c);
  }

  // The candidate to evict next; it stays listed until it is gone. `last_use` of a candidate returns nothing if it may
  // not be evicted any more.
  template <class LastUse>
  std::optional<Candidate> choose(uint32_t shape, LastUse&& last_use) {
    auto& heap = heaps_[shape];
    while (!heap.empty()) {
      Candidate c = heap.front();
      std::optional<uint64_t> used = last_use(c);
      if (used && *used == c.last_used) return c;
      std::pop_heap(heap.begin(), heap.end(), later);
      heap.pop_back();
      if (used) {
        c.last_used = *used;
        push(heap, c);
      } else if (listed_[c.record] == c.generation) {
        listed_[c.record] = 0;
      }
    }
    return std::nullopt;
  }

  // `f` may choose().
  template <class F>
  void for_each_shape(F&& f) const {
    for (auto& [shape, heap] : heaps_)
      if (!heap.empty()) f(shape);
  }

  bool lists(uint32_t record, uint64_t generation) const {
    return record < listed_.size() && listed_[record] == generation;
  }

 private:
  static bool later(const Candidate& a, const Candidate& b) { return older(b, a); }
  void push(std::vector<Candidate>& heap, const Candidate& c) {
    heap.push_back(c);
    std::push_heap(heap.begin(), heap.end(), later);
    // Entries of deleted records sink and stay. They are removed once the heap has doubled since the last time.
    if (heap.size() >= 1024 && heap.size() > 2 * swept_) sweep(heap);
  }
  void sweep(std::vector<Candidate>& heap) {
    std::erase_if(heap, [this](const Candidate& c) { return listed_[c.record] != c.generation; });
    std::make_heap(heap.begin(), heap.end(), later);
    swept_ = std::max<size_t>(heap.size(), 512);
  }

  std::map<uint32_t, std::vector<Candidate>> heaps_;
  std::vector<uint64_t> listed_;  // by record: generation it is listed with; generations start at 1
  size_t swept_ = 512;
};

}  // namespace kvdock
