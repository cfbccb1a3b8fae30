// Which record a key names, and how many records name it as their parent: an open-addressing hash table.
//
// It grows a little with each insert, so no call pays for all of it. Cells are in the order of their keys' hashes, so
// the twofold array is filled from its front to its back while the other one is emptied: both touch their memory in
// order, too. A key's hash says in which of both arrays it is.
//
// Ownership: derived from the records; rebuilt, never stored.
// Invariants: an entry exists while its key has a READY record, a RESERVED record or children; at most one record
//   of each state (I5); probing is linear and deletion shifts back, so no tombstones accumulate. While the index grows,
//   `before_` is emptied from `start_` on, which was an empty cell. Entries whose home is among its first `moved_`
//   cells from there have been moved. These cells are empty but for the end of the run that begins in the last cells.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "base/huge_alloc.h"
#include "base/seeded_hash.h"
#include "base/zeroed_array.h"
#include "table/layout.h"

namespace kvdock {

struct KeyEntry {
  Key key;
  uint32_t after_space;  // the namespace's number + 1; 0: an empty cell
  uint32_t ready;
  uint32_t reserved;
  uint32_t children;  // RESERVED and READY records that name this key as parent

  bool taken() const { return after_space != 0; }
  uint32_t space() const { return after_space - 1; }
  uint32_t any() const { return ready != kNone ? ready : reserved; }
  bool unused() const { return ready == kNone && reserved == kNone && children == 0; }
};

class KeyIndex {
 public:
  KeyIndex() : cells_(1024) {}

  KeyEntry* find(uint32_t space, const Key& key) {
    return const_cast<KeyEntry*>(std::as_const(*this).find(space, key));
  }
  const KeyEntry* find(uint32_t space, const Key& key) const {
    uint64_t h = hash(space, key);
    return array_of(h).find(h, space, key);
  }

  void prefetch(uint32_t space, const Key& key) const {
    uint64_t h = hash(space, key);
    const Cells& cells = array_of(h);
    const KeyEntry* at = &cells[cells.home(h)];
    __builtin_prefetch(at);
    __builtin_prefetch(reinterpret_cast<const char*>(at + 1) - 1);
  }

  // References are good until the next insert or drop.
  KeyEntry& insert(uint32_t space, const Key& key) {
    uint64_t h = hash(space, key);
    if (const KeyEntry* e = array_of(h).find(h, space, key)) return const_cast<KeyEntry&>(*e);
    if ((size_ + 1) * 10 > cells_.size() * 7) grow();
    if (is_growing()) move(kMovedByInsert);
    ++size_;
    return place(h, {key, space + 1, kNone, kNone, 0});
  }

  // A parent's READY record and its number of children after a change; {kNone, 0} for a parent that names no chunk.
  struct Parent {
    uint32_t ready, children;
  };
  Parent add_child(uint32_t space, const Key& parent) {
    if (!parent.names_chunk()) return {kNone, 0};
    KeyEntry& e = insert(space, parent);
    return {e.ready, ++e.children};
  }
  Parent drop_child(uint32_t space, const Key& parent) {
    if (!parent.names_chunk()) return {kNone, 0};
    KeyEntry& e = *find(space, parent);
    Parent left{e.ready, --e.children};
    drop_if_unused(e);
    return left;
  }

  // From now on the key's entry does not name the record.
  void forget(uint32_t space, const Key& key, uint32_t record) {
    KeyEntry& e = *find(space, key);
    if (e.ready == record) e.ready = kNone;
    if (e.reserved == record) e.reserved = kNone;
    drop_if_unused(e);
  }

  size_t size() const { return size_; }

  template <class F>
  void for_each(F&& f) const {
    for (const Cells* cells : {&before_, &cells_})
      for (size_t i = 0; i < cells->size(); ++i)
        if ((*cells)[i].taken()) f((*cells)[i]);
  }

 private:
  // `i` has been masked, so its bounds need no check: lookups spend most of their time here.
  class Cells {
   public:
    Cells() = default;
    explicit Cells(size_t size) : array_(size), mask_(size - 1), shift_(64 - std::countr_zero(size)) {}

