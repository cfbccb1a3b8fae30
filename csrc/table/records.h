// The records of chunks: what each of them holds, the index of their keys, and how many children each key has.
//
// Ownership: record pages lie in the region; everything else is derived. The namespaces and the slot allocator belong
//   to Chunks, which shares them with the other parts.
// Invariants: I1, I4, I5 and I7 of docs/understand/lifetime_protocol.md#invariants.
#pragma once

#include <array>
#include <span>

#include "base/huge_alloc.h"
#include "table/change_log.h"
#include "table/departures.h"
#include "table/key_index.h"
#include "table/namespaces.h"
#include "table/pages.h"
#include "table/policy.h"
#include "table/slots.h"

namespace kvdock {

struct NewChunk {
  uint32_t space;
  Key key, parent;
  uint32_t groups;
  bool temporary;
  uint64_t tick;
  uint64_t bytes;  // of all its slots
  uint32_t below;  // its slots lie in segments with ids below this; kNone: in any

  // With a limit, memory that eviction frees could lie in segments that the session may not name: it gets free memory
  // only.
  bool may_evict() const { return below == kNone; }
};

// The derived state of one record. The parts of Chunks keep it in one array, because a release of 512 chunks touches
// 512 entries: three arrays would be three times the cache misses. Each part writes the fields under its name.
struct RecordInfo {
  // Records
  uint32_t children = 0;  // of a READY record: the same number as in its key's index entry
  uint32_t pages = 0;     // its bytes in units of kSlotAlign; 0 while FREE
  uint32_t born_s = 0;    // when it became READY, on the server clock; 0: before this server
  uint32_t uses = 0;      // how many lookups found it
  uint32_t used_s = 0;    // its last use (reuse.h), on the server clock; 0: before this server
  // Pins
  uint32_t pins = 0;
  uint32_t sole = kNone;  // the one session that pins it, kMany, or kNone
  // Preferences
  bool kept = false;    // an administrator keeps it until Record::kept_until_ms
  int8_t priority = 0;  // from engines' hints; the lowest is evicted first
  // Eviction
  bool listed = false;  // it is among the candidates and, unless it is kept, in the list of its namespace
  uint8_t kind = kNoKind;                       // as the policy last chose
  uint32_t previous = kNone, next = kNone;      // in the list of its namespace
};
constexpr uint32_t kMany = kNone - 1;

class Records {
 public:
  struct Sums {  // by RecordState
    std::array<uint64_t, 4> bytes{}, records{};
    // The bytes of the parts as engines have them, and of packed groups how many parts are raw.
    std::array<uint64_t, 4> kv_bytes{}, raw_parts{};
    bool operator==(const Sums&) const = default;
  };

  Records(const Region& region, Namespaces& spaces, SlotAllocator& slots);

  // -- reading
  Record& at(uint32_t id) const { return pages_.at(id); }
  RecordInfo& info(uint32_t id) { return info_[id]; }
  const RecordInfo& info(uint32_t id) const { return info_[id]; }
  uint64_t bytes_of(uint32_t id) const { return uint64_t{info_[id].pages} * kSlotAlign; }
  uint32_t end() const { return pages_.end(); }                      // every id is below it
  uint32_t next(uint32_t from) const { return pages_.next_id(from); }  // the first id from there on; or end()
  void prefetch(uint32_t id) const {
    const uint8_t* at = pages_.address_of(id);
    __builtin_prefetch(&info_[id]);
    __builtin_prefetch(at + offsetof(Record, word), 1);
    __builtin_prefetch(at + sizeof(Record) + sizeof(StoredPart) - 1, 1);
  }
  const KeyEntry* find(uint32_t space, const Key& key) const { return index_.find(space, key); }
  void prefetch_key(uint32_t space, const Key& key) const { index_.prefetch(space, key); }
  template <class F>
  void for_each_key(F&& f) const { index_.for_each(f); }
  // The index entry of the record's parent key; nullptr: there is none, or the record starts a sequence.
  const KeyEntry* parent_of(const Record& r) const {
    return r.parent.names_chunk() ? index_.find(r.space, r.parent) : nullptr;
  }
  bool names_live(const GrantEntry& entry) const;  // the record is of that generation, and it is not FREE
  bool was_cleared(const Record& r) const { return spaces_.was_cleared(r.space, r.generation()); }
  const Sums& sums() const { return sums_; }
  uint32_t chunks_in(uint32_t space) const { return space < in_space_.size() ? in_space_[space] : 0; }
  // By tenant: its namespaces and records, counted again.
  std::vector<Usage> count_usage() const;
  Usage& usage_of(uint32_t id) const { return spaces_.usage(at(id).space); }  // of its tenant
  bool is_own_users(uint32_t id) const { return spaces_[at(id).space].tenant == Id16{}; }

