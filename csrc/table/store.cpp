// Stores: a reservation gives every part of every declared group a slot or none; each rank commits its parts; the last
// commit publishes the chunk with one store.
#include <algorithm>
#include <numeric>
#include <span>

#include "base/pause.h"
#include "table/table.h"

namespace kvdock {

namespace {

const Key& parent_of(const ReserveCall& call, size_t i) { return i ? call.keys[i - 1] : call.parent; }

// An unknown parent contradicts no other.
bool contradict(const Key& a, const Key& b) { return !(a == b) && !a.is_unknown() && !b.is_unknown(); }

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

std::vector<PartAt> parts_of(const Record& r, uint32_t groups) {
  std::vector<PartAt> out;
  append_parts(r, groups, &out);
  return out;
}

void require_distinct(const std::vector<Key>& keys) {
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  auto less = [&](uint32_t a, uint32_t b) { return std::memcmp(keys[a].bytes, keys[b].bytes, kKeyBytes) < 0; };
  std::sort(order.begin(), order.end(), less);
  for (size_t i = 1; i < order.size(); ++i)
    if (!less(order[i - 1], order[i]))
      throw TableError("bad_argument", "a key occurs twice in one store", order[i], "distinct keys");
}

}  // namespace

void append_parts(const Record& r, uint32_t groups, std::vector<PartAt>* out) {
  for (uint32_t p = 0; p < r.part_count; ++p) {
    const StoredPart& part = r.parts[p];
    if (groups >> part.group & 1)
      out->push_back({part.group, part.writer, part.segment, part.offset, part.length, part.committed & ~kCommitted});
  }
}

// Throws before anything was changed: for impossible groups, repeated keys, and keys stored under another parent.
void Table::check_chain(uint32_t space, const ReserveCall& call, uint32_t groups) {
  const Namespace& ns = chunks_.namespaces()[space];
  uint32_t all = (1u << ns.group_count) - 1, full = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g)
    if (ns.groups[g].kind == GroupKind::kFull) full |= 1u << g;
  if ((groups & ~all) || (groups & full) != full)
    throw TableError("bad_argument", "groups must name every full-attention group and no unknown one", groups, all);
  if (call.keys.size() > kMaxStoreKeys)
    throw TableError("bad_argument", "too many keys", int64_t(call.keys.size()), kMaxStoreKeys);
  require_distinct(call.keys);
  for (const Key& key : call.keys) chunks_.records().prefetch_key(space, key);  // as for a lookup
  for (size_t i = 0; i < call.keys.size(); ++i) {
    if (!call.keys[i].names_chunk())
      throw TableError("bad_argument", "a key of zeros or ones names no chunk", int64_t(i), "a digest");
    const KeyEntry* e = chunks_.find(space, call.keys[i]);
    if (!e) continue;
    for (uint32_t id : {e->ready, e->reserved})
      if (id != kNone && contradict(chunks_.record(id).parent, parent_of(call, i)))
        throw TableError("chain_mismatch", "the key is stored under another parent", int64_t(i), "its first parent");
  }
}

void Table::repeat_reservation(Grant& g, const ReserveCall& call, uint64_t now, ReserveResult* out) {
  if (g.body_hash != hash_call(call)) throw TableError("id_reused", "the store id was used for another body");
  close_if_over(g, now);
  if (g.state() != GrantState::kOpen) throw TableError("grant_closed", "the reservation is closed");
  g.deadline_ms = now + call.deadline_ms;
  *out = grants_.answer(g);
  grants_.for_each_entry(g, [&](const GrantEntry& entry) {
    out->chunks.emplace_back(entry.index, parts_of(chunks_.record(entry.record), entry.groups));
  });
}

ReserveResult Table::reserve(uint64_t session, uint64_t member, const ReserveCall& call, uint64_t now) {
  Members::Asker asker = members_.asker(session, member);
  chunks_.set_now(now);
  uint32_t space = members_.session(asker.session).space();
  ReserveResult out;
  if (Grant* g = grants_.of_request(asker.session, GrantKind::kReservation, call.store)) {
    repeat_reservation(*g, call, now, &out);
    return out;
  }
  uint32_t groups = call.groups ? call.groups : (1u << chunks_.namespaces()[space].group_count) - 1;
  check_chain(space, call, groups);
  grants_.require_entries(static_cast<uint32_t>(call.keys.size()));
  Grant* g = reserve_missing(asker, call, groups, now, &out);
  if (!g) return out;
  if (g->entry_count == 0) {
    grants_.give_up(*g);
    return out;
  }
  g->body_hash = hash_call(call);
  g->deadline_ms = now + call.deadline_ms;
  KVDOCK_PAUSE("reserve.entries_written");
  out.grant = g->id;
  // A repeat of the call gets the same answer, whatever was removed since.
  grants_.answer(*g) = {out.grant, {}, out.present, out.busy, out.limited};
  grants_.open(*g);
  ++counters_.reservations;
  return out;
}

