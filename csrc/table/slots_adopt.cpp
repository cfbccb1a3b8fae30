// The slot allocator rebuilt from the slab entries and from the records that name slots.
#include "table/slots.h"

namespace kvdock {

bool SlotAllocator::adopt_slab(uint32_t slab) {
  const Slab& body = slabs_[slab];
  auto home = segments_.find(body.segment);
  if (body.word != slab_word(body) || home == segments_.end()) return false;
  Segment& s = home->second;
  if (body.count == 0 || body.slot_bytes == 0 || body.slot_bytes % kSlotAlign || body.offset % kSlotAlign) return false;
  if (body.slot_bytes > s.data_bytes / body.count) return false;
  auto extent = s.free.upper_bound(body.offset);
  if (extent == s.free.begin()) return false;
  --extent;
  uint64_t begin = extent->first, extent_end = begin + extent->second;
  uint64_t end = body.offset + body.count * body.slot_bytes;
  if (end > extent_end) return false;
  remove_extent(s, extent);
  if (begin < body.offset) add_extent(s, begin, body.offset - begin);
  if (end < extent_end) add_extent(s, end, extent_end - end);
  s.slabs[body.offset] = slab;
  if (slab >= next_slab_) live_.resize(next_slab_ = slab + 1);
  live_[slab].owner.assign(body.count, kNone);
  return true;
}

uint32_t* SlotAllocator::owner_of(const StoredPart& part) {
  if (part.slab >= live_.size() || live_[part.slab].owner.empty()) return nullptr;
  const Slab& body = slabs_[part.slab];
  if (part.segment != body.segment || part.offset < body.offset || round_slot(part.length) != body.slot_bytes)
    return nullptr;
  uint64_t from = part.offset - body.offset;
  if (from % body.slot_bytes || from / body.slot_bytes >= body.count) return nullptr;
  return &live_[part.slab].owner[from / body.slot_bytes];
}

void SlotAllocator::adopted() {
  for (uint32_t slab = 0; slab < next_slab_; ++slab) {
    Live& live = live_[slab];
    if (live.owner.empty()) {
      spare_slabs_.push_back(slab);
      continue;
    }
    const Slab& body = slabs_[slab];
    for (uint32_t i = body.count; i-- > 0;)
      if (live.owner[i] == kNone) live.free.push_back(i);
    used_bytes_ += (body.count - live.free.size()) * body.slot_bytes;
    ++slabs_of_size_[body.slot_bytes];
    free_slots_[body.slot_bytes] += live.free.size();
    if (live.free.size() == body.count) {
      close_slab(slab);
      continue;
    }
    if (!live.free.empty()) with_room_[body.slot_bytes].insert(slab);
    list(slab);
  }
}

}  // namespace kvdock
