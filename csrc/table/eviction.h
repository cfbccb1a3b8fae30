// Which chunk is evicted first: the one least recently used. Chunks decides what may go (READY leaves without pins).
//
// Ownership: derived; rebuilt by offering every candidate again.
// Invariants: one entry per record and generation, in the heap of its shape and tenant. When an entry comes to the top,
//   it is dropped if it is no longer a candidate, and listed again if it was used since: O(log n), amortised over the
//   uses, and for a shape O(tenants that have it).
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
  void offer(uint32_t shape, uint32_t tenant, const Candidate& c) {
    if (listed_.size() <= c.record) listed_.resize(c.record + 1 + c.record / 2, 0);
    if (listed_[c.record] == c.generation) return;
    listed_[c.record] = c.generation;
    auto& heaps = heaps_[shape];
    if (heaps.size() <= tenant) heaps.resize(tenant + 1);
    push(heaps[tenant], c);
  }

  // The candidate of a shape, or of a tenant, to evict next; it stays listed until it is gone. `last_use` of a
  // candidate returns nothing if it may not be evicted any more.
  template <class LastUse>
  std::optional<Candidate> of_shape(uint32_t shape, LastUse&& last_use) {
    while (Heap* heap = coldest(heaps_[shape])) {
      uint64_t top_use = heap->top_use;
      if (auto c = choose(*heap, last_use); c && c->last_used == top_use) return c;
    }
    return std::nullopt;
  }
  template <class LastUse>
  std::optional<Candidate> of_tenant(uint32_t tenant, LastUse&& last_use) {
    std::optional<Candidate> best;
    for (auto& [shape, heaps] : heaps_) {
      if (heaps.size() <= tenant) continue;
      if (auto c = choose(heaps[tenant], last_use); c && (!best || older(*c, *best))) best = c;
    }
    return best;
  }

  // `f` may ask for of_shape().
  template <class F>
  void for_each_shape(F&& f) const {
    for (auto& [shape, heaps] : heaps_) f(shape);
  }

  bool lists(uint32_t record, uint64_t generation) const {
    return record < listed_.size() && listed_[record] == generation;
  }

 private:
  struct Heap {
    std::vector<Candidate> entries;
    size_t swept = 512;         // entries when it was last swept
    uint64_t top_use = kEmpty;  // last_used of the entry on top: no entry's true use is older
  };
  static constexpr uint64_t kEmpty = ~0ull;

  static bool later(const Candidate& a, const Candidate& b) { return older(b, a); }

  // Looks at no entry, so that hundreds of tenants cost little. No two tenants share a tick.
  static Heap* coldest(std::vector<Heap>& heaps) {
    auto colder = [](const Heap& a, const Heap& b) { return a.top_use < b.top_use; };
    auto best = std::min_element(heaps.begin(), heaps.end(), colder);
    return best == heaps.end() || best->top_use == kEmpty ? nullptr : &*best;
  }

  template <class LastUse>
  std::optional<Candidate> choose(Heap& from, LastUse&& last_use) {
    auto& heap = from.entries;
    for (; !heap.empty(); from.top_use = heap.empty() ? kEmpty : heap.front().last_used) {
      Candidate c = heap.front();
      std::optional<uint64_t> used = last_use(c);
      if (used && *used == c.last_used) return c;
      std::pop_heap(heap.begin(), heap.end(), later);
      heap.pop_back();
      if (used) {
        c.last_used = *used;
        push(from, c);
      } else if (listed_[c.record] == c.generation) {
        listed_[c.record] = 0;
      }
    }
    return std::nullopt;
  }

  void push(Heap& to, const Candidate& c) {
    auto& heap = to.entries;
    heap.push_back(c);
    std::push_heap(heap.begin(), heap.end(), later);
    // Entries of deleted records sink and stay. They are removed once the heap has doubled since the last time.
    if (heap.size() >= 1024 && heap.size() > 2 * to.swept) {
      std::erase_if(heap, [this](const Candidate& e) { return listed_[e.record] != e.generation; });
      std::make_heap(heap.begin(), heap.end(), later);
      to.swept = std::max<size_t>(heap.size(), 512);
    }
    to.top_use = heap.front().last_used;
  }

  std::map<uint32_t, std::vector<Heap>> heaps_;  // by shape; by tenant
  std::vector<uint64_t> listed_;  // by record: generation it is listed with; generations start at 1
};

}  // namespace kvdock