// Reserves the keys that are neither stored nor reserved, until a limit is met. nullptr: nothing was reserved. With
// fewer evictions than it needs, it reserves nothing.
Grant* Table::reserve_missing(const Members::Asker& asker, const ReserveCall& call, uint32_t groups, uint64_t now,
                              ReserveResult* out) {
  uint32_t space = members_.session(asker.session).space();
  const Namespace& ns = chunks_.namespaces()[space];
  uint64_t tick = ++region_.header.use_tick, bytes = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g)
    if (groups >> g & 1) bytes += round_slot(ns.groups[g].slot_bytes()) * ns.writers;
  uint32_t below = segments_in_reach(asker.session);
  chunks_.stamp_path(space, call.parent, tick);
  Grant* grant = nullptr;
  for (uint32_t i = 0; i < call.keys.size(); ++i) {
    const KeyEntry* e = chunks_.find(space, call.keys[i]);
    if (e && e->reserved != kNone) {
      out->busy.push_back(i);
      continue;
    }
    if (e && e->ready != kNone) {
      uint32_t has = chunks_.record(e->ready).groups;
      if (!(groups & ~has) || (has & ~groups)) {  // covered, or not a superset of the stored groups
        chunks_.stamp(e->ready, tick);
        out->present.push_back(i);
        continue;
      }
    }
    if (!may_hold(asker.session, bytes)) {
      out->limited = Limit::held_bytes;
      break;
    }
    if (!grant && !call.temporary && !call.goes_on &&
        chunks_.declines(space, parent_of(call, i), std::span(call.keys).subspan(i), bytes)) {
      out->limited = Limit::no_space;
      break;
    }
    NewChunk wanted{space, call.keys[i], parent_of(call, i), groups, call.temporary, tick, bytes, below};
    if (!grant) {
      out->has_more = chunks_.make_room(wanted, count_missing(asker.session, call, i, wanted), call.most_evicted);
      if (out->has_more) break;
      grant = &grants_.prepare({GrantKind::kReservation, asker, call.store, ns.writers, now});
    }
    auto [id, limited] = chunks_.reserve(wanted);
    if (id == kNone) {
      out->limited = limited;
      break;
    }
    const Record& r = chunks_.record(id);
    grants_.add_entry(*grant, {r.generation(), id, static_cast<uint16_t>(groups), static_cast<uint16_t>(i)});
    out->chunks.emplace_back(i, parts_of(r, groups));
  }
  return grant;
}

// How many of the keys from `i` on need a record and may have one.
uint32_t Table::count_missing(uint32_t session, const ReserveCall& call, size_t i, const NewChunk& each) {
  uint32_t count = 0;
  for (; i < call.keys.size() && may_hold(session, each.bytes * (count + 1)); ++i) {
    const KeyEntry* e = chunks_.find(each.space, call.keys[i]);
    count += !e || e->any() == kNone;
  }
  return count;
}

CommitResult Table::commit(uint64_t session, uint64_t id, uint32_t rank, const std::vector<PartCommit>& parts,
                           uint64_t now) {
  Grant* g = grants_.of_session(session, id, GrantKind::kReservation);
  if (!g) throw TableError("grant_closed", "the reservation is closed and forgotten");
  grants_.require_ranks(*g, {&rank, 1});
  close_if_over(*g, now);

  std::vector<GrantEntry> entries = entries_of(*g);
  std::vector<NewPart> fresh = fresh_parts(entries, rank, parts);
  if (g->state() != GrantState::kOpen) {
    if (g->completed && fresh.empty()) return {static_cast<uint32_t>(entries.size()), grants_.remaining(*g)};
    grants_.discharge(*g, {&rank, 1});  // a late commit still discharges the rank (D1)
    throw TableError("grant_closed", "the reservation was aborted or is past its deadline");
  }
  for (const NewPart& part : fresh) {
    publish(part.at->committed, kCommitted | part.checksum);
    KVDOCK_PAUSE("publish.part_set");
  }
  return publish_whole(*g, entries, rank, now);
}

std::vector<GrantEntry> Table::entries_of(const Grant& g) const {
  std::vector<GrantEntry> entries;
  entries.reserve(g.entry_count);
  grants_.for_each_entry(g, [&](const GrantEntry& entry) { entries.push_back(entry); });
  return entries;
}

const GrantEntry& Table::entry_of(const std::vector<GrantEntry>& entries, uint32_t index, uint32_t group) {
  auto it = std::lower_bound(entries.begin(), entries.end(), index,
                             [](const GrantEntry& entry, uint32_t wanted) { return entry.index < wanted; });
  if (it == entries.end() || it->index != index || group >= kMaxGroups || !(it->groups >> group & 1))
    throw TableError("not_reserved", "the reservation has no such part", index, int64_t(entries.size()));
  return *it;
}

