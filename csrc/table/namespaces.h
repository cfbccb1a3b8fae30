// The namespaces of a pool, whose they are, and which of them make room for each other.
//
// Ownership: the entries lie in the region; their number and shapes are derived.
// Invariants: a live entry never changes; an entry is dropped only while no session and no record names it, and may
//   then be used again. A shape is the ascending list of the distinct slot sizes of a namespace's parts; live
//   namespaces with equal lists have the same one, and a shape that none of them has may be used again.
#pragma once

#include "table/region.h"
#include "table/tenants.h"

namespace kvdock {

struct NewNamespace {
  Key digest;
  Id16 tenant;
  uint32_t chunk_tokens, block_tokens, writers;
  std::vector<Group> groups;
};

class Namespaces {
 public:
  explicit Namespaces(const Region& region) : entries_(region.spaces) {}
  void judge();  // adoption: takes over what is there, or refuses it; writes nothing

  // Idempotent by digest.
  uint32_t add(const NewNamespace& wanted);
  std::optional<uint32_t> find(const Key& digest) const;
  bool has_room() const { return live().size() < kMaxNamespaces; }
  void drop(uint32_t space);
  std::vector<uint32_t> live() const;
  bool has(uint32_t space) const { return space < shape_of_.size() && shape_of_[space] != kNone; }
  const Namespace& operator[](uint32_t space) const { return entries_[space]; }
  void require(uint32_t space) const {
    if (!has(space)) throw TableError("unknown_namespace", "no such namespace", space);
  }

  Tenants& tenants() { return tenants_; }
  uint32_t tenant_of(uint32_t space) const { return tenant_of_[space]; }
  Usage& usage(uint32_t space) { return tenants_.usage(tenant_of_[space]); }  // its tenant's

  void enter_session(uint32_t space, uint64_t id);
  void leave_session(uint32_t space, uint64_t id);
  // The id of the session that alone is open in it; 0: there is none, or more.
  uint64_t only_session(uint32_t space) const { return sessions_[space].count == 1 ? sessions_[space].ids : 0; }

  uint32_t shape_of(uint32_t space) const { return shape_of_[space]; }
  bool shape_has(uint32_t shape, uint64_t slot_bytes) const;

 private:
  struct Sessions {
    uint32_t count = 0;
    uint64_t ids = 0;  // their sum
  };
  void enter(uint32_t space);
  uint32_t shape_number(const Namespace& ns);

  Namespace* entries_;
  std::vector<uint32_t> shape_of_;  // by entry; kNone: not live
  std::vector<uint32_t> tenant_of_;
  std::vector<Sessions> sessions_;
  std::vector<std::vector<uint64_t>> shapes_;
  Tenants tenants_;
};

}  // namespace kvdock
