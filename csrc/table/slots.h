// Cuts the pool's segments into slabs, and slabs into slots of one size.
//
// Ownership: the slab entries lie in the table's region; everything else is derived from them and from the records.
// Invariants: free extents and slabs of a segment are disjoint and cover it; some slot of each slab has an owner; the
//   size of a slot is a multiple of kSlotAlign.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/crc32c.h"
#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

struct Slot {
  uint32_t slab;
  uint32_t segment;
  uint64_t offset;
};

// The word of a live slab carries the CRC of its body.
inline uint64_t slab_word(const Slab& b) {
  return sealed(uint64_t{crc32c(&b.segment, sizeof b - offsetof(Slab, segment))} << 1 | 1);
}

class SlotAllocator {
 public:
  SlotAllocator(Slab* slabs, uint32_t max_slabs) : slabs_(slabs), max_slabs_(max_slabs) {}

  void add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes);

  // Adoption: first the segments are added, then every slab with a live word, then records set the owners of their
  // slots (owner_of); adopted() frees the other slots and closes slabs without an owner. adopt_slab() returns false,
  // and changes nothing, if the slab cannot lie there.
  bool adopt_slab(uint32_t slab);
  void adopted();

  // A slot of at least `bytes` in a segment with an id below `below`, owned by `record`; nullopt when none is free.
  std::optional<Slot> take(uint64_t bytes, uint32_t record, uint32_t below = kNone);
  void give(uint32_t slab, uint64_t offset);
  // Which record owns the slot that a part names, or kNone; nullptr if no slot of the part's size is there.
  uint32_t* owner_of(const StoredPart& part);

  // A record in the slab was used.
  void touch(uint32_t slab, uint64_t tick) { live_[slab].newest = std::max(live_[slab].newest, tick); }
  void pin(uint32_t slab) { ++live_[slab].pinned; }
  void unpin(uint32_t slab) {
    --live_[slab].pinned;
    if (live_[slab].listed == 0) list(slab);
  }
  void keep(uint32_t slab, int sign) {  // one more or one less kept record in the slab
    live_[slab].kept += sign;
    if (live_[slab].listed == 0) list(slab);
  }

  // From now on no slot of the segment is given out. Call remove_segment() once used_in(segment) is 0.
  void retire_segment(uint32_t segment);
  void remove_segment(uint32_t segment);
  // The id of every segment is below this.
  uint32_t segment_end() const { return segments_.empty() ? 0 : segments_.rbegin()->first + 1; }
  bool knows(uint32_t segment) const { return segments_.count(segment) != 0; }
  bool retired(uint32_t segment) const { return segments_.at(segment).retired; }
  std::vector<uint32_t> records_in(uint32_t segment) const;

  struct Window {
    uint64_t newest;  // use tick of the most recently used record in it
    std::vector<uint32_t> records;
  };
  // Neighbouring slabs without pinned or kept slots which, once emptied, hold a slot of `bytes`: the slab used least
  // recently, and as many of its neighbours as the slot needs. With `older_than`, a use tick, it looks only at slabs
  // that were used before it, and at most at kColdest of them.
  std::optional<Window> oldest_window(uint64_t bytes, std::optional<uint64_t> older_than);

  // Bytes that slots of that size could take without eviction. Counts no further once it has reached `enough`.
  uint64_t available_for(uint64_t slot_bytes, uint64_t enough) const;
  bool has_other_sizes(uint64_t bytes) const;
  uint64_t total_bytes() const { return total_bytes_; }
  uint64_t free_bytes() const;  // without those in retired segments
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t used_in(uint32_t segment) const;

  void check() const;  // Throws TableError corrupt
  uint32_t pinned_slots(uint32_t slab) const { return live_.at(slab).pinned; }
  uint32_t kept_slots(uint32_t slab) const { return live_.at(slab).kept; }

 private:
  struct Live {
    std::vector<uint32_t> owner;  // per slot: record or kNone
    std::vector<uint32_t> free;   // stack of slot numbers
    uint32_t pinned = 0;
    uint32_t kept = 0;
    uint64_t newest = 0;
    uint64_t listed = 0;  // its entry in cold_; 0: none
  };
  struct Cold {
    uint64_t newest;  // `newest` of the slab when it was listed
    uint64_t number;
    uint32_t slab;
  };
  struct Segment {
    uint64_t data_bytes = 0;
    bool retired = false;
    std::map<uint64_t, uint64_t> free;   // offset → bytes
    std::map<uint64_t, uint32_t> slabs;  // offset → slab
  };

  std::optional<uint32_t> open_slab(uint64_t slot_bytes, uint32_t below);
  void close_slab(uint32_t slab);
  void add_extent(Segment& s, uint64_t offset, uint64_t bytes);
  std::map<uint64_t, uint64_t>::iterator remove_extent(Segment& s, std::map<uint64_t, uint64_t>::iterator extent);
  void free_extent(Segment& s, uint64_t offset, uint64_t bytes);
  uint64_t bytes_of(uint32_t slab) const { return slabs_[slab].count * slabs_[slab].slot_bytes; }
  bool blocked(uint32_t slab) const { return live_[slab].pinned + live_[slab].kept > 0; }
  static bool warmer(const Cold& a, const Cold& b);
  void list(uint32_t slab);
  std::optional<Cold> coldest();
  std::optional<Window> window_around(uint32_t slab, uint64_t bytes) const;
  void check_derived() const;

  Slab* slabs_;
  uint32_t max_slabs_;
  uint32_t next_slab_ = 0;
  std::vector<uint32_t> spare_slabs_;
  std::map<uint32_t, Segment> segments_;
  std::vector<Live> live_;                            // by slab; without owners: closed
  std::map<uint64_t, std::set<uint32_t>> with_free_;  // slot bytes → slabs with a free slot
  std::map<uint64_t, uint32_t> slabs_of_size_;
  std::map<uint64_t, uint64_t> free_slots_;  // by slot bytes: in slabs of segments that are not retired
  std::multiset<uint64_t> extents_;          // sizes of the free extents of all segments
  // A heap of open slabs, the least recently used one on top; an open slab without pinned or kept slots is in it unless
  // its segment is retired. An entry that comes to the top is dropped if its slab is closed or blocked, and listed anew
  // if the slab was used since.
  std::vector<Cold> cold_;
  uint64_t listings_ = 0;
  uint64_t total_bytes_ = 0;
  uint64_t used_bytes_ = 0;
};

}  // namespace kvdock
