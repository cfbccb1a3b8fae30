// Stores: a reservation gives every part of every declared group a slot or none; each rank commits its parts;
// the last commit publishes the chunk with one store.
#include <algorithm>
#include <bit>
#include <numeric>

#include "table/body_crc.h"
#include "base/pause.h"

namespace kvdock {

namespace {

const Key& parent_of(const ReserveCall& call, size_t i) { return i ? call.keys[i - 1] : call.parent; }

uint64_t hash_call(const ReserveCall& call) {
  uint64_t h = fold(call.groups, call.temporary);
  auto mix = [&h](const Key& k) {
    for (size_t at = 0; at < kKeyBytes; at += 8) {
      uint64_t v;
      std::memcpy(&v, k.bytes + at, 8);
      h = fold(h ^ h >> 29, v);
    }
  };
  mix(call.parent);
  for (const Key& k : call.keys) mix(k);
  return h;
}

}  // namespace

// Refuses before anything is done: keys repeated, or known under another parent.
void Table::check_chain(uint32_t space, const ReserveCall& call, uint32_t groups) {
  const Namespace& ns = spaces_[space];
  uint32_t all = ns.group_count == 32 ? ~0u : (1u << ns.group_count) - 1, full = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g)
    if (ns.groups[g].kind == GroupKind::kFull) full |= 1u << g;
  if ((groups & ~all) || (groups & full) != full)
    throw TableRefusal("bad_argument", "groups must name every full-attention group and none unknown", groups, all);
  if (call.keys.size() > kMaxKeys)
    throw TableRefusal("bad_argument", "too many keys", int64_t(call.keys.size()), kMaxKeys);
  std::vector<uint32_t> order(call.keys.size());
  std::iota(order.begin(), order.end(), 0);
  auto less = [&](uint32_t a, uint32_t b) { return std::memcmp(call.keys[a].bytes, call.keys[b].bytes, kKeyBytes) < 0; };
  std::sort(order.begin(), order.end(), less);
  for (size_t i = 1; i < order.size(); ++i)
    if (!less(order[i - 1], order[i]))
      throw TableRefusal("bad_argument", "a key stands twice in one store", order[i], "distinct keys");
  for (size_t i = 0; i < call.keys.size(); ++i) {
    if (call.keys[i].is_root())
      throw TableRefusal("bad_argument", "a key of zeros names no chunk", int64_t(i), "a digest");
    KeyEntry* e = index_.find(space, call.keys[i]);
    if (!e) continue;
    for (uint32_t id : {e->ready, e->reserved})
      if (id != kNone && !(record(id).parent == parent_of(call, i)))
        throw TableRefusal("chain_mismatch", "the key is stored under another parent", int64_t(i), "its first parent");
  }
}

// The path from `key` to its root becomes as young as what is stored under it.
void Table::stamp_path(uint32_t space, Key key, uint64_t tick) {
  while (!key.is_root()) {
    KeyEntry* e = index_.find(space, key);
    uint32_t id = e ? (e->ready != kNone ? e->ready : e->reserved) : kNone;
    if (id == kNone || record(id).last_used == tick) return;
    stamp(record(id), tick);
    key = record(id).parent;
  }
}

// Slots in segments with ids below `below`. Only who may use all of them has others' chunks evicted for its sake:
// what went could lie where it may not.
bool Table::take_parts(const Namespace& ns, uint32_t groups, uint32_t id, uint32_t below,
                       std::vector<StoredPart>* out) {
  bool ok = true;
  for (uint32_t g = 0; g < ns.group_count && ok; ++g) {
    if (!(groups >> g & 1)) continue;
    for (uint32_t w = 0; w < ns.writers && ok; ++w) {
      std::optional<Slot> slot;
      while (!(slot = slots_.take(ns.groups[g].part_bytes, id, below)) && below == kNone &&
             make_room(ns.groups[g].part_bytes)) {
      }
      ok = slot.has_value();
      if (!ok) break;
      slots_.pin(slot->slab);  // not to be emptied for the next part's sake
      out->push_back({slot->slab, slot->segment, static_cast<uint8_t>(g), static_cast<uint8_t>(w), slot->offset,
                      ns.groups[g].part_bytes, 0});
    }
  }
  for (const StoredPart& p : *out) slots_.unpin(p.slab);
  if (ok) return true;
  for (const StoredPart& p : *out) slots_.give(p.slab, p.offset);
  out->clear();
  return false;
}

