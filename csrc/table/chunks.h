// The pool's chunks: their records and slots, who pins them, which go first, and where each record ends.
//
// Ownership: record pages, segment entries and slabs lie in the region; everything else is derived.
// Invariants: I1, I4, I5 and I7 of docs/lifetime_protocol.md#invariants, and of I2 that a pinned record is never FREE.
//   A record that is RESERVED or QUARANTINED is pinned; one that is READY, unpinned and without children is listed for
//   eviction under its priority, or, if it is kept, for eviction by its own tenant's quota.
//
// A pin is one line of a grant that has a holder; Chunks counts pins by session and knows no grants.
#pragma once

#include <array>
#include <map>
#include <set>
#include <span>
#include <unordered_map>

#include "base/huge_alloc.h"
#include "table/change_log.h"
#include "table/departures.h"
#include "table/key_index.h"
#include "table/leaf_lists.h"
#include "table/namespaces.h"
#include "table/pages.h"
#include "table/slots.h"

namespace kvdock {

// What the lines of all grants imply: by record, how often each session pins it. Chunks::check compares.
using ImpliedPins = std::map<uint32_t, std::map<uint32_t, uint32_t>>;

struct NewChunk {
  uint32_t space;
  Key key, parent;
  uint32_t groups;
  bool temporary;
  uint64_t tick;
  uint64_t bytes;  // of all its slots
  uint32_t below;  // its slots lie in segments with ids below this; kNone: in any

  // Else it takes free room only: memory that is freed for it could lie where its session may not write.
  bool makes_room() const { return below == kNone; }
};

class Chunks {
 public:
  struct Counters {
    uint64_t stored_chunks = 0, stored_bytes = 0, evicted_chunks = 0;
  };
  struct Sums {  // by RecordState
    std::array<uint64_t, 4> bytes{}, records{};
    bool operator==(const Sums&) const = default;
  };

  Chunks(const Region& region, uint64_t grace_ms);

  Namespaces& namespaces() { return spaces_; }
  const ChangeLog& changes() const { return changes_; }
  // Why lookups do not find the key any more.
  std::optional<Departure> departure(uint32_t space, const Key& key) const { return departures_.find(space, key); }
  void note_gone(const Record& r, Gone why) {
    changes_.note(r.space, r.key, false);
    departures_.note(r.space, r.key, why, r.last_used);
  }
  // When a request last named a chunk, by its tick; 0 if that is not known. On the server clock, as all `_ms` here.
  uint64_t used_ms(uint64_t tick) const { return departures_.used_at(tick); }
  uint64_t born_ms(uint32_t id) const { return uint64_t{info_[id].born_s} * 1000; }  // stored; 0: before this server
  uint32_t uses_of(uint32_t id) const { return info_[id].uses; }  // by lookups, since this server's start
  // The last use of the chunk that was unused longest, of those that no engine holds; 0 if that is not known.
  uint64_t oldest_used_ms() const;
  void set_now(uint64_t now_ms) {
    departures_.set_now(now_ms, header_.use_tick);
    spaces_.set_now(now_ms);
  }
  uint32_t chunks_in(uint32_t space) const { return space < records_in_.size() ? records_in_[space] : 0; }
  const Counters& counters() const { return counters_; }
  const Sums& sums() const { return sums_; }

  // Drops the namespaces that have no record and are not in `used`.
  void drop_idle(const std::vector<bool>& used);

  // -- finding
  const KeyEntry* find(uint32_t space, const Key& key);  // takes out what was cleared
  const KeyEntry* look(uint32_t space, const Key& key) const { return index_.find(space, key); }
  bool was_cleared(const Record& r) const { return spaces_.was_cleared(r.space, r.generation()); }
  void prefetch_key(uint32_t space, const Key& key) const { index_.prefetch(space, key); }
  Record& record(uint32_t id) const { return pages_.at(id); }
  uint32_t records_end() const { return pages_.end(); }                           // ids are below it
  uint32_t next_record(uint32_t from) const { return pages_.next_id(from); }      // records_end() after the last
  uint64_t bytes_of(uint32_t id) const { return uint64_t{info_[id].pages} * kSlotAlign; }
  void prefetch_record(uint32_t id) const {
    const uint8_t* at = pages_.address_of(id);
    __builtin_prefetch(&info_[id]);
    __builtin_prefetch(at + offsetof(Record, word), 1);
    __builtin_prefetch(at + sizeof(Record) + sizeof(StoredPart) - 1, 1);
  }
  bool names_live(const Line& line) const;  // the record is of that generation, and it is not FREE

  // -- storing and using
  // FREE → RESERVED, or what there is too little of. The caller pins the record before anything else.
  struct Reserved {
    uint32_t record = kNone;
    Limit limited = Limit::none;
  };
  Reserved reserve(const NewChunk& chunk);
  void publish_chunk(uint32_t id);  // RESERVED → READY; a record that the key named before is QUARANTINED
  void use(uint32_t id, uint64_t tick);    // a lookup found it
  void stamp(uint32_t id, uint64_t tick);  // a store names it
  void stamp_path(uint32_t space, Key key, uint64_t tick);  // from `key` to its root

