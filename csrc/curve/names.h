// A bounded map from the names of sampled chunks to numbers: open addressing, without tombstones.
//
// A name follows from a key that a caller chose, so a seeded hash of it selects its cell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/seeded_hash.h"

namespace kvdock {

class Names {
 public:
  static constexpr uint32_t kAbsent = 0xffffffffu;

  // The value, or kAbsent.
  uint32_t find(uint64_t name) const { return cells_[place(name)].value; }

  // Sets the value, which is not kAbsent.
  void put(uint64_t name, uint32_t value) {
    size_t at = place(name);
    if (cells_[at].value == kAbsent) {
      if (++size_ * 2 > cells_.size()) {
        grow();
        at = place(name);
      }
      cells_[at].name = name;
    }
    cells_[at].value = value;
  }

  void drop(uint64_t name) {
    size_t hole = place(name);
    if (cells_[hole].value == kAbsent) return;
    cells_[hole].value = kAbsent;
    --size_;
    for (size_t i = next(hole); cells_[i].value != kAbsent; i = next(i)) {
      size_t want = home(cells_[i].name);
      // Move back unless its home lies cyclically in (hole, i].
      bool stays = hole <= i ? (hole < want && want <= i) : (hole < want || want <= i);
      if (stays) continue;
      cells_[hole] = cells_[i];
      cells_[i].value = kAbsent;
      hole = i;
    }
  }

  size_t size() const { return size_; }

  template <class F>
  void for_each(F&& f) const {
    for (const Cell& cell : cells_)
      if (cell.value != kAbsent) f(cell.name, cell.value);
  }

 private:
  struct Cell {
    uint64_t name = 0;
    uint32_t value = kAbsent;
  };

  size_t home(uint64_t name) const { return SeededHash{}(name) >> shift_; }
  size_t next(size_t i) const { return (i + 1) & (cells_.size() - 1); }
  // Its cell, or the empty one where it would lie.
  size_t place(uint64_t name) const {
    size_t i = home(name);
    while (cells_[i].value != kAbsent && cells_[i].name != name) i = next(i);
    return i;
  }
  void grow() {
    std::vector<Cell> old(cells_.size() * 2);
    old.swap(cells_);
    --shift_;
    for (const Cell& cell : old)
      if (cell.value != kAbsent) cells_[place(cell.name)] = cell;
  }

  std::vector<Cell> cells_ = std::vector<Cell>(1024);
  int shift_ = 64 - 10;  // the number of cells is a power of two
  size_t size_ = 0;
};

}  // namespace kvdock
