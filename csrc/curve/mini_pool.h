// A miniature of a pool of another size: the eviction policy decides over sampled chunks only, in the same share of the
// pool's bytes. Waldspurger, Saemundsson, Ahmad and Park, "Cache Modeling and Optimization using Miniature Simulations"
// (USENIX ATC 2017).
//
// In a MiniPool, a chunk's parent is the nearest chunk before it that is sampled too. Leaves are evicted first, as in
// the chunk table.
//
// Invariants: an entry is a leaf, and in leaves_, exactly while no other names it as its parent; names_ has each entry
//   once; used_bytes_ is the sum of the entries' bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "curve/kept.h"
#include "curve/names.h"
#include "table/policy.h"

namespace kvdock {

class MiniPool {
 public:
  // Throws TableError bad_argument.
  MiniPool(const std::string& policy, double factor);

  // Sets the capacity to `factor` times the pool's bytes, times `share`, which is the share of chunks that are sampled.
  void resize(uint64_t pool_bytes, double share);
  // Keeps only the entries that are still sampled. resize() must follow.
  void thin(const std::function<bool(uint64_t name)>& stays);

  // A lookup of `keys` chunks: those with these names are sampled, in this order. Returns how many of these it finds up
  // to the first that is missing; the missing ones are stored then. Adds its cost to `work`, in stored chunks.
  uint32_t look(const std::vector<uint64_t>& names, uint64_t tick, size_t keys, uint64_t chunk_bytes, double* work);
  // Chunks that are stored without having been asked for.
  void store(const std::vector<uint64_t>& names, uint64_t tick, uint64_t chunk_bytes);

  double factor() const { return factor_; }
  size_t size() const { return names_.size(); }
  // How many sampled chunks of the present mean size the miniature can hold; nullopt while it is empty.
  std::optional<double> capacity() const {
    if (used_bytes_ == 0) return std::nullopt;
    return static_cast<double>(capacity_bytes_) * static_cast<double>(size()) / static_cast<double>(used_bytes_);
  }
  void check() const;  // Throws TableError corrupt

  static constexpr size_t kKeptEntryBytes = 3 * sizeof(uint64_t) + sizeof(uint32_t);
  // Its chunks and their last uses, for a miniature of the next server. As the table's, the policy begins anew there.
  void keep(KeptWriter& out) const;
  // Into an empty one. `tick`: no use is later. Throws TableError corrupt.
  void take_over(KeptReader& in, uint64_t tick);

 private:
  struct Entry {
    uint64_t name, used, bytes;
    uint32_t parent, children, leaf_at;
    uint8_t kind;
  };
  struct Victim {
    double worth;
    uint64_t used, name;
    uint32_t entry;
    bool evict_before(const Victim& other) const {
      return worth != other.worth ? worth < other.worth : used < other.used;
    }
  };

  bool insert(uint64_t name, uint32_t parent, uint64_t tick, uint64_t chunk_bytes);
  uint32_t place(uint64_t name, uint32_t parent, uint64_t used, uint64_t chunk_bytes);
  void touch(uint32_t id, uint64_t tick);
  void link(uint32_t id, uint32_t parent);
  void add_leaf(uint32_t id);
  void drop_leaf(uint32_t id);
  Victim victim(uint32_t id, uint64_t tick) const;
  bool is_as_chosen(const Victim& one) const;
  const Victim* next_victim(uint64_t tick);
  bool is_declined(uint64_t name, uint32_t parent, uint64_t tick);
  bool evict_one(uint64_t tick);
  void choose(uint64_t tick);
  void forget(uint32_t id);

  std::unique_ptr<Policy> policy_;
  double factor_, share_ = 1;
  uint64_t capacity_bytes_ = 0, used_bytes_ = 0;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_, leaves_;
  std::vector<Victim> victims_;  // those that are evicted next, in reverse order
  Names names_;
};

}  // namespace kvdock
