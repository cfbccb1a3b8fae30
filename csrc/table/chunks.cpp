#include "table/chunks.h"

#include <algorithm>
#include <bit>

#include "base/pause.h"

namespace kvdock {

Chunks::Chunks(const Region& region, uint64_t grace_ms)
    : header_(region.header),
      segments_(region.segments),
      spaces_(region, grace_ms),
      slots_(region.slabs, kMaxSlabs),
      records_(region, spaces_, slots_),
      pins_(records_, slots_),
      preferences_(header_, records_, slots_),
      eviction_(header_, spaces_, slots_, records_, preferences_) {}

void Chunks::set_now(uint64_t now_ms) {
  records_.set_now(now_ms);
  spaces_.set_now(now_ms);
}

void Chunks::check(const ImpliedPins& implied) const {
  slots_.check();
  records_.check();
  pins_.check(implied);
  preferences_.check();
  eviction_.check();
}

// ---- finding

const KeyEntry* Chunks::find(uint32_t space, const Key& key) {
  const KeyEntry* e = records_.find(space, key);
  if (!e) return e;
  auto cleared = [&](uint32_t id) { return id != kNone && records_.was_cleared(record(id)) ? id : kNone; };
  const uint32_t ready = cleared(e->ready), reserved = cleared(e->reserved);
  if (ready == kNone && reserved == kNone) return e;
  if (ready != kNone) take_out(ready, Gone::cleared);
  if (reserved != kNone) take_out(reserved, Gone::deleted);  // lookups never found it
  return records_.find(space, key);
}

Key Chunks::parent_of(uint32_t space, const Key& key) const {
  const KeyEntry* e = records_.find(space, key);
  return e != nullptr && e->ready != kNone ? record(e->ready).parent : Key{};
}

std::pair<std::vector<Ready>, int64_t> Chunks::ready(uint64_t start, uint32_t budget) const {
  std::vector<Ready> found;
  auto from = static_cast<uint32_t>(std::min<uint64_t>(start, records_.end()));
  for (uint32_t id = records_.next(from); id < records_.end(); id = records_.next(id + 1)) {
    if (budget-- == 0) return {std::move(found), id};
    const Record& r = record(id);
    if (r.state() == RecordState::kReady && !records_.was_cleared(r)) found.push_back({r.space, r.key, r.parent});
  }
  return {std::move(found), -1};
}

// ---- FREE → RESERVED → READY

Chunks::Reserved Chunks::reserve(const NewChunk& chunk) {
  eviction_.add_child(chunk.space, chunk.parent);  // first, so that eviction does not take the parent
  if (!eviction_.evict_for_quota(chunk)) {
    eviction_.drop_child(chunk.space, chunk.parent);
    return {kNone, Limit::quota};
  }
  uint32_t parts = spaces_[chunk.space].writers * static_cast<uint32_t>(std::popcount(chunk.groups));
  std::optional<uint32_t> id = take_id(chunk, parts);
  std::vector<StoredPart> taken;
  if (!id || !take_slots(chunk, *id, &taken)) {
    if (id) records_.give_id(*id);
    eviction_.drop_child(chunk.space, chunk.parent);
    return {kNone, chunk.may_evict() ? Limit::no_space : Limit::pinning};
  }
  KVDOCK_PAUSE("reserve.slots_taken");
  records_.write(chunk, *id, taken);
  return {*id, Limit::none};
}

bool Chunks::make_room(const NewChunk& chunk, uint32_t count, uint32_t max_chunks) {
  if (max_chunks == UINT32_MAX) return false;  // reserve() evicts what is needed
  eviction_.add_child(chunk.space, chunk.parent);
  const bool has_more = eviction_.make_room(chunk, count, max_chunks);
  eviction_.drop_child(chunk.space, chunk.parent);
  return has_more;
}

std::optional<uint32_t> Chunks::take_id(const NewChunk& chunk, uint32_t parts) {
  constexpr int kMostEvicted = 64;
  std::optional<uint32_t> id;
  for (int tries = 0; !(id = records_.take_id(parts)) && chunk.may_evict() && tries < kMostEvicted; ++tries)
    if (!eviction_.evict_for_id(chunk.space, parts)) break;
  return id;
}

// Takes a slot for each part. Returns false, and takes none, if one cannot be had.
bool Chunks::take_slots(const NewChunk& chunk, uint32_t id, std::vector<StoredPart>* out) {
  const Namespace& ns = spaces_[chunk.space];
  bool ok = true;
  for (uint32_t g = 0; g < ns.group_count && ok; ++g) {
    if (!(chunk.groups >> g & 1)) continue;
    uint64_t bytes = ns.groups[g].slot_bytes();
    for (uint32_t w = 0; w < ns.writers && ok; ++w) {
      std::optional<Slot> slot;
      while (!(slot = slots_.take(bytes, id, chunk.below)) && chunk.may_evict() &&
             eviction_.evict_for_slot(bytes, chunk)) {
      }
      ok = slot.has_value();
      if (!ok) break;
      slots_.pin(slot->slab);  // eviction for the next part must not empty it
      out->push_back({slot->slab, slot->segment, static_cast<uint32_t>(bytes), static_cast<uint8_t>(g),
                      static_cast<uint8_t>(w), 0, slot->offset, 0});
    }
  }
  for (const StoredPart& p : *out) slots_.unpin(p.slab);
  if (!ok)
    for (const StoredPart& p : *out) slots_.give(p.slab, p.offset);
  return ok;
}

Limit Chunks::make_raw(uint32_t id, uint32_t part, uint32_t session, uint32_t below) {
  const Record& r = record(id);
  const StoredPart old = r.parts[part];
  const uint64_t bytes = spaces_[r.space].groups[old.group].part_bytes;
  const NewChunk wanted{r.space, r.key, r.parent, r.groups, r.temporary != 0, header_.use_tick,
                        round_slot(bytes) - round_slot(old.length), below};
  if (!eviction_.evict_for_quota(wanted)) return Limit::quota;
  std::optional<Slot> slot;
  while (!(slot = slots_.take(bytes, id, below)))
    if (!wanted.may_evict() || !eviction_.evict_for_slot(bytes, wanted))
      return wanted.may_evict() ? Limit::no_space : Limit::pinning;
  KVDOCK_PAUSE("raw.slot_taken");
  pins_.drop(id, session);
  records_.move_part(id, part, {slot->slab, slot->segment, static_cast<uint32_t>(bytes), old.group, old.writer, 0,
                                slot->offset, 0});
  pins_.add(id, session);
  slots_.give(old.slab, old.offset);
  return Limit::none;
}

// Keeps and priorities above 0 belong to the key: they move from its old record to the new one.
void Chunks::publish_chunk(uint32_t id) {
  uint32_t old = records_.make_ready(id);
  eviction_.stored(id);
  ++counters_.stored_chunks;
  counters_.stored_bytes += records_.bytes_of(id);
  if (old == kNone) return;
  eviction_.unlist(old);
  preferences_.move(old, id);
  eviction_.retire(old);
}

// ---- preferences

void Chunks::keep(uint32_t id, uint64_t until_ms) {
  eviction_.unlist(id);
  preferences_.keep(id, until_ms);
  eviction_.offer(id);
}

Preferences::Retained Chunks::retain(uint32_t id, int8_t priority, uint64_t until_ms) {
  Preferences::Retained done = preferences_.bound(id, &priority, &until_ms);
  if (done == Preferences::Retained::yes) set_priority(id, priority, until_ms);
  return done;
}

void Chunks::set_priority(uint32_t id, int8_t priority, uint64_t until_ms) {
  eviction_.unlist(id);
  preferences_.set_priority(id, priority, until_ms);
  eviction_.offer(id);
}

void Chunks::end_preferences(uint64_t now, Work& work) {
  for (; !work.is_over(); work.spend(kEndPreference)) {
    if (auto kept = preferences_.keep_over(now)) keep(*kept, 0);
    else if (auto preferred = preferences_.priority_over(now)) set_priority(*preferred, 0, 0);
    else return;
  }
}

// ---- namespaces and clears

std::vector<SpaceInfo> Chunks::spaces() {
  std::vector<SpaceInfo> out;
  for (uint32_t space : spaces_.live()) out.push_back(space_info(space));
  return out;
}

SpaceInfo Chunks::space_info(uint32_t space) {
  spaces_.require(space);
  const Namespace& ns = spaces_[space];
  SpaceInfo info{space, ns.digest, ns.base, ns.tenant, records_.chunks_in(space), std::nullopt};
  if (spaces_.left().has(space)) info.left_ms = spaces_.left().left_at(space);
  return info;
}

void Chunks::drop_idle(size_t most) {
  std::vector<bool> dropped(kMaxNamespaces);
  bool is_any = false;
  for (uint32_t space : spaces_.live()) {
    if (most == 0) break;
    if (records_.chunks_in(space) > 0 || spaces_.sessions_in(space) > 0) continue;
    spaces_.drop(space);
    dropped[space] = is_any = true;
    --most;
  }
  if (is_any) records_.forget_spaces(dropped);
}

// Looks at no more than `budget` places, so that no other call waits long.
template <class F>
Cleared Chunks::take_out_where(uint64_t start, uint32_t budget, F&& wanted) {
  uint32_t taken = 0;
  auto from = static_cast<uint32_t>(std::min<uint64_t>(start, records_.end()));
  for (uint32_t id = records_.next(from); id < records_.end(); id = records_.next(id + 1)) {
    if (budget-- == 0) return {taken, id};
    const Record& r = record(id);
    if (r.state() != RecordState::kReady || !wanted(r)) continue;
    take_out(id, Gone::cleared);
    ++taken;
  }
  return {taken, -1};
}

Cleared Chunks::clear(int64_t space, uint64_t start, uint32_t budget) {
  if (space >= 0) spaces_.require(static_cast<uint32_t>(space));
  return take_out_where(start, budget, [&](const Record& r) { return space < 0 || r.space == space; });
}

Cleared Chunks::clear_old(uint64_t start, uint32_t budget) {
  return take_out_where(start, budget, [&](const Record& r) { return records_.was_cleared(r); });
}

// ---- segments

void Chunks::add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
  if (segment >= kSegmentIds) throw TableError("bad_argument", "segment id out of range", segment, kSegmentIds - 1);
  std::optional<uint32_t> cell;  // one that was never used, else the entry of the oldest segment that is gone
  uint32_t next = 0;
  for (uint32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentEntry& s = segments_[i];
    if (!s.in_use() && (!s.word || !cell || s.id() < segments_[*cell].id())) cell = i;
    if (!s.word) break;
    next = std::max(next, s.id() + 1);
  }
  if (segment < next) throw TableError("bad_argument", "segment ids rise", segment, next);
  if (!cell) throw TableError("table_full", "the pool has as many segments as it can", kMaxSegments, "larger segments");
  SegmentEntry& s = segments_[*cell];
  if (data_offset % kSlotAlign || data_bytes % kSlotAlign)
    throw TableError("bad_argument", "segment data is not aligned to slots", int64_t(data_offset | data_bytes),
                     int64_t(kSlotAlign));
  s.data_offset = data_offset;
  s.data_bytes = data_bytes;
  KVDOCK_PAUSE("grow.entry_written");
  publish(s.word, segment_word(*cell, segment, SegmentState::kLive));
  KVDOCK_PAUSE("grow.known");
  slots_.add_segment(segment, data_offset, data_bytes);
}

