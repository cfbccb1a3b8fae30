// The namespaces of a pool, and which of them make room for each other.
//
// Ownership: the entries lie in the region; their number and shapes are derived.
// Invariants: a live entry never changes; an entry is dropped only while no session and no record names it, and may
//   then be used again. A shape is the ascending list of the distinct slot sizes of a namespace's parts; live
//   namespaces with equal lists have the same one, and a shape that none of them has may be used again.
#pragma once

#include "table/region.h"

namespace kvdock {

class Namespaces {
 public:
  explicit Namespaces(const Region& region) : entries_(region.spaces) {}
  void judge();  // adoption: takes over what is there, or refuses it; writes nothing

  // Idempotent by digest.
  uint32_t add(const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens, uint32_t writers,
               const std::vector<Group>& groups);
  bool has_room() const { return live().size() < kMaxNamespaces; }
  void drop(uint32_t space);
  std::vector<uint32_t> live() const;
  bool has(uint32_t space) const { return space < shape_of_.size() && shape_of_[space] != kNone; }
  const Namespace& operator[](uint32_t space) const { return entries_[space]; }
  void require(uint32_t space) const {
    if (!has(space)) throw TableError("unknown_namespace", "no such namespace", space);
  }

  uint32_t shape_of(uint32_t space) const { return shape_of_[space]; }
  bool shape_has(uint32_t shape, uint64_t slot_bytes) const;

 private:
  void add_shape(uint32_t space);

  Namespace* entries_;
  std::vector<uint32_t> shape_of_;  // by entry; kNone: not live
  std::vector<std::vector<uint64_t>> shapes_;
};

}  // namespace kvdock
