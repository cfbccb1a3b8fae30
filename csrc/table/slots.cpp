#include "table/slots.h"
#include "base/pause.h"

#include <algorithm>

namespace kvdock {

namespace {
// Slabs aim at 16 MiB, or 1/64 of a smaller segment: small enough to be emptied for another size.
constexpr uint64_t kSlabTarget = 16ull << 20;
constexpr size_t kColdest = 16;  // slabs that are looked at for a window, if something else could be evicted
}  // namespace

void SlotAllocator::add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
  Segment& s = segments_[segment];
  s.data_bytes = data_bytes;
  add_extent(s, data_offset, data_bytes);
  total_bytes_ += data_bytes;
}

std::optional<uint32_t> SlotAllocator::open_slab(uint64_t slot_bytes, uint32_t below) {
  if (extents_.empty() || *extents_.rbegin() < slot_bytes) return std::nullopt;
  Segment* home = nullptr;
  uint32_t home_id = 0;
  uint64_t offset = 0, found = 0;
  for (auto& [id, s] : segments_) {
    if (id >= below) break;
    if (s.retired) continue;
    uint64_t target = std::max(slot_bytes, std::min(kSlabTarget, s.data_bytes / 64) / slot_bytes * slot_bytes);
    for (auto& [at, bytes] : s.free) {
      if (bytes >= target) {
        home = &s, home_id = id, offset = at, found = target;
        break;
      }
      if (bytes >= slot_bytes && bytes > found) home = &s, home_id = id, offset = at, found = bytes;
    }
    if (home == &s && found >= target) break;
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
  uint32_t count = static_cast<uint32_t>(found / slot_bytes);
  uint64_t extent = home->free[offset];
  remove_extent(*home, home->free.find(offset));
  if (extent > count * slot_bytes) add_extent(*home, offset + count * slot_bytes, extent - count * slot_bytes);
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
  with_free_[slot_bytes].insert(slab);
  ++slabs_of_size_[slot_bytes];
  free_slots_[slot_bytes] += count;
  list(slab);
  return slab;
}

std::optional<Slot> SlotAllocator::take(uint64_t bytes, uint32_t record, uint32_t below) {
  uint64_t slot_bytes = round_slot(bytes);
  auto slabs = with_free_.find(slot_bytes);
  std::optional<uint32_t> found;
  if (slabs != with_free_.end()) {
    auto in_reach = [&](uint32_t s) { return slabs_[s].segment < below; };
    auto first = std::find_if(slabs->second.begin(), slabs->second.end(), in_reach);
    if (first != slabs->second.end()) found = *first;
  }
  if (!found) found = open_slab(slot_bytes, below);
  if (!found) return std::nullopt;
  uint32_t slab = *found;
  Live& live = live_[slab];
  uint32_t i = live.free.back();
  live.free.pop_back();
  live.owner[i] = record;
  if (live.free.empty()) with_free_[slot_bytes].erase(slab);
  --free_slots_[slot_bytes];
  used_bytes_ += slot_bytes;
  const Slab& body = slabs_[slab];
  return Slot{slab, body.segment, body.offset + i * slot_bytes};
}

void SlotAllocator::give(uint32_t slab, uint64_t offset) {
  const Slab& body = slabs_[slab];
  Live& live = live_.at(slab);
  uint32_t i = static_cast<uint32_t>((offset - body.offset) / body.slot_bytes);
  live.owner[i] = kNone;
  live.free.push_back(i);
  if (!segments_[body.segment].retired) {
    with_free_[body.slot_bytes].insert(slab);
    ++free_slots_[body.slot_bytes];
  }
  used_bytes_ -= body.slot_bytes;
  if (live.free.size() == body.count) close_slab(slab);
}

void SlotAllocator::close_slab(uint32_t slab) {
  Slab& body = slabs_[slab];
  publish(body.word, 0);
  KVDOCK_PAUSE("evict.slab_closed");
  with_free_[body.slot_bytes].erase(slab);
  if (!segments_[body.segment].retired) free_slots_[body.slot_bytes] -= body.count;
  if (--slabs_of_size_[body.slot_bytes] == 0) {
    slabs_of_size_.erase(body.slot_bytes);
    with_free_.erase(body.slot_bytes);
    free_slots_.erase(body.slot_bytes);
  }
  live_[slab] = Live{};
  Segment& s = segments_[body.segment];
  s.slabs.erase(body.offset);
  free_extent(s, body.offset, body.count * body.slot_bytes);
  spare_slabs_.push_back(slab);
}

void SlotAllocator::add_extent(Segment& s, uint64_t offset, uint64_t bytes) {
  s.free[offset] = bytes;
  if (!s.retired) extents_.insert(bytes);
}

std::map<uint64_t, uint64_t>::iterator SlotAllocator::remove_extent(Segment& s,
                                                                     std::map<uint64_t, uint64_t>::iterator extent) {
  if (!s.retired) extents_.erase(extents_.find(extent->second));
  return s.free.erase(extent);
}

void SlotAllocator::free_extent(Segment& s, uint64_t offset, uint64_t bytes) {
  auto next = s.free.lower_bound(offset);
  if (next != s.free.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = remove_extent(s, next);
  }
  if (next != s.free.begin()) {
    auto prev = std::prev(next);
    if (prev->first + prev->second == offset) {
      offset = prev->first;
      bytes += prev->second;
      remove_extent(s, prev);
    }
  }
  add_extent(s, offset, bytes);
}

uint64_t SlotAllocator::available_for(uint64_t slot_bytes, uint64_t enough) const {
  auto slots = free_slots_.find(slot_bytes);
  uint64_t available = slots == free_slots_.end() ? 0 : slots->second * slot_bytes;
  for (auto at = extents_.lower_bound(slot_bytes); at != extents_.end() && available < enough; ++at)
    available += *at / slot_bytes * slot_bytes;
  return available;
}

bool SlotAllocator::has_other_sizes(uint64_t bytes) const {
  return slabs_of_size_.size() > slabs_of_size_.count(round_slot(bytes));
}

bool SlotAllocator::warmer(const Cold& a, const Cold& b) { return a.newest > b.newest; }

void SlotAllocator::list(uint32_t slab) {
  Live& live = live_[slab];
  if (live.listed != 0 || live.owner.empty() || blocked(slab)) return;
  live.listed = ++listings_;
  cold_.push_back({live.newest, live.listed, slab});
  std::push_heap(cold_.begin(), cold_.end(), warmer);
  if (cold_.size() < 1024 || cold_.size() < 4 * live_.size()) return;
  std::erase_if(cold_, [this](const Cold& c) { return live_[c.slab].listed != c.number; });
  std::make_heap(cold_.begin(), cold_.end(), warmer);
}

// Takes the entry of the least recently used slab off the heap, among slabs that are not blocked.
std::optional<SlotAllocator::Cold> SlotAllocator::coldest() {
  while (!cold_.empty()) {
    std::pop_heap(cold_.begin(), cold_.end(), warmer);
    Cold c = cold_.back();
    cold_.pop_back();
    Live& live = live_[c.slab];
    if (live.listed != c.number) continue;
    live.listed = 0;
    if (blocked(c.slab) || segments_.at(slabs_[c.slab].segment).retired) continue;
    if (live.newest == c.newest) return c;
    list(c.slab);
  }
  return std::nullopt;
}

std::optional<SlotAllocator::Window> SlotAllocator::oldest_window(uint64_t bytes, std::optional<uint64_t> older_than) {
  bytes = round_slot(bytes);
  std::optional<Window> best;
  std::vector<uint32_t> seen;
  while (!older_than || seen.size() < kColdest) {
    std::optional<Cold> c = coldest();
    if (!c) break;
    seen.push_back(c->slab);
    if ((older_than && c->newest >= *older_than) || (best && c->newest >= best->newest)) break;
    auto window = window_around(c->slab, bytes);
    if (window && (!best || window->newest < best->newest)) best = std::move(window);
  }
  for (uint32_t slab : seen) list(slab);
  return best;
}

// Extends the window to the side that was used less recently until the slot fits; nullopt when both neighbours are
// blocked.
std::optional<SlotAllocator::Window> SlotAllocator::window_around(uint32_t slab, uint64_t bytes) const {
  const Segment& s = segments_.at(slabs_[slab].segment);
  uint64_t begin = slabs_[slab].offset, end = begin + bytes_of(slab);
  Window window{live_[slab].newest, {}};
  auto add = [&](uint32_t one) {
    window.newest = std::max(window.newest, live_[one].newest);
    for (uint32_t r : live_[one].owner)
      if (r != kNone) window.records.push_back(r);
  };
  add(slab);
  while (end - begin < bytes) {
    if (auto free = s.free.find(end); free != s.free.end()) {
      end += free->second;
      continue;
    }
    if (auto free = s.free.lower_bound(begin); free != s.free.begin()) {
      if (--free; free->first + free->second == begin) {
        begin = free->first;
        continue;
      }
    }
    auto right = s.slabs.find(end), left = s.slabs.lower_bound(begin);
    bool to_right = right != s.slabs.end() && !blocked(right->second);
    bool to_left = left != s.slabs.begin() && !blocked(std::prev(left)->second);
    if (!to_right && !to_left) return std::nullopt;
    if (to_left) --left;
    if (to_left && to_right) to_right = live_[right->second].newest <= live_[left->second].newest;
    add(to_right ? right->second : left->second);
    (to_right ? end : begin) = to_right ? end + bytes_of(right->second) : left->first;
  }
  return window;
}

void SlotAllocator::retire_segment(uint32_t segment) {
  Segment& s = segments_.at(segment);
  s.retired = true;
  for (auto& [at, slab] : s.slabs) {
    with_free_[slabs_[slab].slot_bytes].erase(slab);
    free_slots_[slabs_[slab].slot_bytes] -= live_[slab].free.size();
  }
  for (auto& [at, bytes] : s.free) extents_.erase(extents_.find(bytes));
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

void SlotAllocator::check_derived() const {
  std::multiset<uint64_t> extents;
  std::map<uint64_t, uint64_t> free_slots;
  std::set<uint64_t> listed;
  for (const Cold& c : cold_) listed.insert(c.number);
  for (auto& [id, s] : segments_) {
    if (s.retired) continue;
    for (auto& [at, bytes] : s.free) extents.insert(bytes);
    for (auto& [at, slab] : s.slabs) {
      const Live& live = live_[slab];
      free_slots[slabs_[slab].slot_bytes] += live.free.size();
      require(blocked(slab) || listed.count(live.listed), "a slab that may be emptied is not listed", slab);
    }
  }
  require(extents == extents_, "the sizes of free extents are wrong");
  for (auto& [size, count] : free_slots_)
    require(free_slots[size] == count, "free slots of a size do not add up", size);
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
  check_derived();
}

// ---- adoption

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
    if (!live.free.empty()) with_free_[body.slot_bytes].insert(slab);
    list(slab);
  }
}

}  // namespace kvdock
