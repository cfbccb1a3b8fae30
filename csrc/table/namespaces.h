// The namespaces of a pool: their tenants, the shapes of their chunks, and which of them sessions have left.
//
// Ownership: the entries lie in the region; their number and shapes are derived.
// Invariants: a live entry never changes; an entry is dropped only while no session and no record names it, and may
//   then be used again. A shape is the ascending list of the distinct slot sizes of a namespace's parts; live
//   namespaces with equal lists have the same one, and a shape that none of them has may be used again. A namespace is
//   left while no session is in it, if it is one with weights, or if a session moved out of it since one came into it.
#pragma once

#include "table/left_spaces.h"
#include "table/region.h"
#include "table/tenants.h"

namespace kvdock {

struct NewNamespace {
  Key digest, base;  // as Namespace has them
  Id16 tenant;
  uint32_t chunk_tokens, block_tokens, writers;
  std::vector<Group> groups;
};

class Namespaces {
 public:
  Namespaces(const Region& region, uint64_t grace_ms) : entries_(region.spaces), grace_ms_(grace_ms) {}
  void judge();  // adoption: takes the entries over, or refuses them; writes nothing
  void restart(uint64_t clock_ms);  // after judge(): finds which namespaces were left

  // Idempotent by digest.
  uint32_t add(const NewNamespace& wanted);
  std::optional<uint32_t> find(const Key& digest) const;
  bool has_room() const { return by_digest_.size() < kMaxNamespaces; }
  // How many of the tenant's, or of all, sessions have not left. `leaving`: one that one of its sessions is about to
  // leave.
  size_t in_use(const std::optional<Id16>& tenant, uint32_t leaving) const;
  void drop(uint32_t space);
  std::vector<uint32_t> live() const;
  bool has(uint32_t space) const { return space < shape_of_.size() && shape_of_[space] != kNone; }
  const Namespace& operator[](uint32_t space) const { return entries_[space]; }
  void require(uint32_t space) const {
    if (!has(space)) throw TableError("unknown_namespace", "no such namespace", space);
  }

  Tenants& tenants() { return tenants_; }
  uint32_t tenant_of(uint32_t space) const { return tenant_of_[space]; }
  Usage& usage(uint32_t space) { return tenants_.usage(tenant_of_[space]); }  // the usage of the namespace's tenant

  // Whether both namespaces have the same manifest and tenant.
  bool differ_in_weights_alone(uint32_t space, uint32_t other) const {
    return entries_[space].base == entries_[other].base;
  }
  bool has_weights(uint32_t space) const { return !(entries_[space].digest == entries_[space].base); }

  // ended: the session ended. moved: it is in another namespace now, because its engine runs other weights.
  enum class Leaves { ended, moved };
  void enter_session(uint32_t space);
  void leave_session(uint32_t space, Leaves how);
  void count_session(uint32_t space);  // adoption: a session is in the namespace
  uint32_t sessions_in(uint32_t space) const { return sessions_[space]; }

  void set_now(uint64_t now_ms) { now_ms_ = std::max(now_ms_, now_ms); }  // the server clock
  LeftSpaces& left() { return left_; }
  const LeftSpaces& left() const { return left_; }
  // Chunks of namespaces that were left at this time or before are evicted first. After a later departure, an engine
  // that runs the weights may still come back within the grace.
  uint64_t left_until_ms() const { return now_ms_ >= grace_ms_ ? now_ms_ - grace_ms_ : 0; }
  bool evict_first(uint32_t space) const { return left_.has(space) && left_.left_at(space) <= left_until_ms(); }
  void check(const std::vector<bool>& has_leaves) const;  // by number; throws TableError corrupt

  uint64_t generation(uint32_t space) const { return entries_[space].generation & kWordMask; }
  // `generation`: that of a record of the namespace.
  bool was_cleared(uint32_t space, uint64_t generation) const {
    return generation <= cleared_through(space);
  }
  uint64_t cleared_through(uint32_t space) const { return entries_[space].cleared_through & kWordMask; }
  void raise(uint32_t space, uint64_t generation, uint64_t cleared_through);

  uint32_t shape_of(uint32_t space) const { return shape_of_[space]; }
  bool shape_has(uint32_t shape, uint64_t slot_bytes) const;

 private:
  void enter(uint32_t space);
  uint32_t shape_number(const Namespace& ns);

  bool is_left(uint32_t space) const {
    return has(space) && sessions_[space] == 0 && entries_[space].left_ms != 0;
  }

  Namespace* entries_;
  std::map<Key, uint32_t> by_digest_;  // the live ones
  uint64_t grace_ms_, now_ms_ = 0;
  LeftSpaces left_;
  std::vector<uint32_t> shape_of_;  // by entry; kNone: not live
  std::vector<uint32_t> tenant_of_;
  std::vector<uint32_t> sessions_;  // by entry: how many are open in it
  std::vector<std::vector<uint64_t>> shapes_;
  Tenants tenants_;
};

}  // namespace kvdock