// REQUIRES: the table knows the segment.
void Chunks::set_segment(uint32_t segment, SegmentState state) {
  SegmentEntry* end = segments_ + kMaxSegments;
  SegmentEntry* s = std::find_if(segments_, end, [&](auto& one) { return one.in_use() && one.id() == segment; });
  publish(s->word, segment_word(static_cast<uint32_t>(s - segments_), segment, state));
}

uint64_t Chunks::retire_segment(uint32_t segment, uint32_t max_chunks) {
  if (!slots_.knows(segment)) throw TableError("bad_argument", "no such segment", segment);
  if (!slots_.retired(segment)) {
    set_segment(segment, SegmentState::kRetiring);
    KVDOCK_PAUSE("retire.begun");
    slots_.retire_segment(segment);
  }
  eviction_.empty_segment(segment, max_chunks);
  return slots_.used_in(segment);
}

void Chunks::remove_segment(uint32_t segment) {
  if (!slots_.knows(segment) || !slots_.retired(segment))
    throw TableError("bad_argument", "the segment was not retired", segment);
  if (uint64_t used = slots_.used_in(segment))
    throw TableError("bad_argument", "the segment is still in use", int64_t(used), 0);
  KVDOCK_PAUSE("retire.empty");
  set_segment(segment, SegmentState::kGone);
  KVDOCK_PAUSE("retire.gone");
  slots_.remove_segment(segment);
}

}  // namespace kvdock
