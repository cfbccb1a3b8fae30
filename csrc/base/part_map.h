// Where the tier on disk has each part: 80 bytes a part, and 7 to 14 for finding it. The parts of a segment are linked,
// so a segment is listed or emptied without a look at others.
//
// A part's name takes 86 bytes (kvdock/tiers/disk/log.py, key_of). What the parts of a generation have in common is
// kept once. Thread safety: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/seeded_hash.h"

namespace kvdock {

class PartMap {
 public:
  static constexpr size_t kName = 86;
  static constexpr int kPageBits = 20;  // of a place: the segment's sequence, then the page in it

  // `used`: the number of the last use; 0: none. `is_copy`: it was given a second chance.
  struct Part {
    uint64_t place, checksum, used;
    uint32_t length;
    bool is_copy;
  };

  PartMap() { resize(kLeastSlots); }

  size_t size() const { return size_; }
  size_t bytes() const { return slabs_.size() * kSlab * sizeof(Item) + slots_.size() * (sizeof(uint32_t) + 1); }

  // Makes room for `parts` parts, so that put() need not move all slots while there are no more.
  void reserve(size_t parts) {
    size_t slots = slots_.size();
    while (parts * 4 > slots * 3) slots *= 2;
    if (slots != slots_.size()) resize(slots);
  }

  // In place of the part that has this name, if there is one.
  void put(const char* name, const Part& part) {
    drop(name);
    reserve(size_ + 1);
    const uint32_t id = take_item();
    Item& item = at(id);
    std::memcpy(item.key.data(), name + kKeyAt, sizeof item.key);
    item.space = space_of(name);
    item.tail = tail_of(name);
    item.place = part.place, item.checksum = part.checksum, item.used = part.used;
    item.length = part.length, item.is_copy = part.is_copy;
    Segment& segment = segments_[part.place >> kPageBits];
    item.next = segment.first, item.before = kNone;
    if (segment.first != kNone) at(segment.first).before = id;
    segment.first = id;
    ++segment.size;
    insert(hash_of(item), id);
    ++size_;
  }

  bool has(const char* name) const { return find(name) != kNowhere; }

  std::optional<Part> get(const char* name) const {
    const size_t slot = find(name);
    return slot == kNowhere ? std::nullopt : std::optional(part_of(at(slots_[slot])));
  }

  bool use(const char* name, uint64_t used) {
    const size_t slot = find(name);
    if (slot == kNowhere) return false;
    at(slots_[slot]).used = used;
    return true;
  }

  bool drop(const char* name) {
    const size_t slot = find(name);
    if (slot == kNowhere) return false;
    const uint32_t id = slots_[slot];
    Item& item = at(id);
    erase(slot);
    leave_segment(item);
    leave_space(item.space);
    item.next = free_;
    free_ = id;
    --size_;
    return true;
  }

  size_t size_of(uint64_t sequence) const {
    const auto found = segments_.find(sequence);
    return found == segments_.end() ? 0 : found->second.size;
  }