// FREE → RESERVED. The parent counts the child first, so that making room never takes the parent.
bool Table::reserve_one(uint32_t space, const Key& key, const Key& parent, uint32_t groups, bool temporary,
                        uint64_t tick, uint32_t below, uint32_t* out) {
  const Namespace& ns = spaces_[space];
  storing_ = {space, parent};
  count_child(space, parent);
  uint32_t parts = ns.writers * static_cast<uint32_t>(std::popcount(groups));
  std::optional<uint32_t> id;
  for (int tries = 0; !(id = new_record_id(parts)) && tries < 64; ++tries) {
    auto victim = oldest(space_shape_[space]);
    if (!victim || record(victim->record).part_count != parts) break;  // it would not make room for this record
    quarantine(victim->record);
    ++counters_.evicted_chunks;
  }
  std::vector<StoredPart> taken;
  if (!id || !take_parts(ns, groups, *id, below, &taken)) {
    if (id) give_record_id(*id);
    uncount_child(space, parent);
    return false;
  }
  Record& r = record(*id);
  KVDOCK_PAUSE("reserve.slots_taken");
  r.space = static_cast<uint16_t>(space);
  r.part_count = static_cast<uint16_t>(parts);
  r.key = key;
  r.parent = parent;
  r.groups = groups;
  r.temporary = temporary;
  r.temp_seen = 0;
  r.kept_until_ms = 0;
  std::copy(taken.begin(), taken.end(), r.parts);
  uint64_t generation = ++header_->last_generation;
  r.crc = body_crc(r, generation);
  stamp(r, tick);
  uint64_t bytes = 0;
  for (const StoredPart& p : taken) bytes += round_slot(p.length);
  info_[*id].pages = static_cast<uint32_t>(bytes / kSlotAlign);
  KVDOCK_PAUSE("reserve.body_written");
  publish(r.word, sealed(generation << 3 | static_cast<uint64_t>(RecordState::kReserved)));
  KVDOCK_PAUSE("reserve.reserved");
  count_state(*id, 1);
  index_.insert(space, key).reserved = *id;
  *out = *id;
  return true;
}

void Table::repeat_reservation(uint32_t cell, const ReserveCall& call, uint64_t now, ReserveResult* out) {
  Grant& g = grants_[cell];
  if (g.body_hash != hash_call(call)) throw TableRefusal("id_reused", "the store id was used for another body");
  if (g.state() == GrantState::kOpen && now > g.deadline_ms) {
    close_reservation(cell);
    finish_if_done(cell);
  }
  if (g.state() != GrantState::kOpen) throw TableRefusal("grant_closed", "the reservation is closed");
  g.deadline_ms = now + call.deadline_ms;
  *out = answers_.at(cell);
  for_each_line(g, [&](const Line& line) {
    out->chunks.emplace_back(line.index, parts_of(record(line.record), line.groups));
  });
}

ReserveResult Table::reserve(uint64_t session, uint64_t member, const ReserveCall& call, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t session_cell, member_cell, cell;
  asker_at(session, member, &session_cell, &member_cell);
  uint32_t space = sessions_[session_cell].space;
  const Namespace& ns = spaces_[space];
  ReserveResult out;
  if (request_grant(session_cell, GrantKind::kReservation, call.store, &cell)) {
    repeat_reservation(cell, call, now, &out);
    return out;
  }
  uint32_t groups = call.groups ? call.groups : (1u << ns.group_count) - 1;
  check_chain(space, call, groups);
  require_lines(static_cast<uint32_t>(call.keys.size()));
  uint64_t tick = ++header_->use_tick;
  stamp_path(space, call.parent, tick);
  uint64_t room = static_cast<uint64_t>(options_.session_cap * static_cast<double>(options_.limit_bytes));
  uint64_t total_room = static_cast<uint64_t>(options_.total_cap * static_cast<double>(options_.limit_bytes));
  uint64_t bytes = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g)
    if (groups >> g & 1) bytes += round_slot(ns.groups[g].part_bytes) * ns.writers;

  uint32_t below = segments_in_reach(session_cell);
  Grant* grant = nullptr;
  for (uint32_t i = 0; i < call.keys.size(); ++i) {
    KeyEntry* e = index_.find(space, call.keys[i]);
    if (e && e->reserved != kNone) {
      out.busy.push_back(i);
      continue;
    }
    if (e && e->ready != kNone) {
      uint32_t has = record(e->ready).groups;
      if (!(groups & ~has) || (has & ~groups)) {  // covered, or not a superset of what is there
        stamp(record(e->ready), tick);
        out.present.push_back(i);
        continue;
      }
    }
    if (session_state_[session_cell].held_bytes + bytes > room || held_bytes_ + bytes > total_room) {
      out.limited = "held_bytes";
      break;
    }
    if (!grant) grant = &new_grant(GrantKind::kReservation, session_cell, member_cell, call.store, ns.writers, now);
    uint32_t id;
    if (!reserve_one(space, call.keys[i], parent_of(call, i), groups, call.temporary, tick, below, &id)) {
      out.limited = below == kNone ? "no_space" : "pinning";
      break;
    }
    add_line(static_cast<uint32_t>(grant - grants_),
             {record(id).generation(), id, static_cast<uint16_t>(groups), static_cast<uint16_t>(i)});
    out.chunks.emplace_back(i, parts_of(record(id), groups));
  }
  if (!grant) return out;
  cell = static_cast<uint32_t>(grant - grants_);
  if (grant->line_count == 0) {
    free_grants_.push_back(cell);
    return out;
  }
  grant->body_hash = hash_call(call);
  grant->deadline_ms = now + call.deadline_ms;
  KVDOCK_PAUSE("reserve.lines_written");
  out.grant = grant->id;
  answers_[cell] = {out.grant, {}, out.present, out.busy, out.limited};  // a repeat says the same, whatever went since
  seal_grant(cell);
  ++counters_.reservations;
  return out;
}

