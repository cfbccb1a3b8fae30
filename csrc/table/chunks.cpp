// A record from FREE to RESERVED to READY, its pins, and its end.
#include "table/chunks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

Chunks::Chunks(const Region& region, uint64_t grace_ms)
    : header_(region.header),
      segments_(region.segments),
      spaces_(region, grace_ms),
      pages_(region),
      slots_(region.slabs, kMaxSlabs) {}

bool Chunks::names_live(const Line& line) const {
  return line.record < info_.size() && info_[line.record].pages != 0 &&
         record(line.record).generation() == line.generation;
}

void Chunks::count_state(uint32_t id, int sign) {
  auto s = static_cast<size_t>(record(id).state());
  sums_.bytes[s] += sign * bytes_of(id);
  sums_.records[s] += sign;
  uint32_t space = record(id).space;
  if (space >= records_in_.size()) records_in_.resize(space + 1);
  records_in_[space] += sign;
  Usage& usage = spaces_.usage(space);
  usage.bytes += sign * bytes_of(id);
  usage.chunks += sign;
}

void Chunks::drop_idle(const std::vector<bool>& used) {
  for (uint32_t space : spaces_.live()) {
    bool has_records = space < records_in_.size() && records_in_[space] > 0;
    if (has_records || used[space]) continue;
    spaces_.drop(space);
    changes_.forget(space);
    departures_.forget(space);
  }
}

// Every transition of a record but its first passes here: one 64-bit store.
void Chunks::set_state(uint32_t id, RecordState state) {
  Record& r = record(id);
  count_state(id, -1);
  publish(r.word, record_word(r.generation(), state));
  if (state != RecordState::kFree) count_state(id, 1);
}

// ---- parents and children

void Chunks::add_child(uint32_t space, const Key& parent) {
  KeyIndex::Parent p = index_.add_child(space, parent);
  if (p.ready == kNone) return;
  unlist(p.ready);
  info_[p.ready].children = p.children;
  offer(p.ready);
}

void Chunks::drop_child(uint32_t space, const Key& parent) {
  KeyIndex::Parent p = index_.drop_child(space, parent);
  if (p.ready == kNone) return;
  info_[p.ready].children = p.children;
  offer(p.ready);
}

bool Chunks::may_go(uint32_t id) const {
  const Info& in = info_[id];
  return in.pins == 0 && in.children == 0 && record(id).state() == RecordState::kReady;
}

void Chunks::offer(uint32_t id) {
  if (info_[id].listed || !may_go(id)) return;
  next_.reset();  // this one may be worth less
  const Record& r = record(id);
  list_of(id).add(spaces_.shape_of(r.space), spaces_.tenant_of(r.space), info_[id].kind, leaf_of(id));
  info_[id].listed = true;
  if (!info_[id].kept) list_in_space(id);
}

void Chunks::list_in_space(uint32_t id) {
  uint32_t space = record(id).space;
  if (space >= leaves_in_.size()) leaves_in_.resize(space + 1, kNone);
  uint32_t& first = leaves_in_[space];
  if (first == kNone) spaces_.left().set_has_leaves(space, true);
  else info_[first].before = id;
  info_[id].behind = first;
  first = id;
}

void Chunks::unlist_in_space(uint32_t id) {
  Info& in = info_[id];
  uint32_t space = record(id).space;
  if (in.before != kNone) info_[in.before].behind = in.behind;
  else leaves_in_[space] = in.behind;
  if (in.behind != kNone) info_[in.behind].before = in.before;
  in.before = in.behind = kNone;
  if (leaves_in_[space] == kNone) spaces_.left().set_has_leaves(space, false);
}

// Before anything changes by which it is listed.
void Chunks::unlist(uint32_t id) {
  if (!info_[id].listed) return;
  if (next_ && next_->leaf.record == id) next_.reset();
  const Record& r = record(id);
  LeafLists& list = list_of(id);
  list.remove(spaces_.shape_of(r.space), spaces_.tenant_of(r.space), info_[id].kind, leaf_of(id));
  bool of_priority = info_[id].priority != 0 && !info_[id].kept;
  if (of_priority && list.size() == 0) evictions_.erase(info_[id].priority);
  if (!info_[id].kept) unlist_in_space(id);
  info_[id].listed = false;
}

Chunk Chunks::described(uint32_t id) const {
  const Record& r = record(id);
  uint64_t name;
  std::memcpy(&name, r.key.bytes, sizeof name);
  return {id, fold(name, r.space), info_[id].kind, r.last_used};
}

void Chunks::stamp(uint32_t id, uint64_t tick) {
  unlist(id);
  if (info_[id].priority < 0) set_wish(id, 0, 0);  // somebody asks for it after all
  if (info_[id].kind != kNoKind) policy_->touched(described(id), tick);
  Record& r = record(id);
  r.last_used = tick;
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.touch(r.parts[p].slab, tick);
  offer(id);
}