  // Calls `each` with the name of each part of the segment, and with the part.
  template <class Each>
  void for_each(uint64_t sequence, Each each) const {
    const auto found = segments_.find(sequence);
    if (found == segments_.end()) return;
    std::array<char, kName> name;
    for (uint32_t id = found->second.first; id != kNone; id = at(id).next) {
      const Item& item = at(id);
      write_name(item, name.data());
      each(name, part_of(item));
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kNowhere = SIZE_MAX, kLeastSlots = 1 << 10, kSlab = 1 << 10;
  static constexpr size_t kNamespace = 32, kKeyAt = 32, kTailAt = 64, kBirthAt = 70, kBirth = 16;

  using Common = std::array<char, kNamespace + kBirth>;  // namespace, birth and generation
  using Tail = std::array<char, kBirthAt - kTailAt>;     // group, writer and deletion

  struct Item {
    std::array<uint8_t, 32> key;
    uint64_t place, checksum, used;
    uint32_t length, space;
    uint32_t next, before;  // in its segment; of one that is free, the next free one
    Tail tail;
    bool is_copy;
  };
  static_assert(sizeof(Item) == 80);

  struct Segment {
    uint32_t first = kNone;
    uint32_t size = 0;
  };

  struct Space {
    Common common;
    size_t parts = 0;
  };

  static Part part_of(const Item& item) { return {item.place, item.checksum, item.used, item.length, item.is_copy}; }

  Item& at(uint32_t id) { return slabs_[id / kSlab][id % kSlab]; }
  const Item& at(uint32_t id) const { return slabs_[id / kSlab][id % kSlab]; }

  uint32_t take_item() {
    if (free_ == kNone) {
      const uint32_t first = uint32_t(slabs_.size() * kSlab);
      slabs_.push_back(std::make_unique<Item[]>(kSlab));
      for (uint32_t i = kSlab; i-- > 0; free_ = first + i) at(first + i).next = free_;
    }
    const uint32_t id = free_;
    free_ = at(id).next;
    return id;
  }

  void leave_segment(const Item& item) {
    const auto found = segments_.find(item.place >> kPageBits);
    if (item.before != kNone)
      at(item.before).next = item.next;
    else
      found->second.first = item.next;
    if (item.next != kNone) at(item.next).before = item.before;
    if (--found->second.size == 0) segments_.erase(found);
  }

  // ------------------------------------------------------------------ names

  static Common common_of(const char* name) {
    Common common;
    std::memcpy(common.data(), name, kNamespace);
    std::memcpy(common.data() + kNamespace, name + kBirthAt, kBirth);
    return common;
  }

  static Tail tail_of(const char* name) {
    Tail tail;
    std::memcpy(tail.data(), name + kTailAt, tail.size());
    return tail;
  }

  void write_name(const Item& item, char* name) const {
    const Common& common = spaces_[item.space].common;
    std::memcpy(name, common.data(), kNamespace);
    std::memcpy(name + kKeyAt, item.key.data(), item.key.size());
    std::memcpy(name + kTailAt, item.tail.data(), item.tail.size());
    std::memcpy(name + kBirthAt, common.data() + kNamespace, kBirth);
  }

  uint32_t space_of(const char* name) {
    const auto [found, is_new] = space_ids_.try_emplace(common_of(name), uint32_t(spaces_.size()));
    if (is_new && !free_spaces_.empty()) {
      found->second = free_spaces_.back();
      free_spaces_.pop_back();
    }
    if (found->second == spaces_.size()) spaces_.emplace_back();
    Space& space = spaces_[found->second];
    space.common = found->first;
    ++space.parts;
    return found->second;
  }

  void leave_space(uint32_t id) {
    if (--spaces_[id].parts) return;
    space_ids_.erase(spaces_[id].common);
    free_spaces_.push_back(id);
  }

  static uint64_t hash(const Common& common, const uint8_t* key, const Tail& tail) {
    std::array<uint64_t, 3> word{};
    std::memcpy(&word[0], common.data(), sizeof word[0]);
    std::memcpy(&word[1], common.data() + kNamespace, sizeof word[1]);
    std::memcpy(&word[2], tail.data(), tail.size());
    return seeded_hash(key, multiplied(word[0] ^ kHashSeed[0], word[1] ^ kHashSeed[1]) ^ word[2]);
  }
  uint64_t hash_of(const Item& item) const { return hash(spaces_[item.space].common, item.key.data(), item.tail); }

  // ------------------------------------------------------------------ slots: linear probing

  static uint8_t mark_of(uint64_t hash) { return uint8_t(hash >> 56); }
  size_t next(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

  size_t find(const char* name) const {
    const Common common = common_of(name);
    const Tail tail = tail_of(name);
    const uint64_t wanted = hash(common, reinterpret_cast<const uint8_t*>(name) + kKeyAt, tail);
    for (size_t slot = wanted & (slots_.size() - 1); slots_[slot] != kNone; slot = next(slot)) {
      if (marks_[slot] != mark_of(wanted)) continue;
      const Item& item = at(slots_[slot]);
      if (std::memcmp(item.key.data(), name + kKeyAt, item.key.size()) == 0 && item.tail == tail &&
          spaces_[item.space].common == common)
        return slot;
    }
    return kNowhere;
  }

  void insert(uint64_t hash, uint32_t id) {
    size_t slot = hash & (slots_.size() - 1);
    while (slots_[slot] != kNone) slot = next(slot);
    slots_[slot] = id;
    marks_[slot] = mark_of(hash);
  }

  // Moves those behind it forward, so that none is behind a free slot (Knuth, volume 3, algorithm 6.4 R).
  void erase(size_t hole) {
    const size_t mask = slots_.size() - 1;
    for (size_t slot = next(hole); slots_[slot] != kNone; slot = next(slot)) {
      const size_t home = hash_of(at(slots_[slot])) & mask;
      if (((slot - home) & mask) < ((slot - hole) & mask)) continue;
      slots_[hole] = slots_[slot], marks_[hole] = marks_[slot];
      hole = slot;
    }
    slots_[hole] = kNone;
  }

  void resize(size_t slots) {
    const std::vector<uint32_t> old = std::move(slots_);
    slots_.assign(slots, kNone);
    marks_.assign(slots, 0);
    for (uint32_t id : old)
      if (id != kNone) insert(hash_of(at(id)), id);
  }

  std::vector<std::unique_ptr<Item[]>> slabs_;
  uint32_t free_ = kNone;
  size_t size_ = 0;
  std::vector<uint32_t> slots_;
  std::vector<uint8_t> marks_;
  std::unordered_map<uint64_t, Segment, SeededHash> segments_;
  std::vector<Space> spaces_;
  std::map<Common, uint32_t> space_ids_;
  std::vector<uint32_t> free_spaces_;
};

}  // namespace kvdock