std::pair<uint32_t, std::vector<uint32_t>> Table::commit(uint64_t session, uint64_t id, uint32_t rank,
                                                         const std::vector<PartCommit>& parts, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Grant* g = find_grant(session, id, GrantKind::kReservation, &cell);
  if (!g) throw TableRefusal("grant_closed", "the reservation is closed and forgotten");
  check_ranks(*g, {rank});
  if (g->state() == GrantState::kOpen && now > g->deadline_ms) close_reservation(cell);

  std::vector<Line> lines;  // in rising order of their index, as they were added
  lines.reserve(g->line_count);
  for_each_line(*g, [&](const Line& line) { lines.push_back(line); });
  std::vector<StoredPart*> todo;
  std::vector<uint64_t> sums;
  for (const PartCommit& p : parts) {
    auto it = std::lower_bound(lines.begin(), lines.end(), p.index,
                               [](const Line& line, uint32_t index) { return line.index < index; });
    if (it == lines.end() || it->index != p.index || p.group >= kMaxGroups || !(it->groups >> p.group & 1))
      throw TableRefusal("not_reserved", "the reservation has no such part", p.index, int64_t(lines.size()));
    if (p.checksum >= kChecksumPrime)
      throw TableRefusal("bad_argument", "a checksum is below 2^61 - 1", int64_t(p.checksum));
    Record& r = record(it->record);
    if (r.generation() != it->generation) continue;  // published, read and gone since: a late repeat
    auto part = std::find_if(r.parts, r.parts + r.part_count,
                             [&](const StoredPart& x) { return x.group == p.group && x.writer == rank; });
    if (!(part->committed & kCommitted))
      todo.push_back(part), sums.push_back(p.checksum);
    else if (part->committed != (kCommitted | p.checksum))
      throw TableRefusal("already_committed", "the part was committed with another checksum", p.index);
  }
  if (g->state() != GrantState::kOpen) {
    if (g->completed && todo.empty()) return {static_cast<uint32_t>(lines.size()), remaining(*g)};
    discharge(cell, rank);  // late, but its word all the same
    finish_if_done(cell);
    throw TableRefusal("grant_closed", "the reservation was aborted or is past its deadline");
  }
  for (size_t i = 0; i < todo.size(); ++i) {
    publish(todo[i]->committed, kCommitted | sums[i]);
    KVDOCK_PAUSE("publish.part_set");
  }

  uint32_t ready = 0;
  bool rank_done = true, all_done = true;
  for (const Line& line : lines) {
    Record& r = record(line.record);
    bool whole = true;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      bool set = r.parts[p].committed & kCommitted;
      whole = whole && set;
      if (r.parts[p].writer == rank) rank_done = rank_done && set;
    }
    if (whole && r.state() == RecordState::kReserved) publish_record(line.record);
    ready += whole;
    all_done = all_done && whole;
  }
  if (all_done) g->completed = 1;
  KVDOCK_PAUSE("publish.completed");
  if (rank_done) discharge(cell, rank);
  finish_if_done(cell);
  return {ready, remaining(*g)};
}

}  // namespace kvdock
