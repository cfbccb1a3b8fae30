// Where the tier on disk has each part: 80 bytes a part, 7 to 14 for finding it, and 5 to 11 for one that was evicted.
// The parts of a segment are linked, so a segment is listed without a look at others. The map counts the uses of parts,
// and learns from them which parts to evict (part_worth.h).
//
// A part's name takes 86 bytes (kvdock/tiers/disk/log.py, key_of). What the parts of a generation have in common is
// kept once. Thread safety: none.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/evicted_parts.h"
#include "base/part_worth.h"
#include "base/seeded_hash.h"

namespace kvdock {

class PartMap {
 public:
  static constexpr size_t kName = 86;
  static constexpr int kPageBits = 20;  // of a place: the segment's sequence, then the page in it

  static constexpr uint64_t kFirstMoment = uint64_t{1} << 48;  // what a former map has kept is lower

  // `used`: the moment of the last use, or, if there was none, of the store. `uses`: how many there were; more than
  // PartWorth::kMostUses are not counted.
  struct Part {
    uint64_t place, checksum, used;
    uint32_t length;
    uint8_t uses;
  };

  PartMap() { resize(kLeastSlots); }

  size_t size() const { return size_; }
  size_t bytes() const {
    return slabs_.size() * kSlab * sizeof(Item) + slots_.size() * (sizeof(uint32_t) + 1) + evicted_.bytes();
  }

  // Makes room for `parts` parts, so that put() need not move all slots while there are no more.
  void reserve(size_t parts) {
    size_t slots = slots_.size();
    while (parts * 4 > slots * 3) slots *= 2;
    if (slots != slots_.size()) resize(slots);
  }

  // A part that is stored now, in place of one that has this name.
  void put(const char* name, uint64_t place, uint32_t length, uint64_t checksum) {
    ++now_;
    unsigned uses = 0;
    if (const auto before = evicted_.take(hash_of(name), now_)) {
      worth_.used(before->uses, before->age);
      uses = std::min(before->uses + 1, PartWorth::kMostUses);
    }
    put(name, {place, checksum, now_, length, uint8_t(uses)});
  }