void Chunks::use(uint32_t id, uint64_t tick) {
  unlist(id);
  ++info_[id].uses;
  info_[id].kind = policy_->used(described(id), tick);
  stamp(id, tick);
}

// REQUIRES: it is READY, and not listed.
void Chunks::set_kind(uint32_t id) {
  const Record& r = record(id);
  const KeyEntry* above = r.parent.names_chunk() ? index_.find(r.space, r.parent) : nullptr;
  std::optional<uint8_t> line;
  if (above && above->ready != kNone && above->children == 1) line = info_[above->ready].kind;
  info_[id].kind = policy_->stored(described(id), line);
}

// A chunk is never older than what is stored under it.
void Chunks::stamp_path(uint32_t space, Key key, uint64_t tick) {
  while (key.names_chunk()) {
    const KeyEntry* e = index_.find(space, key);
    uint32_t id = e ? e->any() : kNone;
    if (id == kNone || record(id).last_used == tick) return;
    stamp(id, tick);
    key = record(id).parent;
  }
}

// ---- FREE → RESERVED → READY

Chunks::Reserved Chunks::reserve(const NewChunk& chunk) {
  add_child(chunk.space, chunk.parent);  // first: making room takes no parent
  if (!make_room_in_quota(chunk)) {
    drop_child(chunk.space, chunk.parent);
    return {kNone, Limit::quota};
  }
  uint32_t parts = spaces_[chunk.space].writers * static_cast<uint32_t>(std::popcount(chunk.groups));
  std::optional<uint32_t> id = new_id(chunk, parts);
  std::vector<StoredPart> taken;
  if (!id || !take_parts(chunk, *id, &taken)) {
    if (id) pages_.give(*id);
    drop_child(chunk.space, chunk.parent);
    return {kNone, chunk.below == kNone ? Limit::no_space : Limit::pinning};
  }
  KVDOCK_PAUSE("reserve.slots_taken");
  write_record(chunk, *id, taken);
  index_.insert(chunk.space, chunk.key).reserved = *id;
  return {*id, Limit::none};
}

std::optional<uint32_t> Chunks::new_id(const NewChunk& chunk, uint32_t parts) {
  std::optional<uint32_t> id;
  for (int tries = 0; !(id = pages_.take(parts)) && chunk.makes_room() && tries < 64; ++tries) {
    auto victim = least(spaces_.shape_of(chunk.space));
    if (!victim) break;
    bool makes_room = record(victim->leaf.record).part_count == parts;
    if (!makes_room && victim->priority != kLeft) break;  // what nobody finds any more goes all the same
    evict_least(*victim);
  }
  if (id && *id >= info_.size()) info_.resize(pages_.end());
  return id;
}

// A slot for each part.
bool Chunks::take_parts(const NewChunk& chunk, uint32_t id, std::vector<StoredPart>* out) {
  const Namespace& ns = spaces_[chunk.space];
  bool ok = true;
  for (uint32_t g = 0; g < ns.group_count && ok; ++g) {
    if (!(chunk.groups >> g & 1)) continue;
    uint64_t bytes = ns.groups[g].part_bytes;
    for (uint32_t w = 0; w < ns.writers && ok; ++w) {
      std::optional<Slot> slot;
      while (!(slot = slots_.take(bytes, id, chunk.below)) && chunk.makes_room() && make_room(bytes, chunk)) {
      }
      ok = slot.has_value();
      if (!ok) break;
      slots_.pin(slot->slab);  // making room for the next part must not empty it
      out->push_back({slot->slab, slot->segment, static_cast<uint32_t>(bytes), static_cast<uint8_t>(g),
                      static_cast<uint8_t>(w), 0, slot->offset, 0});
    }
  }
  for (const StoredPart& p : *out) slots_.unpin(p.slab);
  if (!ok)
    for (const StoredPart& p : *out) slots_.give(p.slab, p.offset);
  return ok;
}

void Chunks::write_record(const NewChunk& chunk, uint32_t id, std::span<const StoredPart> parts) {
  Record& r = record(id);
  r.space = static_cast<uint16_t>(chunk.space);
  r.part_count = static_cast<uint16_t>(parts.size());
  r.key = chunk.key;
  r.parent = chunk.parent;
  r.groups = chunk.groups;
  r.temporary = chunk.temporary;
  r.temp_seen = 0;
  r.kept_until_ms = 0;
  std::copy(parts.begin(), parts.end(), r.parts);
  uint64_t generation = ++header_.last_generation;
  r.crc = body_crc(r, generation);
  stamp(id, chunk.tick);
  uint64_t bytes = 0;
  for (const StoredPart& p : parts) bytes += round_slot(p.length);
  info_[id].pages = static_cast<uint32_t>(bytes / kSlotAlign);
  KVDOCK_PAUSE("reserve.body_written");
  publish(r.word, record_word(generation, RecordState::kReserved));
  KVDOCK_PAUSE("reserve.reserved");
  count_state(id, 1);
}

