#include "table/slots.h"
#include "base/pause.h"

#include <algorithm>

namespace kvdock {

namespace {
// Slabs aim at 16 MiB, or 1/64 of a smaller segment: small enough to be emptied for another size.
constexpr uint64_t kSlabTarget = 16ull << 20;
}  // namespace

void SlotAllocator::add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
  Segment& s = segments_[segment];
  s.data_bytes = data_bytes;
  s.free[data_offset] = data_bytes;
  total_bytes_ += data_bytes;
}

std::optional<uint32_t> SlotAllocator::open_slab(uint64_t slot_bytes, uint32_t below) {
  Segment* home = nullptr;
  uint32_t home_id = 0;
  uint64_t offset = 0, room = 0;
  for (auto& [id, s] : segments_) {
    if (id >= below) break;
    if (s.retired) continue;
    uint64_t target = std::max(slot_bytes, std::min(kSlabTarget, s.data_bytes / 64) / slot_bytes * slot_bytes);
    for (auto& [at, bytes] : s.free) {
      if (bytes >= target) {
        home = &s, home_id = id, offset = at, room = target;
        break;
      }
      if (bytes >= slot_bytes && bytes > room) home = &s, home_id = id, offset = at, room = bytes;
    }
    if (home == &s && room >= target) break;
  }
  if (!home) return std::nullopt;
  uint32_t slab;
  if (!spare_slabs_.empty()) {
    slab = spare_slabs_.back();
    spare_slabs_.pop_back();
  } else if (next_slab_ < max_slabs_) {
    slab = next_slab_++;
    live_.resize(next_slab_);
  } else {
    return std::nullopt;
  }
  uint32_t count = static_cast<uint32_t>(room / slot_bytes);
  uint64_t extent = home->free[offset];
  home->free.erase(offset);
  if (extent > count * slot_bytes) home->free[offset + count * slot_bytes] = extent - count * slot_bytes;
  home->slabs[offset] = slab;
  Slab& body = slabs_[slab];
  body.segment = home_id;
  body.count = count;
  body.offset = offset;
  body.slot_bytes = slot_bytes;
  KVDOCK_PAUSE("reserve.slab_written");
  publish(body.word, slab_word(body));
  KVDOCK_PAUSE("reserve.slab_open");
  Live& live = live_[slab];
  live.owner.assign(count, kNone);
  live.free.resize(count);
  for (uint32_t i = 0; i < count; ++i) live.free[i] = count - 1 - i;
  with_room_[slot_bytes].insert(slab);
  ++slabs_of_size_[slot_bytes];
  return slab;
}

std::optional<Slot> SlotAllocator::take(uint64_t bytes, uint32_t record, uint32_t below) {
  uint64_t slot_bytes = round_slot(bytes);
  auto room = with_room_.find(slot_bytes);
  std::optional<uint32_t> found;
  if (room != with_room_.end()) {
    auto in_reach = [&](uint32_t s) { return slabs_[s].segment < below; };
    auto first = std::find_if(room->second.begin(), room->second.end(), in_reach);
    if (first != room->second.end()) found = *first;
  }
  if (!found) found = open_slab(slot_bytes, below);
  if (!found) return std::nullopt;
  uint32_t slab = *found;
  Live& live = live_[slab];
  uint32_t i = live.free.back();
  live.free.pop_back();
  live.owner[i] = record;
  if (live.free.empty()) with_room_[slot_bytes].erase(slab);
  used_bytes_ += slot_bytes;
  const Slab& body = slabs_[slab];
  return Slot{slab, static_cast<uint16_t>(body.segment), body.offset + i * slot_bytes};
}

void SlotAllocator::give(uint32_t slab, uint64_t offset) {
  const Slab& body = slabs_[slab];
  Live& live = live_.at(slab);
  uint32_t i = static_cast<uint32_t>((offset - body.offset) / body.slot_bytes);
  live.owner[i] = kNone;
  live.free.push_back(i);
  if (!segments_[body.segment].retired) with_room_[body.slot_bytes].insert(slab);
  used_bytes_ -= body.slot_bytes;
  if (live.free.size() == body.count) close_slab(slab);
}

void SlotAllocator::close_slab(uint32_t slab) {
  Slab& body = slabs_[slab];
  publish(body.word, 0);
  KVDOCK_PAUSE("evict.slab_closed");
  with_room_[body.slot_bytes].erase(slab);
  if (--slabs_of_size_[body.slot_bytes] == 0) {
    slabs_of_size_.erase(body.slot_bytes);
    with_room_.erase(body.slot_bytes);
  }
  live_[slab] = Live{};
  Segment& s = segments_[body.segment];
  s.slabs.erase(body.offset);
  free_extent(s, body.offset, body.count * body.slot_bytes);
  spare_slabs_.push_back(slab);
}

