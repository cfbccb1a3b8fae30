// Which chunks are evicted, in which order, and how a chunk leaves the pool. Nothing here discharges a holder (I6): a
// record that is still pinned stays QUARANTINED until its last pin is dropped.
//
// Ownership: everything here is derived. The parts of Chunks that are used here belong to Chunks.
// Invariants: a record that is READY, unpinned and without children is a candidate; no other record is. A candidate is
//   listed under its priority, or, if it is kept, for eviction by its own tenant's quota. A record that is RESERVED or
//   QUARANTINED is pinned. Each namespace lists its candidates, except kept ones.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>

#include "base/work.h"
#include "table/leaf_lists.h"
#include "table/preferences.h"
#include "table/records.h"
#include "table/reuse.h"

namespace kvdock {

class Eviction {
 public:
  Eviction(const TableHeader& header, Namespaces& spaces, SlotAllocator& slots, Records& records,
           Preferences& preferences);

  // -- candidates
  bool is_candidate(uint32_t id) const;
  void offer(uint32_t id);   // lists the record if it is a candidate
  void unlist(uint32_t id);  // call it before a change of any field that decides where the record is listed
  void add_child(uint32_t space, const Key& parent);
  void drop_child(uint32_t space, const Key& parent);

  // -- uses
  void asked(uint64_t tick, size_t keys) {  // by a lookup
    policy_->asked(tick, records_.sums().records[static_cast<size_t>(RecordState::kReady)], keys);
  }
  void use(uint32_t id, uint64_t tick, bool is_apart);  // a lookup found it. is_apart: it is in no figure
  void stamp(uint32_t id, uint64_t tick);  // a store names it
  void stamp_path(uint32_t space, Key key, uint64_t tick);  // from `key` to its root
  void stored(uint32_t id);   // the record became READY. REQUIRES: it is not listed
  void adopted(uint32_t id);  // an earlier server stored the chunk. REQUIRES: it is not listed

  // -- the end of a record, from one to the next: unpinned → take_out → retire → free. None of them calls back
  void unpinned(uint32_t id);            // its last pin was dropped
  void take_out(uint32_t id, Gone why);  // READY or RESERVED → lookups do not find it from now on
  void retire(uint32_t id);              // of a record that no key names: → QUARANTINED, and FREE unless pinned

  // -- memory for a store
  // False: no chunk may be evicted for a record of that many parts in the namespace, or for a part of `bytes`.
  bool evict_for_id(uint32_t space, uint32_t parts);
  bool evict_for_slot(uint64_t bytes, const NewChunk& chunk);
  bool evict_for_quota(const NewChunk& chunk);  // false: the chunk does not fit its tenant's quota
  // Makes room for `count` chunks like this one, as far as their tenant's quota has them. Evicts at most max_chunks;
  // returns whether that was too few.
  bool make_room(const NewChunk& chunk, uint32_t count, uint32_t max_chunks);
  // Whether the pool is full and these chunks, of a chain under `parent`, would be evicted before all that are there.
  // If so, the policy remembers that they were asked for, and a lookup that misses them is told why. Chunks that follow
  // a retained or a kept chunk are not declined.
  bool declines(uint32_t space, const Key& parent, std::span<const Key> keys, uint64_t bytes);

  // -- eviction in the background
  // The smallest of these: all free bytes; and, for each slot size that stores had to evict for since the last evict(),
  // the bytes that slots of that size could take now.
  uint64_t available_bytes() const;
  // Evicts until available_bytes() is the target, or about max_chunks were evicted; returns how many were. `cause`: the
  // reason that they are recorded with.
  uint32_t evict(uint64_t target_bytes, uint32_t max_chunks, Gone cause);
  bool can_evict() const;
  // Evicts at most max_chunks of tenants that use more than their quota, down to it; returns how many were evicted.
  uint32_t evict_over_quota(uint32_t max_chunks);
  // Evicts at most max_chunks of the namespaces that sessions have left, the one left first comes first, however long
  // ago that was, except the `kept` that were left last. Returns how many were evicted. `tenant`: only of its
  // namespaces; `kept` is ignored then.
  uint32_t empty_left(size_t kept, uint32_t max_chunks, const std::optional<Id16>& tenant);
  // Evicts at most max_chunks of the chunks with a slot in the segment.
  void empty_segment(uint32_t segment, uint32_t max_chunks);

  // By namespace, the keys of about those chunks that are evicted next, which take at most `bytes` together, and are at
  // most `most`.
  std::map<uint32_t, std::vector<Key>> next_out(uint64_t bytes, size_t most) const;
  // When the candidate that was unused longest was last used; 0 if that is not known.
  uint64_t oldest_used_ms() const;
  uint64_t evicted_chunks() const { return evicted_.all; }
  uint64_t evicted_by_operator() const { return evicted_.by_operator; }  // those of them with the reason `evicted`
  const Reuse& reuse() const { return reuse_; }
  const char* policy() const { return policy_->name(); }
  // From now on chunks are evicted by that policy. It sees those that are there already by and by, in see_chunks();
  // what the policy before it thought of them stays until then. Throws as make_policy() does.
  void set_policy(const std::string& name);
  void see_chunks(Work& work);

  void check() const;  // Throws TableError corrupt

 private:
  // The parent of the last chunk that was evicted, if both have the same kind, priority and last use. Until the next
  // tick it is the next choice of its shape, without a comparison of candidates.
  struct Next {
    Choice choice;
    uint32_t shape;
    uint64_t tick;
  };

  struct Room {
    std::set<uint64_t> wanted;  // slot sizes that stores had to evict for
    uint64_t ahead_bytes = 0;   // how much evict() keeps free
  };

  struct Evicted {
    uint64_t all = 0, by_operator = 0;
  };

  LeafLists& list_of(uint32_t id) {
    const RecordInfo& in = records_.info(id);
    return in.kept ? kept_ : lists_[in.priority];
  }
  Leaf leaf_of(uint32_t id) const { return {records_.at(id).last_used, id}; }
  Chunk described(uint32_t id) const;
  void list_in_space(uint32_t id);
  void unlist_in_space(uint32_t id);

  void count_evicted(const RecordInfo& in);
  void evict_one(uint32_t id);
  void evict_least(const Choice& least);
  std::optional<Choice> least_in(int8_t priority, const LeafLists& leaves, uint32_t shape) const;
  std::optional<Choice> first_of(const std::optional<LeftSpaces::Left>& left) const;
  std::optional<Choice> least(uint32_t shape) const;
  std::optional<Choice> least_with(std::optional<uint64_t> slot_bytes) const;
  bool evict_toward(uint64_t bytes);
  bool evict_self_naming_chain(uint64_t bytes, const NewChunk& chunk);
  bool evict_of(uint32_t tenant);

  void check_lists() const;
  void check_spaces() const;

  const TableHeader& header_;
  Namespaces& spaces_;
  SlotAllocator& slots_;
  Records& records_;
  Preferences& preferences_;
  std::unique_ptr<Policy> policy_ = make_policy("adaptive");
  std::map<int8_t, LeafLists> lists_;  // candidates by priority; only the list of priority 0 may be empty
  LeafLists kept_;                     // kept candidates
  std::vector<uint32_t> in_space_;     // by namespace: the first of its candidates, except kept ones; or kNone
  std::optional<Next> next_;
  uint32_t unseen_ = kNone;    // where see_chunks() goes on; kNone: the policy has seen all
  Room room_;
  Gone cause_ = Gone::room;    // the reason that evictions are recorded with
  Evicted evicted_;
  Reuse reuse_;
};

}  // namespace kvdock