void Chunks::publish_chunk(uint32_t id) {
  Record& r = record(id);
  KeyEntry& e = *index_.find(r.space, r.key);
  uint32_t old = e.ready;
  KVDOCK_PAUSE("publish.whole");
  set_state(id, RecordState::kReady);
  KVDOCK_PAUSE("publish.ready");
  e.reserved = kNone;
  e.ready = id;
  info_[id].children = e.children;
  note_born(id, old);
  set_kind(id);
  ++counters_.stored_chunks;
  counters_.stored_bytes += bytes_of(id);
  changes_.note(r.space, r.key, true);
  if (old == kNone) return;
  if (info_[old].kept) {  // the administrator's wish was for the key
    set_kept(id, record(old).kept_until_ms);
    set_kept(old, 0);
  }
  int8_t wished = info_[old].priority;
  uint64_t until_ms = wished_until(old);
  set_wish(old, 0, 0);
  if (wished > 0 && info_[id].priority <= 0 && may_retain(id)) set_wish(id, wished, until_ms);
  retire(old);
}

// ---- pins

void Chunks::add_pin(uint32_t id, uint32_t session) {
  unlist(id);
  Info& in = info_[id];
  const Record& r = record(id);
  if (in.pins++ == 0) {
    held_bytes_ += bytes_of(id);
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.pin(r.parts[p].slab);
    in.sole = session;
    held_by(session) += bytes_of(id);
    return;
  }
  if (in.sole == session) return;
  if (in.sole != kMany) {
    shared_pins_[pair_of(in.sole, id)] = in.pins - 1;
    in.sole = kMany;
  }
  if (++shared_pins_[pair_of(session, id)] == 1) held_by(session) += bytes_of(id);
}

void Chunks::drop_pin(uint32_t id, uint32_t session) {
  Info& in = info_[id];
  uint64_t bytes = bytes_of(id);
  --in.pins;
  if (in.sole == kMany) {
    auto it = shared_pins_.find(pair_of(session, id));
    if (--it->second == 0) {
      shared_pins_.erase(it);
      held_by(session) -= bytes;
    }
  } else if (in.pins == 0) {
    held_by(session) -= bytes;
  }
  if (in.pins) return;
  in.sole = kNone;
  held_bytes_ -= bytes;
  const Record& r = record(id);
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.unpin(r.parts[p].slab);
  unpinned(id);
}

// ---- the end of a record: take_out → retire → free_record. A record that is still pinned waits in QUARANTINED for
// its last pin; nothing here ever comes back to a function above it.

// What a record becomes whose last pin is gone.
void Chunks::unpinned(uint32_t id) {
  const Record& r = record(id);
  if (r.state() == RecordState::kQuarantined) return free_record(id);
  // A temporary chunk goes with its last reader, unless a second request has hit it.
  if (r.state() == RecordState::kReady && r.temporary && r.temp_seen != 0 && r.temp_seen != kTempKept)
    return take_out(id, Gone::read);
  offer(id);
}

// READY or RESERVED → nobody finds the record from now on.
void Chunks::take_out(uint32_t id, Gone why) {
  const Record& r = record(id);
  if (r.state() == RecordState::kReady) note_gone(r, why);
  if (info_[id].kept) set_kept(id, 0);
  if (info_[id].priority != 0) set_wish(id, 0, 0);
  index_.forget(r.space, r.key, id);
  KVDOCK_PAUSE("evict.unlinked");
  retire(id);
}

// → QUARANTINED, and FREE at once if nobody pins it. Its key names another record now, or none. Its parent may have
// lost its last child, and with it what kept it from being evicted.
void Chunks::retire(uint32_t id) {
  const Record& r = record(id);
  uint32_t space = r.space;
  Key parent = r.parent;
  unlist(id);
  if (info_[id].kind != kNoKind) policy_->removed(described(id));
  info_[id].kind = kNoKind;
  set_state(id, RecordState::kQuarantined);
  KVDOCK_PAUSE("evict.quarantined");
  if (info_[id].pins == 0) free_record(id);
  drop_child(space, parent);
}

// QUARANTINED → FREE: from here on the slots are anybody's.
void Chunks::free_record(uint32_t id) {
  Record& r = record(id);
  KVDOCK_PAUSE("quarantine.held_by_none");
  set_state(id, RecordState::kFree);
  KVDOCK_PAUSE("quarantine.freed");
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.give(r.parts[p].slab, r.parts[p].offset);
  info_[id] = Info{};
  pages_.give(id);
}

// ---- segments

void Chunks::add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
  if (segment >= kSegmentIds) throw TableError("bad_argument", "segment id out of range", segment, kSegmentIds - 1);
  std::optional<uint32_t> cell;  // one that was never used, else that of the segment that is gone longest
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
  cause_ = Gone::shrunk;
  for (uint32_t id : slots_.records_in(segment)) {
    if (max_chunks == 0) break;
    if (record(id).state() != RecordState::kReady || info_[id].pins || info_[id].kept) continue;
    evict_one(id);
    --max_chunks;
  }
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
