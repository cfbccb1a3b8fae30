// The reuse distances of sampled chunks: the bytes of the different chunks that were used since the last use of a
// chunk, itself included. A pool that evicts what was unused longest would still have it, were it as large.
//
// Bennett and Kruskal, "LRU Stack Processing" (1975): uses have places in their order, and only the last use of a chunk
// keeps its place. In place of their tree there are sums of 64 places, and of 64 times 64: a use changes three numbers.
// The chunks of a prompt were last used one after the other, so the bytes before a place are counted on from the place
// that was asked about last.
//
// Ownership: on the heap. Invariants: places_ names exactly the places whose bytes are not 0; near_before_ is the sum
//   of the bytes before near_.
#pragma once

#include <optional>

#include "curve/kept.h"
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
  void check() const;  // Throws TableError corrupt

  // The chunks in the order of their last use, for the next server.
  void keep(KeptWriter& out) const;
  void take_over(KeptReader& in);  // REQUIRES: it is empty. Throws TableError corrupt

 private:
  static constexpr size_t kLeast = 4096, kWide = 64;  // kLeast: places, a multiple of kWide * kWide

  uint64_t before(size_t place) const;  // bytes of the places before it
  void go_near(size_t place);           // the next call is about the same place, or one that follows soon
  void set(size_t place, uint64_t bytes);
  void close_up();  // gives each chunk a new place, in the same order, so that as many places are free

  Names places_;
  std::vector<uint64_t> bytes_ = std::vector<uint64_t>(kLeast);     // by place; 0: no last use is there
  std::vector<uint64_t> blocks_ = std::vector<uint64_t>(kLeast / kWide);  // sums of kWide of bytes_
  std::vector<uint64_t> spans_ = std::vector<uint64_t>(kLeast / kWide / kWide);  // sums of kWide of blocks_
  uint64_t total_ = 0, near_before_ = 0;
  size_t near_ = 0;
  size_t next_ = 0;  // the first place that was never used
};

}  // namespace kvdock
