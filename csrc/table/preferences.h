// Preferences for chunks to stay longer than others, or shorter: administrators' keeps, and priorities by engines'
// hints.
//
// A kept chunk is evicted only by its own tenant's quota. A hint gives a chunk a priority, which orders evictions but
// prevents none: the lowest priority is evicted first. Chunks without a hint have priority 0.
//
// Ownership: the end of a keep lies in the record, so that it outlives the server; everything else is derived, and
//   hints end with the server.
// Invariant: only RESERVED and READY records have a keep or a priority.
#pragma once

#include <set>
#include <unordered_map>

#include "table/records.h"

namespace kvdock {

// Eviction orders its candidates by the preferences. So a record must not be a candidate while its preferences change:
// call Eviction::unlist() for it before, and Eviction::offer() after.
class Preferences {
 public:
  Preferences(const TableHeader& header, Records& records, SlotAllocator& slots)
      : header_(header), records_(records), slots_(slots) {}

  // -- keeps
  void keep(uint32_t id, uint64_t until_ms);  // until_ms 0: ends the keep
  // A record whose keep has ended by then.
  std::optional<uint32_t> keep_over(uint64_t now) const { return over(keeps_end_, now); }
  uint64_t kept_bytes() const { return kept_bytes_; }

  // -- priorities
  // Whether the chunk may be retained with *priority until *until_ms. Lowers both to its parent's, and raises them to
  // those that the chunk has. no_capacity: more would be retained than may be; no_parent: its parent is not retained.
  enum class Retained { yes, no_capacity, no_parent };
  Retained bound(uint32_t id, int8_t* priority, uint64_t* until_ms) const;
  // priority 0: none. until_ms 0: the priority ends when a request names the chunk.
  void set_priority(uint32_t id, int8_t priority, uint64_t until_ms);
  // A record whose priority has ended by then.
  std::optional<uint32_t> priority_over(uint64_t now) const { return over(priorities_end_, now); }
  uint64_t retained_bytes() const { return retained_bytes_; }  // of chunks with a priority above 0

  void move(uint32_t from, uint32_t to);  // `to` takes the place of `from` under its key
  void clear(uint32_t id);

  void check() const;  // Throws TableError corrupt

 private:
  using Ends = std::set<std::pair<uint64_t, uint32_t>>;  // when, record
  static std::optional<uint32_t> over(const Ends& ends, uint64_t now) {
    return ends.empty() || ends.begin()->first > now ? std::nullopt : std::optional(ends.begin()->second);
  }
  uint64_t priority_until(uint32_t id) const;
  void count_retained(uint32_t id, int sign);
  bool may_retain(uint32_t id) const;
  void check_keeps() const;
  void check_priorities() const;

  const TableHeader& header_;
  Records& records_;
  SlotAllocator& slots_;
  Ends keeps_end_;  // one for each kept record
  uint64_t kept_bytes_ = 0;
  std::unordered_map<uint32_t, uint64_t> priority_until_;  // by record: when its priority ends, if it does
  Ends priorities_end_;                                    // one for each of priority_until_
  uint64_t retained_bytes_ = 0;
};

}  // namespace kvdock
