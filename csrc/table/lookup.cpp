// Lookup: the longest prefix that every KV group can serve, locked for all reader ranks in one call.
#include <algorithm>

#include "table/body_crc.h"

namespace kvdock {

struct Table::Scan {
  uint32_t space;
  uint32_t full_groups = 0;     // bit mask
  std::vector<uint32_t> found;  // per key: READY record or kNone
  std::vector<uint32_t> needs;  // per group: how many chunks before the end it must cover; 0 for full groups
  std::vector<std::vector<uint32_t>> runs;  // per windowed group, per chunk: how many in a row up to it have the group
};

Table::Scan Table::scan(uint32_t space, const std::vector<Key>& keys) {
  const Namespace& ns = spaces_[space];
  Scan s{space, 0, {}, {}, {}};
  for (uint32_t g = 0; g < ns.group_count; ++g) {
    const Group& group = ns.groups[g];
    if (group.kind == GroupKind::kFull) s.full_groups |= 1u << g;
    s.needs.push_back(group.kind == GroupKind::kFull ? 0
                      : group.kind == GroupKind::kState
                          ? 1
                          : (group.window_tokens + ns.chunk_tokens - 1) / ns.chunk_tokens);
  }
  s.runs.resize(ns.group_count);
  // The table does not fit the caches: ask for what every key will touch before looking at the first.
  for (const Key& key : keys) index_.prefetch(space, key);
  std::vector<uint32_t> ids(keys.size(), kNone);
  for (size_t i = 0; i < keys.size(); ++i) {
    KeyEntry* e = index_.find(space, keys[i]);
    if (!e || e->ready == kNone) continue;
    ids[i] = e->ready;
    prefetch_record(e->ready);
  }
  s.found.reserve(keys.size());
  for (uint32_t id : ids) {
    uint32_t has = id == kNone ? 0 : record(id).groups;
    if ((has & s.full_groups) != s.full_groups) break;
    for (uint32_t g = 0; g < ns.group_count; ++g) {
      if (!s.needs[g]) continue;
      uint32_t before = s.runs[g].empty() ? 0 : s.runs[g].back();
      s.runs[g].push_back(has >> g & 1 ? before + 1 : 0);
    }
    s.found.push_back(id);
  }
  return s;
}

// Longest n <= limit such that each windowed group holds every chunk its window before n touches (section 5).
uint32_t Table::best_hit(const Namespace& ns, const Scan& s, uint32_t limit) const {
  for (uint32_t n = limit; n > 0; --n) {
    bool whole = true;
    for (uint32_t g = 0; g < ns.group_count && whole; ++g)
      whole = s.needs[g] == 0 || s.runs[g][n - 1] >= std::min(n, s.needs[g]);
    if (whole) return n;
  }
  return 0;
}

// How many chunks from `first` lie wholly in segments that every rank has pinned: the end of that range.
uint32_t Table::within_pinned(const Scan& s, uint32_t session, uint32_t first, uint32_t end) {
  uint32_t below = segments_in_reach(session);
  if (below == kNone) return end;
  for (uint32_t i = first; i < end; ++i) {
    if (s.found[i] == kNone) continue;
    const Record& r = record(s.found[i]);
    for (uint32_t p = 0; p < r.part_count; ++p)
      if (r.parts[p].segment >= below) return i;
  }
  return end;
}

// How many chunks from `first` may be pinned before a byte cap is reached: the end of that range.
uint32_t Table::within_caps(const Scan& s, uint32_t session, uint32_t first, uint32_t end) {
  auto session_room = static_cast<uint64_t>(options_.session_cap * static_cast<double>(options_.limit_bytes));
  auto total_room = static_cast<uint64_t>(options_.total_cap * static_cast<double>(options_.limit_bytes));
  uint64_t mine = session_state_[session].held_bytes, all = held_bytes_;
  for (uint32_t i = first; i < end; ++i) {
    uint32_t id = s.found[i];
    if (id == kNone) continue;
    const RecordInfo& in = info_[id];
    uint64_t bytes = record_bytes(id);
    if (in.pins == 0) all += bytes;
    bool held = in.sole == session || (in.sole == kMany && shared_pins_.count(uint64_t{session} << 32 | id));
    if (!held) mine += bytes;
    if (mine > session_room || all > total_room) return i;
  }
  return end;
}

// The lease this call renews, or nullptr for a new one.
Grant* Table::current_lease(uint32_t session, const LookupCall& call, uint32_t* cell) {
  Grant* g = request_grant(session, GrantKind::kLease, call.request, cell);
  if (!g || call.epoch > g->epoch) return nullptr;
  if (call.epoch < g->epoch)
    throw TableRefusal("stale_epoch", "the request has looked up in a later epoch since", call.epoch, g->epoch);
  if (!g->live_holders())
    throw TableRefusal("grant_closed", "this epoch's lease has been released", call.epoch, call.epoch + 1);
  if (remaining(*g).size() != g->readers)
    throw TableRefusal("stale_epoch", "ranks have released this epoch's lease, so it was handed out", call.epoch,
                       call.epoch + 1);
  if (g->readers != call.readers)
    throw TableRefusal("id_reused", "the lookup was made for other readers", call.readers, g->readers);
  if (g->key_count && (call.keys.size() < g->key_count || !(call.keys[g->key_count - 1] == g->last_key)))
    throw TableRefusal("id_reused", "the lookup does not extend the keys asked for before", int64_t(call.keys.size()),
                       g->key_count);
  return g;
}

LookupResult Table::lookup(uint64_t session, uint64_t member, const LookupCall& call, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t session_cell, member_cell, cell = kNone;
  asker_at(session, member, &session_cell, &member_cell);
  uint32_t space = sessions_[session_cell].space;
  const Namespace& ns = spaces_[space];
  if (call.keys.size() > kMaxKeys)
    throw TableRefusal("bad_argument", "too many keys", int64_t(call.keys.size()), kMaxKeys);
  if (call.readers < 1 || call.readers > kMaxRanks)
    throw TableRefusal("bad_argument", "readers out of range", call.readers, "1..128");
  if (call.skip_tokens % ns.block_tokens)
    throw TableRefusal("skip_misaligned", "skip_prefix_tokens is not a multiple of the block size",
                       int64_t(call.skip_tokens), ns.block_tokens);
  Grant* g = current_lease(session_cell, call, &cell);

  Scan s = scan(space, call.keys);
  uint32_t hit = best_hit(ns, s, static_cast<uint32_t>(s.found.size()));
  uint64_t hit_tokens = uint64_t{hit} * ns.chunk_tokens;
  ++counters_.lookups;
  if (call.skip_tokens > hit_tokens)
    throw TableRefusal("skip_exceeds_hit", "skip_prefix_tokens is longer than the hit", int64_t(call.skip_tokens),
                       int64_t(hit_tokens));
  auto first = static_cast<uint32_t>(call.skip_tokens / ns.chunk_tokens);
  LookupResult out;
  out.first_chunk = first;
  uint32_t pinned = within_pinned(s, session_cell, first, hit);
  uint32_t room = within_caps(s, session_cell, first, pinned);
  if (room < hit) {
    auto tokens_up_to = [&](uint32_t end) {
      return std::max(uint64_t{best_hit(ns, s, end)} * ns.chunk_tokens, call.skip_tokens);
    };
    out.limited = room < pinned ? "held_bytes" : "pinning";
    out.unpinned_tokens = hit_tokens - tokens_up_to(pinned);
    hit_tokens = tokens_up_to(room);
    hit = best_hit(ns, s, room);
  }
  out.hit_tokens = hit_tokens;
  counters_.lookup_tokens += call.keys.size() * ns.chunk_tokens;
  counters_.hit_tokens += hit_tokens;

  uint64_t tick = ++header_->use_tick;
  for (uint32_t i = 0; i < hit; ++i)
    if (s.found[i] != kNone) stamp(record(s.found[i]), tick);
  if (hit_tokens <= call.skip_tokens) {
    if (g) out.lease = g->id;
    return out;
  }

  require_lines(hit - first);
  if (!g) {
    g = &new_grant(GrantKind::kLease, session_cell, member_cell, call.request, call.readers, now);
    g->epoch = call.epoch;
    cell = static_cast<uint32_t>(g - grants_);
    seal_grant(cell);
  }
  uint64_t reader = 0;
  std::memcpy(&reader, call.request.bytes, 8);
  lock_chunks(cell, s, first, hit, fold(reader, session) | 1, &out);
  g->key_count = static_cast<uint32_t>(call.keys.size());
  g->last_key = call.keys.back();
  g->asked_ms = now;
  out.lease = g->id;
  return out;
}

// Adds a line for each chunk of [first, hit) that the lease does not hold yet, and names its parts.
void Table::lock_chunks(uint32_t cell, const Scan& s, uint32_t first, uint32_t hit, uint64_t reader,
                        LookupResult* out) {
  const Namespace& ns = spaces_[s.space];
  out->parts.reserve((hit - first) * ns.writers * ns.group_count);
  out->part_ends.reserve(hit - first);
  std::vector<Line> have(hit, Line{0, kNone, 0, 0});
  for_each_line(grants_[cell], [&](const Line& line) {
    if (line.index < hit) have[line.index] = line;
  });
  for (uint32_t i = first; i < hit; ++i) {
    uint32_t groups = s.full_groups;
    for (uint32_t w = 0; w < ns.group_count; ++w)
      if (s.needs[w] && i + s.needs[w] >= hit) groups |= 1u << w;
    if (groups && s.found[i] != kNone) {
      Record& r = record(s.found[i]);
      bool held = have[i].record == s.found[i] && have[i].generation == r.generation();
      if (!held || (groups & ~have[i].groups)) {
        auto all = static_cast<uint16_t>(groups | (held ? have[i].groups : 0));
        add_line(cell, {r.generation(), s.found[i], all, static_cast<uint16_t>(i)});
      }
      if (r.temporary && r.temp_seen != reader && r.temp_seen != kTempKept)
        r.temp_seen = r.temp_seen ? kTempKept : reader;
      append_parts(r, groups, &out->parts);
    }
    out->part_ends.push_back(static_cast<uint32_t>(out->parts.size()));
  }
}

uint64_t Table::peek(uint32_t space, const std::vector<Key>& keys) {
  std::lock_guard lock(mutex_);
  if (space >= space_count_) throw TableRefusal("unknown_namespace", "no such namespace", space);
  Scan s = scan(space, keys);
  return uint64_t{best_hit(spaces_[space], s, static_cast<uint32_t>(s.found.size()))} * spaces_[space].chunk_tokens;
}

Changes Table::changes(uint32_t space, uint64_t since, size_t at_most) {
  std::lock_guard lock(mutex_);
  if (space >= space_count_) throw TableRefusal("unknown_namespace", "no such namespace", space);
  uint64_t life = (incarnation() & 0x1fffff) << 32;  // below 2^53, as JSON's readers want it
  Changes out = changes_.since(space, since >= life ? since - life : UINT64_MAX, at_most);
  out.next += life;
  return out;
}

}  // namespace kvdock