  // -- pins: bytes that a session holds are counted once, however many of its grants name them
  void add_pin(uint32_t id, uint32_t session);
  void drop_pin(uint32_t id, uint32_t session);
  bool pinned(uint32_t id) const { return info_[id].pins != 0; }
  bool pinned_by(uint32_t id, uint32_t session) const {
    const Info& in = info_[id];
    return in.sole == session || (in.sole == kMany && shared_pins_.count(pair_of(session, id)));
  }
  // The session that alone pins it, or kNone.
  uint32_t pinned_only_by(uint32_t id) const { return info_[id].sole == kMany ? kNone : info_[id].sole; }
  uint64_t held_bytes() const { return held_bytes_; }
  uint64_t held_bytes(uint32_t session) const { return session < held_by_.size() ? held_by_[session] : 0; }

  // -- the end of a record
  void take_out(uint32_t id, Gone why);

  // -- eviction, and what an administrator may do
  // The smallest of these: all free bytes; and, for each slot size that a store had to evict for since the last
  // evict(), the bytes that slots of that size could take now.
  uint64_t room_bytes() const;
  // Until room_bytes() is the target, or about max_chunks went; returns how many did.
  uint32_t evict(uint64_t target_room_bytes, uint32_t max_chunks);
  bool can_evict() const;
  // Of the namespaces that were left, whenever that was, but for the `kept` latest: the oldest first, at most
  // max_chunks. Returns how many went. `tenant`: of its namespaces; `kept` is 0 then.
  uint32_t empty_left(size_t kept, uint32_t max_chunks, const std::optional<Id16>& tenant);
  std::vector<SpaceInfo> spaces();
  // About those that go next, `bytes` of them at most, by namespace.
  std::map<uint32_t, std::vector<Key>> next_out(uint64_t bytes) const;
  void set_eviction(const std::string& policy);  // as make_policy(); looks at every chunk
  const char* eviction() const { return policy_->name(); }
  void asked(uint64_t tick, size_t keys) {  // by a lookup
    policy_->asked(tick, sums_.records[static_cast<size_t>(RecordState::kReady)], keys);
  }
  // Of tenants that use more than their quota, down to it, at most max_chunks; returns how many went.
  uint32_t evict_over_quota(uint32_t max_chunks);
  Cleared clear(int64_t space, uint64_t start, uint32_t budget);  // space -1: all
  // Nobody finds what is in the namespace now. Takes nothing out: clear_old() does, in slices, and find().
  void raise_generation(uint32_t space, uint64_t generation) {
    spaces_.raise(space, generation, header_.last_generation);
  }
  Cleared clear_old(uint64_t start, uint32_t budget);
  // READY chunks, from place `start` on, some `budget` places; where the next call goes on, -1 after the last.
  std::pair<std::vector<Ready>, int64_t> ready(uint64_t start, uint32_t budget) const;
  Key parent_of(uint32_t space, const Key& key) const;  // the root's if it begins a sequence, or is not READY
  void keep(uint32_t id, uint64_t until_ms);  // 0: no longer
  void expire_kept(uint64_t now);
  uint64_t kept_bytes() const { return kept_bytes_; }

  // -- what engines wish: chunks of a lower priority go first; 0 is that of chunks for which nobody wishes anything
  // Raises the chunk's priority and its end, but neither above its parent's. no_room: more would be retained than may
  // be; no_parent: its parent is not retained.
  enum class Retained { yes, no_room, no_parent };
  Retained retain(uint32_t id, int8_t priority, uint64_t until_ms);
  // Sets a priority of 0 or less; until_ms 0: until a request names the chunk.
  void lower(uint32_t id, int8_t priority, uint64_t until_ms);
  void expire_wishes(uint64_t now);
  uint64_t retained_bytes() const { return retained_bytes_; }

  // -- segments
  const SlotAllocator& slots() const { return slots_; }
  void add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes);
  uint64_t retire_segment(uint32_t segment, uint32_t max_chunks);  // returns the bytes still in use
  void remove_segment(uint32_t segment);

  void check(const ImpliedPins& implied);  // TableError corrupt
  // By tenant: what its namespaces and records add up to.
  std::vector<Usage> count_usage() const;
  struct Adopter;                          // csrc/table/adopters.h

 private:
  struct Info {
    uint32_t pins = 0;
    uint32_t sole = kNone;  // the one session that pins it, kMany, or kNone
    uint32_t children = 0;  // of a READY record: what its key's index entry counts, kept beside the pins
    uint32_t pages = 0;     // bytes in kSlotAlign; 0 while FREE
    uint32_t born_s = 0;    // when it became READY, on the server clock; 0: before this server
    uint32_t uses = 0;      // by lookups
    bool kept = false;      // not to be evicted until kept_until_ms
    bool listed = false;    // in the list that list_of() names; unless it is kept, in that of its namespace as well
    uint32_t before = kNone, behind = kNone;  // there
    uint8_t kind = kNoKind; // what the policy takes it for
    int8_t priority = 0;    // what engines wish for it
  };
  static constexpr uint32_t kMany = kNone - 1;
  static uint64_t pair_of(uint32_t session, uint32_t id) { return uint64_t{session} << 32 | id; }

