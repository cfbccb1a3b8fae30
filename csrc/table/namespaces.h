// The namespaces of a pool, and which of them make room for each other.
//
// Ownership: the entries lie in the region; their number and shapes are derived.
// Invariants: entries are live from 0 on, without gaps, and never change or go; a shape is the ascending list of the
//   distinct slot sizes of a namespace's parts, and namespaces with equal lists have the same one.
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
  uint32_t count() const { return static_cast<uint32_t>(shape_of_.size()); }
  const Namespace& operator[](uint32_t space) const { return entries_[space]; }
  void require(uint32_t space) const {
    if (space >= count()) throw TableError("unknown_namespace", "no such namespace", space);
  }

  uint32_t shape_of(uint32_t space) const { return shape_of_[space]; }
  bool shape_has(uint32_t shape, uint64_t slot_bytes) const;

 private:
  void add_shape(const Namespace& ns);

  Namespace* entries_;
  std::vector<uint32_t> shape_of_;
  std::vector<std::vector<uint64_t>> shapes_;
};

}  // namespace kvdock