    size_t size() const { return array_.size(); }
    size_t mask() const { return mask_; }
    size_t home(uint64_t h) const { return h >> shift_; }
    size_t next(size_t i) const { return (i + 1) & mask_; }
    KeyEntry& operator[](size_t i) const { return array_.data()[i]; }
    bool has(const KeyEntry& e) const { return array_.data() <= &e && &e < array_.data() + size(); }

    const KeyEntry* find(uint64_t h, uint32_t space, const Key& key) const {
      for (size_t i = home(h);; i = next(i)) {
        const KeyEntry& e = (*this)[i];
        if (!e.taken()) return nullptr;
        if (e.space() == space && e.key == key) return &e;
      }
    }
    size_t empty_from(size_t i) const {
      while ((*this)[i].taken()) i = next(i);
      return i;
    }
    void drop(size_t hole) const {
      (*this)[hole].after_space = 0;
      for (size_t i = next(hole); (*this)[i].taken(); i = next(i)) {
        size_t want = home(hash((*this)[i].space(), (*this)[i].key));
        // Move back unless its home lies cyclically in (hole, i].
        bool stays = hole <= i ? (hole < want && want <= i) : (hole < want || want <= i);
        if (stays) continue;
        (*this)[hole] = (*this)[i];
        (*this)[i].after_space = 0;
        hole = i;
      }
    }

   private:
    ZeroedArray<KeyEntry> array_;
    size_t mask_ = 0;  // the number of cells is a power of two
    int shift_ = 0;
  };

  static uint64_t hash(uint32_t space, const Key& key) { return seeded_hash(key.bytes, space); }

  bool is_growing() const { return before_.size() != 0; }
  size_t rank(size_t cell) const { return (cell - start_) & before_.mask(); }
  bool is_before(uint64_t h) const { return is_growing() && rank(before_.home(h)) >= moved_; }
  const Cells& array_of(uint64_t h) const { return is_before(h) ? before_ : cells_; }

  KeyEntry& place(uint64_t h, const KeyEntry& e) {
    if (is_before(h)) {
      size_t home = before_.home(h), at = before_.empty_from(home);
      if (rank(at) >= rank(home) || rank(at) < moved_) return before_[at] = e;
      move(before_.size());  // what goes around the end has filled all that was empty
    }
    return cells_[cells_.empty_from(cells_.home(h))] = e;
  }

  void drop_if_unused(const KeyEntry& e) {
    if (!e.unused()) return;
    const Cells& cells = before_.has(e) ? before_ : cells_;
    cells.drop(static_cast<size_t>(&e - &cells[0]));
    --size_;
  }

  void grow() {
    if (is_growing()) move(before_.size());
    before_ = std::exchange(cells_, Cells(cells_.size() * 2));
    start_ = before_.empty_from(0);
    moved_ = 0;
    move(kMovedAtFirst);
  }

  // At least so many cells, to the end of a run of taken ones.
  void move(size_t count) {
    size_t until = moved_ + std::min(count, before_.size() - moved_);
    for (; moved_ < before_.size(); ++moved_) {
      KeyEntry& e = before_[(start_ + moved_) & before_.mask()];
      if (!e.taken() && moved_ >= until) return;
      if (e.taken()) move(e);
    }
    for (size_t i = start_; before_[i].taken(); i = before_.next(i)) move(before_[i]);
    before_ = Cells();
    advise_huge(&cells_[0], &cells_[cells_.size()]);
  }
  void move(KeyEntry& e) {
    cells_[cells_.empty_from(cells_.home(hash(e.space(), e.key)))] = e;
    e.after_space = 0;
  }

  // It grows again after as many inserts as 7 of 10 of these cells: they have been emptied long before.
  static constexpr size_t kMovedByInsert = 2, kMovedAtFirst = 256;

  Cells cells_, before_;
  size_t start_ = 0, moved_ = 0;
  size_t size_ = 0;
};

}  // namespace kvdock