  // As above, a part with uses from before. Moments that a former release has kept, which are low, and any from the
  // future count as the latest before this map.
  void put(const char* name, Part part) {
    if (part.used < kFirstMoment / 2 || part.used > now_) part.used = kFirstMoment - 1;
    drop(name);
    reserve(size_ + 1);
    const uint32_t id = take_item();
    Item& item = at(id);
    std::memcpy(item.key.data(), name + kKeyAt, sizeof item.key);
    item.space = space_of(name);
    item.tail = tail_of(name);
    item.place = part.place, item.checksum = part.checksum, item.used = part.used;
    item.length = part.length, item.uses = std::min(part.uses, uint8_t{PartWorth::kMostUses});
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

  // It was asked for. Uses that follow one another closely count as one. False: there is none.
  bool use(const char* name) {
    ++now_;
    if (now_ >= learns_at_) learn();
    const size_t slot = find(name);
    if (slot == kNowhere) return false;
    Item& item = at(slots_[slot]);
    const uint64_t age = now_ - item.used;
    if (item.uses > 0 && age <= size_ / kCloseShare) return true;
    worth_.used(item.uses, age);
    item.uses = uint8_t(std::min(item.uses + 1u, PartWorth::kMostUses));
    item.used = now_;
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
    item.uses = kFree;
    free_ = id;
    --size_;
    return true;
  }

  // As drop(), for want of space.
  bool evict(const char* name) {
    const size_t slot = find(name);
    if (slot == kNowhere) return false;
    const Item& item = at(slots_[slot]);
    evicted_.remember(hash_of(item), item.uses, item.used);
    return drop(name);
  }

  // What goes in a segment's turn, and the gaps that are there afterwards, as (begin, end) in bytes. `age`: of the
  // youngest part that goes; above 1 it should go anyway.
  struct Turn {
    std::vector<std::pair<std::array<char, kName>, Part>> gone;
    std::vector<std::pair<uint64_t, uint64_t>> gaps;
    double age = std::numeric_limits<double>::infinity();
  };

  // All parts go that are so old that the share `kept` of all is younger, and as many more that the rest weighs at most
  // `left`. A part weighs what it takes in a segment, but at least `least`. `size`: the bytes of the segment.
  Turn turn(uint64_t sequence, uint64_t size, double kept, uint64_t left, uint64_t least) {
    set_bar(kept, least);
    std::vector<std::pair<double, uint32_t>> by_age;
    Turn turn;
    uint64_t weight = 0;
    if (const auto found = segments_.find(sequence); found != segments_.end())
      for (uint32_t id = found->second.first; id != kNone; id = at(id).next) {
        by_age.emplace_back(age_of(at(id)), id);
        weight += std::max(least, bytes_of(at(id)));
      }
    std::sort(by_age.rbegin(), by_age.rend());
    auto stays = by_age.begin();
    for (; stays != by_age.end() && (stays->first > worth_.bar() || weight > left); ++stays) {
      const Item& item = at(stays->second);
      turn.age = stays->first / worth_.bar();
      weight -= std::max(least, bytes_of(item));
      write_name(item, turn.gone.emplace_back().first.data());
      turn.gone.back().second = part_of(item);
    }
    std::vector<std::pair<uint64_t, uint64_t>> places;
    for (; stays != by_age.end(); ++stays) {
      const Item& item = at(stays->second);
      const uint64_t begin = (item.place & ((uint64_t{1} << kPageBits) - 1)) * kPage;
      places.emplace_back(begin, begin + bytes_of(item));
    }
    std::sort(places.begin(), places.end());
    uint64_t end = kPage;
    for (const auto& place : places) {
      if (end < place.first) turn.gaps.emplace_back(end, place.first);
      end = place.second;
    }
    if (end < size) turn.gaps.emplace_back(end, size);
    return turn;
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
  static constexpr size_t kLooks = 1 << 10;    // of a sample
  static constexpr uint64_t kCloseShare = 64;  // of all: uses are close if fewer were asked for between them
  static constexpr uint64_t kLearnShare = 16, kLeastLearn = 64;
  static constexpr uint64_t kPage = 4096;
  static constexpr uint8_t kFree = UINT8_MAX;
  static constexpr size_t kNamespace = 32, kKeyAt = 32, kTailAt = 64, kBirthAt = 70, kBirth = 16;

  using Common = std::array<char, kNamespace + kBirth>;  // namespace, birth and generation
  using Tail = std::array<char, kBirthAt - kTailAt>;     // group, writer and deletion

  struct Item {
    std::array<uint8_t, 32> key;
    uint64_t place, checksum, used;
    uint32_t length, space;
    uint32_t next, before;  // in its segment; of one that is free, the next free one
    Tail tail;
    uint8_t uses;  // kFree: there is no part here
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

  static Part part_of(const Item& item) { return {item.place, item.checksum, item.used, item.length, item.uses}; }

  Item& at(uint32_t id) { return slabs_[id / kSlab][id % kSlab]; }
  const Item& at(uint32_t id) const { return slabs_[id / kSlab][id % kSlab]; }

  uint32_t take_item() {
    if (free_ == kNone) {
      const uint32_t first = uint32_t(slabs_.size() * kSlab);
      slabs_.push_back(std::make_unique<Item[]>(kSlab));
      for (uint32_t i = kSlab; i-- > 0; free_ = first + i) at(first + i).next = free_, at(first + i).uses = kFree;
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

  // ------------------------------------------------------------------ what to evict

  double age_of(const Item& item) const { return worth_.age_of(item.uses, now_ - item.used); }

  // In a segment, with the page that describes the part.
  static uint64_t bytes_of(const Item& item) { return (uint64_t{item.length} + kPage - 1) / kPage * kPage + kPage; }

  // Calls `each` with some parts, drawn at random. Returns for how many each of them stands.
  template <class Each>
  double sample(Each each) {
    size_t seen = 0;
    for (size_t draws = size_ ? 4 * kLooks : 0; draws > 0 && seen < kLooks; --draws) {
      const Item& item = at(uint32_t(draw() % (slabs_.size() * kSlab)));
      if (item.uses != kFree) each(item), ++seen;
    }
    return seen ? double(size_) / double(seen) : 0;
  }

  void set_bar(double kept, uint64_t least) {
    std::vector<std::pair<double, uint64_t>> weights;
    double left = 0;
    sample([&](const Item& item) {
      weights.emplace_back(age_of(item), std::max(least, bytes_of(item)));
      left += kept * double(weights.back().second);
    });
    std::sort(weights.begin(), weights.end());
    worth_.set_bar(std::numeric_limits<double>::infinity());
    for (const auto& [age, weight] : weights)
      if ((left -= double(weight)) < 0) return worth_.set_bar(age);
  }

  void learn() {
    const double time = double(now_ - learned_);
    if (size_) {
      std::vector<std::pair<unsigned, uint64_t>> seen;
      const double parts = sample([&](const Item& item) { seen.emplace_back(item.uses, now_ - item.used); });
      for (const auto& [uses, age] : seen) worth_.passed(uses, age, parts, time);
      for (size_t look = 0; look < kLooks; ++look)
        if (const auto part = evicted_.at(draw() % evicted_.room(), now_))
          worth_.passed(part->uses, part->age, double(evicted_.room()) / kLooks, time);
      worth_.learn();
    }
    learned_ = now_;
    learns_at_ = now_ + std::max<uint64_t>(kLeastLearn, size_ / kLearnShare);
  }

  uint64_t draw() {  // Marsaglia's xorshift
    drawn_ ^= drawn_ << 13, drawn_ ^= drawn_ >> 7, drawn_ ^= drawn_ << 17;
    return drawn_;
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
  static uint64_t hash_of(const char* name) {
    return hash(common_of(name), reinterpret_cast<const uint8_t*>(name) + kKeyAt, tail_of(name));
  }
  uint64_t hash_of(const Item& item) const { return hash(spaces_[item.space].common, item.key.data(), item.tail); }

  // ------------------------------------------------------------------ slots: linear probing

  static uint8_t mark_of(uint64_t hash) { return uint8_t(hash >> 56); }
  size_t next(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

  size_t find(const char* name) const {
    const Common common = common_of(name);
    const Tail tail = tail_of(name);
    const uint64_t wanted = hash_of(name);
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
    evicted_.resize(slots / 2);
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
  EvictedParts evicted_;
  PartWorth worth_;
  uint64_t now_ = kFirstMoment, learned_ = kFirstMoment, learns_at_ = kFirstMoment + kLeastLearn;
  uint64_t drawn_ = 88172645463325252;
};

}  // namespace kvdock
