// Making room: which chunks go, and in what order (section 8).
#include <algorithm>

#include "table/body_crc.h"

namespace kvdock {

std::optional<Candidate> Table::oldest(uint32_t shape) {
  return policy_->choose(shape, [this](const Candidate& c) -> std::optional<uint64_t> {
    Record& r = record(c.record);
    if (r.generation() != c.generation || !evictable(r, c.record)) return std::nullopt;
    return r.last_used;
  });
}

// Frees something on the way to a slot of `bytes`; false when nothing may go.
bool Table::make_room(uint64_t bytes) {
  std::optional<Candidate> own;
  for (uint32_t shape : policy_->shapes()) {
    if (!std::binary_search(shapes_[shape].begin(), shapes_[shape].end(), round_slot(bytes))) continue;
    if (auto c = oldest(shape); c && (!own || older(*c, *own))) own = c;
  }
  std::optional<SlotAllocator::Window> window;
  if (slots_.has_other_sizes(bytes)) window = slots_.oldest_window(bytes);
  if (own && (!window || own->last_used <= window->newest)) {
    quarantine(own->record);
    ++counters_.evicted_chunks;
    return true;
  }
  if (window && !window->records.empty()) {
    for (uint32_t id : window->records) {
      if (record(id).state() != RecordState::kReady) continue;  // went with an earlier one
      quarantine(id);
      ++counters_.evicted_chunks;
    }
    return true;
  }
  return evict_lying_chain(bytes);
}

// No leaf is left. Records above one that is pinned, kept or RESERVED wait for it; any other READY record without
// pins is part of a chain that names itself as ancestor, and the oldest of those with a slot of the size goes.
bool Table::evict_lying_chain(uint64_t bytes) {
  std::vector<bool> above(info_.size(), false);
  std::optional<uint32_t> victim;
  auto walk_up = [&](uint32_t space, Key key) {
    while (!key.is_root()) {
      KeyEntry* e = index_.find(space, key);
      uint32_t up = e ? (e->ready != kNone ? e->ready : e->reserved) : kNone;
      if (up == kNone || above[up]) return;
      if (e->reserved != kNone) above[e->reserved] = true;
      above[up] = true;
      key = record(up).parent;
    }
  };
  auto each = [&](auto&& f) {
    index_.for_each([&](const KeyEntry& e) {
      for (uint32_t id : {e.ready, e.reserved})
        if (id != kNone) f(id);
    });
  };
  each([&](uint32_t id) {
    if (info_[id].pins || info_[id].kept) walk_up(record(id).space, record(id).parent);
  });
  walk_up(storing_.first, storing_.second);
  each([&](uint32_t id) {
    const std::vector<uint64_t>& sizes = shapes_[space_shape_[record(id).space]];
    bool helps = std::binary_search(sizes.begin(), sizes.end(), round_slot(bytes));
    if (record(id).state() == RecordState::kReady && !info_[id].pins && !info_[id].kept && !above[id] && helps &&
        (!victim || record(id).last_used < record(*victim).last_used))
      victim = id;
  });
  if (!victim) return false;
  quarantine(*victim);
  ++counters_.evicted_chunks;
  return true;
}

uint64_t Table::segment_used_bytes(uint32_t segment) {
  std::lock_guard lock(mutex_);
  return slots_.used_bytes(segment);
}

uint64_t Table::free_bytes() {
  std::lock_guard lock(mutex_);
  return slots_.free_bytes();
}

uint32_t Table::evict(uint64_t target, uint32_t max_chunks) {
  std::lock_guard lock(mutex_);
  uint32_t gone = 0;
  while (gone < max_chunks && slots_.free_bytes() < target) {
    std::optional<Candidate> best;
    for (uint32_t shape : policy_->shapes())
      if (auto c = oldest(shape); c && (!best || older(*c, *best))) best = c;
    if (!best) break;
    quarantine(best->record);
    ++counters_.evicted_chunks;
    ++gone;
  }
  return gone;
}

}  // namespace kvdock
