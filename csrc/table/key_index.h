// Which record a key names, and how many records name it as their parent: an open-addressing hash table.
//
// Ownership: derived from the records; rebuilt, never stored.
// Invariants: an entry exists while its key has a READY record, a RESERVED record or children; at most one record
//   of each state (I5); probing is linear and deletion shifts back, so no tombstones accumulate.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/huge_alloc.h"
#include "table/layout.h"

namespace kvdock {

struct KeyEntry {
  Key key{};
  uint32_t space = kNone;  // kNone: an empty cell
  uint32_t ready = kNone;
  uint32_t reserved = kNone;
  uint32_t children = 0;  // RESERVED and READY records that name this key as parent

  uint32_t any() const { return ready != kNone ? ready : reserved; }
  bool unused() const { return ready == kNone && reserved == kNone && children == 0; }
};

class KeyIndex {
 public:
  KeyIndex() : cells_(1024), mask_(cells_.size() - 1) {}

  KeyEntry* find(uint32_t space, const Key& key) {
    return const_cast<KeyEntry*>(std::as_const(*this).find(space, key));
  }
  const KeyEntry* find(uint32_t space, const Key& key) const {
    for (size_t i = home(space, key);; i = next(i)) {
      if (empty(i)) return nullptr;
      if (cell(i).space == space && cell(i).key == key) return &cell(i);
    }
  }

  void prefetch(uint32_t space, const Key& key) const {
    size_t i = home(space, key);
    __builtin_prefetch(&cell(i));
    __builtin_prefetch(reinterpret_cast<const char*>(&cell(i) + 1) - 1);
  }

  // References are good until the next insert or drop.
  KeyEntry& insert(uint32_t space, const Key& key) {
    if (KeyEntry* e = find(space, key)) return *e;
    if ((size_ + 1) * 10 > cells_.size() * 7) grow();
    ++size_;
    return place(KeyEntry{key, space});
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
    for (size_t i = 0; i < cells_.size(); ++i)
      if (!empty(i)) f(cell(i));
  }

 private:
  void drop_if_unused(KeyEntry& e) {
    if (!e.unused()) return;
    size_t hole = static_cast<size_t>(&e - cells_.data());
    cell(hole).space = kNone;
    --size_;
    for (size_t i = next(hole); !empty(i); i = next(i)) {
      size_t want = home(cell(i).space, cell(i).key);
      // Move back unless its home lies cyclically in (hole, i].
      bool stays = hole <= i ? (hole < want && want <= i) : (hole < want || want <= i);
      if (stays) continue;
      cell(hole) = cell(i);
      cell(i).space = kNone;
      hole = i;
    }
  }

  size_t home(uint32_t space, const Key& key) const {
    uint64_t h;  // keys are digests: eight of their bytes are as good as a hash, mixed in case they are not
    std::memcpy(&h, key.bytes + 8, 8);
    return fold(h, space) >> 20 & mask_;
  }
  // `i` has been masked, so its bounds need no check: lookups spend most of their time here.
  const KeyEntry& cell(size_t i) const { return cells_.data()[i]; }
  KeyEntry& cell(size_t i) { return cells_.data()[i]; }
  bool empty(size_t i) const { return cell(i).space == kNone; }
  size_t next(size_t i) const { return (i + 1) & mask_; }

  KeyEntry& place(const KeyEntry& e) {
    size_t i = home(e.space, e.key);
    while (!empty(i)) i = next(i);
    return cell(i) = e;
  }

  void grow() {
    decltype(cells_) old(cells_.size() * 2);
    old.swap(cells_);
    mask_ = cells_.size() - 1;
    for (const KeyEntry& e : old)
      if (e.space != kNone) place(e);
  }

  std::vector<KeyEntry, HugeAllocator<KeyEntry>> cells_;
  size_t mask_;  // the number of cells is a power of two
  size_t size_ = 0;
};

}  // namespace kvdock