  void count_state(uint32_t id, int sign);
  void note_born(uint32_t id, uint32_t replaced) {
    info_[id].born_s = static_cast<uint32_t>(std::max<uint64_t>(1, departures_.now_ms() / 1000));
    info_[id].uses = replaced == kNone ? 0 : info_[replaced].uses;
  }
  void set_state(uint32_t id, RecordState state);
  void add_child(uint32_t space, const Key& parent);
  void drop_child(uint32_t space, const Key& parent);
  void offer(uint32_t id);
  void unlist(uint32_t id);
  void list_in_space(uint32_t id);
  void unlist_in_space(uint32_t id);
  template <class F>
  Cleared take_out_where(uint64_t start, uint32_t budget, F&& wanted);
  bool may_go(uint32_t id) const;
  LeafLists& list_of(uint32_t id) { return info_[id].kept ? kept_ : evictions_[info_[id].priority]; }
  Leaf leaf_of(uint32_t id) const { return {record(id).last_used, id}; }
  Chunk described(uint32_t id) const;
  void set_kind(uint32_t id);
  void set_kept(uint32_t id, uint64_t until_ms);
  void set_wish(uint32_t id, int8_t priority, uint64_t until_ms);
  uint64_t wished_until(uint32_t id) const;
  bool may_retain(uint32_t id) const;
  std::optional<uint32_t> new_id(const NewChunk& chunk, uint32_t parts);
  bool take_parts(const NewChunk& chunk, uint32_t id, std::vector<StoredPart>* out);
  void write_record(const NewChunk& chunk, uint32_t id, std::span<const StoredPart> parts);

  void retire(uint32_t id);
  void set_segment(uint32_t segment, SegmentState state);
  void free_record(uint32_t id);
  void unpinned(uint32_t id);

  void evict_one(uint32_t id);
  void evict_least(const Choice& least);
  std::optional<Choice> least_in(int8_t priority, const LeafLists& leaves, uint32_t shape) const;
  std::optional<Choice> first_of(const std::optional<LeftSpaces::Left>& left) const;
  std::optional<Choice> least(uint32_t shape);
  std::optional<Choice> least_with(std::optional<uint64_t> slot_bytes);
  bool evict_for(uint64_t bytes);
  bool make_room(uint64_t bytes, const NewChunk& chunk);
  bool evict_self_naming_chain(uint64_t bytes, const NewChunk& chunk);
  bool evict_of(uint32_t tenant);
  bool make_room_in_quota(const NewChunk& chunk);

  void check_records() const;
  void check_slots();
  void check_pins(const ImpliedPins& implied) const;
  void check_index() const;
  void check_wishes() const;
  void check_spaces() const;

  uint64_t& held_by(uint32_t session) {
    if (session >= held_by_.size()) held_by_.resize(session + 1);
    return held_by_[session];
  }

  TableHeader& header_;
  SegmentEntry* segments_;
  Namespaces spaces_;
  RecordPages pages_;
  SlotAllocator slots_;
  KeyIndex index_;
  std::unique_ptr<Policy> policy_ = make_policy("adaptive");
  std::map<int8_t, LeafLists> evictions_;  // by priority; only that of 0 may be empty
  LeafLists kept_;  // kept chunks, for quotas
  // The parent of the last that went, if it is as old and of its kind: it goes next, and nothing need be compared.
  std::optional<Choice> next_;
  uint32_t next_shape_ = 0;
  uint64_t next_tick_ = 0;
  std::vector<Info, HugeAllocator<Info>> info_;        // by record
  Sums sums_;
  std::unordered_map<uint64_t, uint32_t> shared_pins_;  // session << 32 | record, for records several sessions pin
  std::vector<uint64_t> held_by_;                       // by session cell: bytes it pins
  uint64_t held_bytes_ = 0;
  std::vector<uint32_t> records_in_;                  // by namespace: records that are not FREE
  std::vector<uint32_t> leaves_in_;  // by namespace: the first chunk that may go, but for kept ones; kNone: none may
  std::set<std::pair<uint64_t, uint32_t>> kept_until_;  // when, record: one for each kept record
  uint64_t kept_bytes_ = 0;
  std::unordered_map<uint32_t, uint64_t> wished_until_;   // by record: when a wish ends that has an end
  std::set<std::pair<uint64_t, uint32_t>> wishes_end_;    // when, record: one for each of those
  uint64_t retained_bytes_ = 0;                           // of records with a priority above 0
  std::set<uint64_t> wanted_;  // slot sizes that stores had to make room for
  ChangeLog changes_;
  Departures departures_;
  Gone cause_ = Gone::room;  // of what is being evicted
  Counters counters_;
};

}  // namespace kvdock
