// The reuse distances of sampled chunks: the bytes of the different chunks that were used since the last use of a
// chunk, itself included. A pool that evicts what was unused longest would still have it, were it as large.
//
// Bennett and Kruskal, "LRU Stack Processing" (1975): uses have places in their order, only the last use of a chunk
// keeps its place, and a Fenwick tree sums the bytes behind a place.
//
// Ownership: on the heap. Invariant: places_ names exactly the places whose bytes are not 0.
#pragma once

#include <optional>

#include "curve/names.h"

namespace kvdock {

class Distances {
 public:
  // The distance from the last use of the chunk to this one; nullopt: this is its first. `bytes`: of the chunk, not 0.
  std::optional<uint64_t> use(uint64_t name, uint64_t bytes);
  void drop(uint64_t name);
  size_t size() const { return places_.size(); }
  template <class F>
  void for_each(F&& f) const { places_.for_each(f); }  // f(name, place)
  void check() const;  // TableError corrupt

 private:
  static constexpr size_t kLeast = 1024;

  uint64_t before(size_t place) const;  // bytes of the places before it
  void set(size_t place, uint64_t bytes);
  void close_up();  // gives each chunk a new place, in the same order, so that as many places are free

  Names places_;
  std::vector<uint64_t> bytes_ = std::vector<uint64_t>(kLeast);     // by place; 0: no last use is there
  std::vector<uint64_t> tree_ = std::vector<uint64_t>(kLeast + 1);  // sums of bytes_
  uint64_t total_ = 0;
  size_t next_ = 0;  // the first place that was never used
};

}  // namespace kvdock
