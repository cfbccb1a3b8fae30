#include "table/records.h"

#include <map>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

Records::Records(const Region& region, Namespaces& spaces, SlotAllocator& slots)
    : header_(region.header), spaces_(spaces), slots_(slots), pages_(region) {
  info_.reserve(pages_.most());
}

bool Records::names_live(const GrantEntry& entry) const {
  return entry.record < info_.size() && info_[entry.record].pages != 0 &&
         at(entry.record).generation() == entry.generation;
}

std::vector<Usage> Records::count_usage() const {
  std::vector<Usage> by_tenant;
  auto of = [&](uint32_t space) -> Usage& {
    uint32_t tenant = spaces_.tenant_of(space);
    if (tenant >= by_tenant.size()) by_tenant.resize(tenant + 1);
    return by_tenant[tenant];
  };
  for (uint32_t space : spaces_.live()) ++of(space).namespaces;
  for (uint32_t id = next(0); id < end(); id = next(id + 1)) {
    const Record& r = at(id);
    if (r.state() == RecordState::kFree) continue;
    of(r.space).bytes += bytes_of(id);
    ++of(r.space).chunks;
    if (info_[id].priority > 0) of(r.space).retained_bytes += bytes_of(id);
  }
  return by_tenant;
}

// ---- transitions

void Records::add_to(Sums& sums, const Record& r, uint64_t bytes, uint64_t sign) const {
  const Namespace& ns = spaces_[r.space];
  auto s = static_cast<size_t>(r.state());
  sums.bytes[s] += sign * bytes;
  sums.records[s] += sign;
  for (uint32_t p = 0; p < r.part_count; ++p) {
    const Group& group = ns.groups[r.parts[p].group];
    sums.kv_bytes[s] += sign * group.part_bytes;
    if (r.parts[p].length != group.slot_bytes()) sums.raw_parts[s] += sign;
  }
}

void Records::count(uint32_t id, int sign) {
  const Record& r = at(id);
  add_to(sums_, r, bytes_of(id), static_cast<uint64_t>(sign));
  if (r.space >= in_space_.size()) in_space_.resize(r.space + 1);
  in_space_[r.space] += sign;
  Usage& usage = spaces_.usage(r.space);
  usage.bytes += sign * bytes_of(id);
  usage.chunks += sign;
}

// Makes every transition of a record except FREE → RESERVED.
void Records::set_state(uint32_t id, RecordState state) {
  Record& r = at(id);
  count(id, -1);
  publish(r.word, record_word(r.generation(), state));
  if (state != RecordState::kFree) count(id, 1);
}

void Records::cover_pages() {
  info_.resize(pages_.end());
  advise_huge(info_.data(), info_.data() + info_.size());
}

std::optional<uint32_t> Records::take_id(uint32_t parts) {
  std::optional<uint32_t> id = pages_.take(parts);
  if (id && *id >= info_.size()) cover_pages();
  return id;
}

void Records::write(const NewChunk& chunk, uint32_t id, std::span<const StoredPart> parts) {
  Record& r = at(id);
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
  r.last_used = chunk.tick;
  uint64_t bytes = 0;
  for (const StoredPart& p : parts) {
    slots_.touch(p.slab, chunk.tick);
    bytes += round_slot(p.length);
  }
  info_[id].pages = static_cast<uint32_t>(bytes / kSlotAlign);
  KVDOCK_PAUSE("reserve.body_written");
  publish(r.word, record_word(generation, RecordState::kReserved));
  KVDOCK_PAUSE("reserve.reserved");
  count(id, 1);
  index_.insert(chunk.space, chunk.key).reserved = id;
}

void Records::move_part(uint32_t id, uint32_t part, const StoredPart& to) {
  Record& r = at(id);
  const StoredPart old = r.parts[part];
  count(id, -1);
  r.parts[part] = to;
  const uint32_t crc = body_crc(r, r.generation());
  r.parts[part] = old;
  Move& move = header_.move;
  move = {0, to.slab, to.segment, to.offset, to.length, crc};
  KVDOCK_PAUSE("raw.move_written");
  publish(move.word, move_word(id, part));
  KVDOCK_PAUSE("raw.move_begun");
  finish_move();
  slots_.touch(to.slab, r.last_used);
  info_[id].pages += static_cast<uint32_t>((round_slot(to.length) - round_slot(old.length)) / kSlotAlign);
  count(id, 1);
}

void Records::finish_move() {
  Move& move = header_.move;
  const auto [id, index] = move_of(move.word);
  Record& r = at(id);
  StoredPart& part = r.parts[index];
  part.slab = move.slab;
  part.segment = move.segment;
  KVDOCK_PAUSE("raw.move_half");
  part.offset = move.offset;
  part.length = move.length;
  r.crc = move.crc;
  KVDOCK_PAUSE("raw.moved");
  publish(move.word, 0);
}