StoredPart* Table::part_of(Record& r, uint32_t group, uint32_t rank) {
  StoredPart* end = r.parts + r.part_count;
  StoredPart* part = std::find_if(r.parts, end, [&](auto& x) { return x.group == group && x.writer == rank; });
  return part == end ? nullptr : part;
}

RawResult Table::make_raw(uint64_t session, uint64_t id, uint32_t rank,
                          const std::vector<std::pair<uint32_t, uint32_t>>& parts, uint64_t now) {
  Grant* g = grants_.of_session(session, id, GrantKind::kReservation);
  if (!g) throw TableError("grant_closed", "the reservation is closed and forgotten");
  grants_.require_ranks(*g, {&rank, 1});
  close_if_over(*g, now);
  if (g->state() != GrantState::kOpen) throw TableError("grant_closed", "the reservation was aborted or is late");
  chunks_.set_now(now);
  std::vector<GrantEntry> entries = entries_of(*g);
  RawResult out;
  for (auto [index, group] : parts) {
    const GrantEntry& entry = entry_of(entries, index, group);
    Record& r = chunks_.record(entry.record);
    StoredPart* part = chunks_.records().names_live(entry) ? part_of(r, group, rank) : nullptr;
    if (!part) throw TableError("not_reserved", "the chunk has no such part", index);
    const uint64_t bytes = chunks_.namespaces()[r.space].groups[group].part_bytes;
    if (part->length != bytes) {
      if (part->committed & kCommitted) throw TableError("already_committed", "the part was committed packed", index);
      const auto number = static_cast<uint32_t>(part - r.parts);
      out.limited = may_hold(g->session, round_slot(bytes) - round_slot(part->length))
                        ? chunks_.make_raw(entry.record, number, g->session, segments_in_reach(g->session))
                        : Limit::held_bytes;
      if (out.limited != Limit::none) break;
    }
    out.parts.push_back({index, {part->group, part->writer, part->segment, part->offset, part->length, 0}});
  }
  return out;
}

void Table::require_one_checksum_each(std::vector<NewPart> parts) {
  std::sort(parts.begin(), parts.end(), [](const NewPart& a, const NewPart& b) { return a.at < b.at; });
  for (size_t i = 1; i < parts.size(); ++i)
    if (parts[i].at == parts[i - 1].at && parts[i].checksum != parts[i - 1].checksum)
      throw TableError("already_committed", "the commit names a part twice, with two checksums",
                       hex_of(parts[i].checksum), hex_of(parts[i - 1].checksum));
}

// Those of the named parts that are not committed yet.
std::vector<Table::NewPart> Table::fresh_parts(const std::vector<GrantEntry>& entries, uint32_t rank,
                                               const std::vector<PartCommit>& parts) {
  std::vector<NewPart> fresh;
  for (auto [index, group, checksum] : parts) {
    const GrantEntry& entry = entry_of(entries, index, group);
    if (checksum >= kChecksumPrime)
      throw TableError("bad_argument", "a checksum is out of range", int64_t(checksum), "less than 2^61 - 1");
    if (!chunks_.records().names_live(entry)) continue;  // a late repeat: the chunk was published and removed since
    StoredPart* part = part_of(chunks_.record(entry.record), group, rank);
    if (!part) throw TableError("not_reserved", "the chunk has no such part", index);
    if (!(part->committed & kCommitted))
      fresh.push_back({part, checksum});
    else if (part->committed != (kCommitted | checksum))
      throw TableError("already_committed", "the part was committed with another checksum", index);
  }
  require_one_checksum_each(fresh);
  return fresh;
}

// Publishes the chunks whose parts are all committed, and discharges the rank once all of its own are.
CommitResult Table::publish_whole(Grant& g, const std::vector<GrantEntry>& entries, uint32_t rank, uint64_t now) {
  uint32_t ready = 0;
  bool rank_done = true;
  for (const GrantEntry& entry : entries) {
    const Record& r = chunks_.record(entry.record);
    bool whole = true;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      bool set = r.parts[p].committed & kCommitted;
      whole = whole && set;
      if (r.parts[p].writer == rank) rank_done = rank_done && set;
    }
    if (whole && r.state() == RecordState::kReserved) {
      chunks_.publish_chunk(entry.record);
      promises_.stored(r.space, r.key, now);
    }
    ready += whole;
  }
  if (ready == entries.size()) g.completed = 1;
  KVDOCK_PAUSE("publish.completed");
  if (rank_done) grants_.discharge(g, {&rank, 1});
  return {ready, grants_.remaining(g)};
}

}  // namespace kvdock