  // -- transitions: each is one 64-bit store
  // An id for a record with that number of parts; nullopt: every page is in use.
  std::optional<uint32_t> take_id(uint32_t parts);
  size_t free_ids(uint32_t parts, size_t enough) const { return pages_.free_ids(parts, enough); }
  void give_id(uint32_t id) { pages_.give(id); }  // for an id under which nothing was written
  void write(const NewChunk& chunk, uint32_t id, std::span<const StoredPart> parts);  // FREE → RESERVED
  // The RESERVED record's part has another slot from now on. REQUIRES: the part is not committed.
  void move_part(uint32_t id, uint32_t part, const StoredPart& to);
  void finish_move();  // of the part that the header's Move names
  uint32_t make_ready(uint32_t id);  // RESERVED → READY; returns the record that the key named before, or kNone
  void note_gone(const Record& r, Gone why);  // from now on lookups do not find it
  void forget_key(uint32_t id);               // from now on its key does not name it
  void quarantine(uint32_t id);               // → QUARANTINED
  void free(uint32_t id);                     // QUARANTINED → FREE: its slots may be given out again
  // The parent has one child more, or less. Both return the parent's READY record, or kNone.
  uint32_t add_child(uint32_t space, const Key& parent);
  uint32_t drop_child(uint32_t space, const Key& parent);

  // -- the history of keys; times are on the server clock, as all `_ms` here
  void set_now(uint64_t now_ms) { departures_.set_now(now_ms, header_.use_tick); }
  const ChangeLog& changes() const { return changes_; }
  void note_declined(uint32_t space, std::span<const Key> keys);
  // Why lookups ceased to find the key.
  std::optional<Departure> departure(uint32_t space, const Key& key) const { return departures_.find(space, key); }
  // When a request last named a chunk, by its tick; 0 if that is not known.
  uint64_t used_ms(uint64_t tick) const { return departures_.used_at(tick); }
  uint32_t now_s() const { return static_cast<uint32_t>(std::max<uint64_t>(1, departures_.now_ms() / 1000)); }
  uint64_t born_ms(uint32_t id) const { return uint64_t{info_[id].born_s} * 1000; }  // 0: before this server
  void forget_spaces(const std::vector<bool>& spaces);  // by number; before these go to others

  void check() const;  // Throws TableError corrupt

  // -- adoption (Chunks::Adopter)
  RecordPages& pages() { return pages_; }
  void cover_pages();  // call it after the pages were found
  KeyEntry& entry(uint32_t space, const Key& key) { return index_.insert(space, key); }
  void count(uint32_t id, int sign);  // adds the record to the sums of its state, or takes it out

 private:
  void add_to(Sums& sums, const Record& r, uint64_t bytes, uint64_t sign) const;
  void set_state(uint32_t id, RecordState state);
  void check_bodies() const;
  void check_index() const;

  TableHeader& header_;
  Namespaces& spaces_;
  SlotAllocator& slots_;
  RecordPages pages_;
  KeyIndex index_;
  std::vector<RecordInfo, HugeAllocator<RecordInfo>> info_;  // by record; it has room for all
  Sums sums_;
  std::vector<uint32_t> in_space_;  // by namespace: records that are not FREE
  ChangeLog changes_;
  Departures departures_;
};

}  // namespace kvdock