uint32_t Records::make_ready(uint32_t id) {
  const Record& r = at(id);
  KeyEntry& e = *index_.find(r.space, r.key);
  uint32_t old = e.ready;
  KVDOCK_PAUSE("publish.whole");
  set_state(id, RecordState::kReady);
  KVDOCK_PAUSE("publish.ready");
  e.reserved = kNone;
  e.ready = id;
  RecordInfo& in = info_[id];
  in.children = e.children;
  in.born_s = in.used_s = now_s();
  in.uses = old == kNone ? 0 : info_[old].uses;
  changes_.note(r.space, r.key, true);
  return old;
}

void Records::note_gone(const Record& r, Gone why) {
  changes_.note(r.space, r.key, false);
  departures_.note(r.space, r.key, why, used_ms(r.last_used));
}

void Records::note_declined(uint32_t space, std::span<const Key> keys) {
  for (const Key& key : keys) departures_.note(space, key, Gone::store_declined, 0);
}

void Records::forget_key(uint32_t id) {
  const Record& r = at(id);
  index_.forget(r.space, r.key, id);
}

void Records::quarantine(uint32_t id) {
  set_state(id, RecordState::kQuarantined);
  KVDOCK_PAUSE("evict.quarantined");
}

void Records::free(uint32_t id) {
  Record& r = at(id);
  KVDOCK_PAUSE("quarantine.held_by_none");
  set_state(id, RecordState::kFree);
  KVDOCK_PAUSE("quarantine.freed");
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.give(r.parts[p].slab, r.parts[p].offset);
  info_[id] = RecordInfo{};
  pages_.give(id);
}

uint32_t Records::add_child(uint32_t space, const Key& parent) {
  KeyIndex::Parent p = index_.add_child(space, parent);
  if (p.ready != kNone) info_[p.ready].children = p.children;
  return p.ready;
}

uint32_t Records::drop_child(uint32_t space, const Key& parent) {
  KeyIndex::Parent p = index_.drop_child(space, parent);
  if (p.ready != kNone) info_[p.ready].children = p.children;
  return p.ready;
}

void Records::forget_spaces(const std::vector<bool>& spaces) {
  changes_.forget(spaces);
  departures_.forget(spaces);
}

// ---- what is derived from records and slots is computed again and compared

void Records::check() const {
  check_bodies();
  check_index();
}

// I1: each slot that a record names is its own; as their bytes are the bytes in use, no other slot has an owner. I4,
// I7: bodies are as they were written, and sums by state are those of the records.
void Records::check_bodies() const {
  Sums sums;
  std::vector<bool> taken(info_.size(), false);
  for (uint32_t id = next(0); id < end(); id = next(id + 1)) {
    const Record& r = at(id);
    const RecordInfo& in = info_[id];
    taken[id] = r.state() != RecordState::kFree;
    if (!taken[id]) {
      require(in.pins == 0, "I2: a FREE record is pinned", id);
      require(in.pages == 0 && !in.kept && !in.listed, "a FREE record has bytes, or is kept or listed", id);
      continue;
    }
    uint64_t named = 0;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      named += round_slot(r.parts[p].length);
      const uint32_t* owner = slots_.owner_of(r.parts[p]);
      require(owner && *owner == id, "I1: a slot's owner is not the record that names it", id);
      require(r.state() != RecordState::kReady || (r.parts[p].committed & kCommitted), "I4: READY with a part missing",
              id);
    }
    require(named == bytes_of(id), "a record's size is counted wrongly", id);
    require(r.crc == body_crc(r, r.generation()), "a record's body does not match its CRC", id);
    require(r.generation() <= header_.last_generation, "a generation was never given out", id);
    require(r.state() == RecordState::kReady || in.pins > 0, "an unpinned record is neither READY nor FREE", id);
    add_to(sums, r, named, 1);
  }
  pages_.check(taken);
  require(sums == sums_, "I7: sums by state do not add up");
  require(sums.bytes[1] + sums.bytes[2] + sums.bytes[3] == slots_.used_bytes(),
          "I7: bytes by state are not the bytes in use");
}

// I5: per key at most one READY and one RESERVED; children are the records that name the key as parent.
void Records::check_index() const {
  struct Want {
    uint32_t ready = kNone, reserved = kNone, children = 0;
  };
  std::map<std::pair<uint32_t, Key>, Want> want;
  for (uint32_t id = next(0); id < end(); id = next(id + 1)) {
    const Record& r = at(id);
    if (r.state() != RecordState::kReady && r.state() != RecordState::kReserved) continue;
    Want& w = want[{r.space, r.key}];
    uint32_t& named = r.state() == RecordState::kReady ? w.ready : w.reserved;
    require(named == kNone, "I5: two records of one key and state", id);
    named = id;
    if (r.parent.names_chunk()) ++want[{r.space, r.parent}].children;
  }
  index_.for_each([&](const KeyEntry& e) {
    const Want& w = want[{e.space(), e.key}];
    require(w.ready == e.ready && w.reserved == e.reserved && w.children == e.children && !e.unused(),
            "the key index disagrees with the records", e.ready);
    require(e.ready == kNone || info_[e.ready].children == e.children, "a READY record counts its children wrongly",
            e.ready);
    require(index_.find(e.space(), e.key) == &e, "the key index cannot find its own entry", e.ready);
  });
  require(index_.size() == want.size(), "the key index misses a key", int64_t(want.size()));
}

}  // namespace kvdock