void SlotAllocator::free_extent(Segment& s, uint64_t offset, uint64_t bytes) {
  auto next = s.free.lower_bound(offset);
  if (next != s.free.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = s.free.erase(next);
  }
  if (next != s.free.begin()) {
    auto prev = std::prev(next);
    if (prev->first + prev->second == offset) {
      prev->second += bytes;
      return;
    }
  }
  s.free[offset] = bytes;
}

bool SlotAllocator::has_other_sizes(uint64_t bytes) const {
  return slabs_of_size_.size() > slabs_of_size_.count(round_slot(bytes));
}

std::optional<SlotAllocator::Window> SlotAllocator::oldest_window(uint64_t bytes) const {
  std::optional<Window> best;
  for (auto& [id, s] : segments_)
    if (!s.retired) scan_segment(s, round_slot(bytes), best);
  return best;
}

// Walks over the segment's extents in address order. No window contains a slab with a pinned or kept record.
void SlotAllocator::scan_segment(const Segment& s, uint64_t bytes, std::optional<Window>& best) const {
  struct Extent {
    uint64_t bytes;
    uint32_t slab;  // kNone: free
  };
  std::map<uint64_t, Extent> extents;
  for (auto& [at, size] : s.free) extents[at] = {size, kNone};
  for (auto& [at, slab] : s.slabs) extents[at] = {slabs_[slab].count * slabs_[slab].slot_bytes, slab};
  for (auto first = extents.begin(); first != extents.end(); ++first) {
    uint64_t span = 0, newest = 0;
    auto last = first;
    bool blocked = false;
    for (; last != extents.end() && span < bytes; ++last) {
      const Extent& e = last->second;
      if (e.slab != kNone) {
        const Live& live = live_.at(e.slab);
        if ((blocked = live.pinned + live.kept > 0)) break;
        newest = std::max(newest, live.newest);
      }
      span += e.bytes;
    }
    if (blocked) {
      first = last;
      continue;
    }
    if (span < bytes || (best && best->newest <= newest)) continue;
    best = Window{newest, {}};
    for (auto it = first; it != last; ++it)
      if (it->second.slab != kNone)
        for (uint32_t r : live_.at(it->second.slab).owner)
          if (r != kNone) best->records.push_back(r);
  }
}

void SlotAllocator::retire_segment(uint32_t segment) {
  Segment& s = segments_.at(segment);
  s.retired = true;
  for (auto& [at, slab] : s.slabs) with_room_[slabs_[slab].slot_bytes].erase(slab);
}

void SlotAllocator::remove_segment(uint32_t segment) {
  total_bytes_ -= segments_.at(segment).data_bytes;
  segments_.erase(segment);
}

std::vector<uint32_t> SlotAllocator::records_in(uint32_t segment) const {
  std::vector<uint32_t> out;
  for (auto& [at, slab] : segments_.at(segment).slabs)
    for (uint32_t r : live_[slab].owner)
      if (r != kNone) out.push_back(r);
  return out;
}

uint64_t SlotAllocator::free_bytes() const {
  uint64_t free = total_bytes_ - used_bytes_;
  for (auto& [id, s] : segments_)
    if (s.retired) free -= s.data_bytes - used_in(id);
  return free;
}

uint64_t SlotAllocator::used_in(uint32_t segment) const {
  uint64_t used = 0;
  for (auto& [at, slab] : segments_.at(segment).slabs)
    used += (slabs_[slab].count - live_.at(slab).free.size()) * slabs_[slab].slot_bytes;
  return used;
}

void SlotAllocator::check() const {
  uint64_t used = 0;
  for (auto& [id, s] : segments_) {
    std::map<uint64_t, uint64_t> all(s.free);
    for (auto& [at, slab] : s.slabs) {
      const Slab& b = slabs_[slab];
      require(b.word == slab_word(b) && b.segment == id && b.offset == at, "a slab entry is not for its place", slab);
      require(all.emplace(at, b.count * b.slot_bytes).second, "a slab lies on a free extent", slab);
      const Live& live = live_.at(slab);
      uint64_t owned = static_cast<uint64_t>(
          std::count_if(live.owner.begin(), live.owner.end(), [](uint32_t r) { return r != kNone; }));
      require(owned > 0 && owned + live.free.size() == b.count, "a slab's owners and free slots do not add up", slab);
      used += owned * b.slot_bytes;
    }
    uint64_t covered = 0, end = all.empty() ? 0 : all.begin()->first;
    for (auto& [at, bytes] : all) {
      require(at == end, "a gap or overlap in a segment", id);
      end = at + bytes, covered += bytes;
    }
    require(covered == s.data_bytes, "extents do not cover their segment", id);
  }
  require(used == used_bytes_, "used bytes of slots do not add up");
}

}  // namespace kvdock
