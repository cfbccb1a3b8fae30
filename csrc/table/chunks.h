// The pool's chunks: a facade over records, pins, preferences and eviction, and over what these share: namespaces,
// segments and slots.
//
// Each part can be read by itself. Calls that change the table are here, because most of them concern several parts.
//
// Ownership: Chunks owns its parts. Of the region, record pages are Records', slabs the slot allocator's, and segment
//   entries those of Chunks itself.
// Invariants: those of the parts.
#pragma once

#include "base/work.h"
#include "table/calls.h"
#include "table/eviction.h"
#include "table/pins.h"
#include "table/preferences.h"
#include "table/records.h"

namespace kvdock {

class Chunks {
 public:
  struct Counters {
    uint64_t stored_chunks = 0, stored_bytes = 0;
  };

  Chunks(const Region& region, uint64_t grace_ms);

  const Records& records() const { return records_; }
  const Pins& pins() const { return pins_; }
  const Preferences& preferences() const { return preferences_; }
  const Eviction& eviction() const { return eviction_; }
  const SlotAllocator& slots() const { return slots_; }
  Namespaces& namespaces() { return spaces_; }
  const Counters& counters() const { return counters_; }
  Record& record(uint32_t id) const { return records_.at(id); }

  // -- finding
  const KeyEntry* find(uint32_t space, const Key& key);  // takes out the chunk if it was cleared
  Key parent_of(uint32_t space, const Key& key) const;   // the root if it starts a sequence, or is not READY
  // The READY chunks at `budget` places from `start` on; then the `start` of the next call, -1 after the last place.
  std::pair<std::vector<Ready>, int64_t> ready(uint64_t start, uint32_t budget) const;

  // -- storing and using
  // FREE → RESERVED, or the limit that prevents it. The caller must pin the record before any other call.
  struct Reserved {
    uint32_t record = kNone;
    Limit limited = Limit::none;
  };
  Reserved reserve(const NewChunk& chunk);
  // See Eviction. The parent of the first chunk stays.
  bool make_room(const NewChunk& chunk, uint32_t count, uint32_t max_chunks);
  bool declines(uint32_t space, const Key& parent, std::span<const Key> keys, uint64_t bytes) {
    return eviction_.declines(space, parent, keys, bytes);
  }
  // A part of a RESERVED record that the session alone pins gets a slot for its raw bytes; or the limit is returned
  // that prevents it. REQUIRES: the part is not committed, and is packed.
  Limit make_raw(uint32_t id, uint32_t part, uint32_t session, uint32_t below);
  void publish_chunk(uint32_t id);  // RESERVED → READY; a record that the key named before is QUARANTINED
  void asked(uint64_t tick, size_t keys) { eviction_.asked(tick, keys); }
  void use(uint32_t id, uint64_t tick, bool is_apart) { eviction_.use(id, tick, is_apart); }
  void stamp(uint32_t id, uint64_t tick) { eviction_.stamp(id, tick); }
  void stamp_path(uint32_t space, const Key& key, uint64_t tick) { eviction_.stamp_path(space, key, tick); }
  void add_pin(uint32_t id, uint32_t session) {
    eviction_.unlist(id);
    pins_.add(id, session);
  }
  void drop_pin(uint32_t id, uint32_t session) {
    if (pins_.drop(id, session)) eviction_.unpinned(id);
  }
  void take_out(uint32_t id, Gone why) { eviction_.take_out(id, why); }

  // -- eviction, as csrc/table/eviction.h has it
  uint32_t evict(uint64_t target_bytes, uint32_t max_chunks, bool by_operator) {
    return eviction_.evict(target_bytes, max_chunks, by_operator ? Gone::evicted : Gone::ahead);
  }
  uint32_t evict_over_quota(uint32_t max_chunks) { return eviction_.evict_over_quota(max_chunks); }
  uint32_t empty_left(size_t kept, uint32_t max_chunks, const std::optional<Id16>& tenant) {
    return eviction_.empty_left(kept, max_chunks, tenant);
  }
  void set_eviction(const std::string& policy) { eviction_.set_policy(policy); }
  void see_chunks(Work& work) { eviction_.see_chunks(work); }

  // -- preferences, as csrc/table/preferences.h has them
  void keep(uint32_t id, uint64_t until_ms);
  Preferences::Retained retain(uint32_t id, int8_t priority, uint64_t until_ms);
  void set_priority(uint32_t id, int8_t priority, uint64_t until_ms);
  void end_preferences(uint64_t now, Work& work);  // ends those whose time has come

  // -- namespaces and clears
  std::vector<SpaceInfo> spaces();
  SpaceInfo space_info(uint32_t space);
  void drop_idle(size_t most);  // namespaces with neither records nor sessions
  Cleared clear(int64_t space, uint64_t start, uint32_t budget);  // space -1: all
  // From now on lookups find none of the namespace's present chunks. clear_old() takes them out in slices; find() takes
  // out those that it meets, also RESERVED ones.
  void raise_generation(uint32_t space, uint64_t generation) {
    spaces_.raise(space, generation, header_.last_generation);
  }
  Cleared clear_old(uint64_t start, uint32_t budget);

  // -- segments
  void add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes);
  uint64_t retire_segment(uint32_t segment, uint32_t max_chunks);  // returns the bytes still in use
  void remove_segment(uint32_t segment);

  void set_now(uint64_t now_ms);
  void check(const ImpliedPins& implied) const;  // Throws TableError corrupt
  struct Adopter;                                // csrc/table/adopters.h

 private:
  std::optional<uint32_t> take_id(const NewChunk& chunk, uint32_t parts);
  bool take_slots(const NewChunk& chunk, uint32_t id, std::vector<StoredPart>* out);
  template <class F>
  Cleared take_out_where(uint64_t start, uint32_t budget, F&& wanted);
  void set_segment(uint32_t segment, SegmentState state);

  TableHeader& header_;
  SegmentEntry* segments_;
  Namespaces spaces_;
  SlotAllocator slots_;
  Records records_;
  Pins pins_;
  Preferences preferences_;
  Eviction eviction_;
  Counters counters_;
};

}  // namespace kvdock
