// Lookup: the longest prefix that every KV group can serve, leased to all reader ranks in one call.
#include <algorithm>

#include "table/table.h"

namespace kvdock {

struct Table::Scan {
  uint32_t space;
  const Namespace& ns;
  uint32_t full_groups = 0;       // bit mask
  std::vector<uint32_t> found{};  // per key: READY record or kNone
  std::vector<uint32_t> needs{};  // per group: how many chunks before the end it must cover; 0 for full groups
  std::vector<std::vector<uint32_t>> runs{};  // per windowed group and chunk: how many in a row up to it have the group
};

Table::Scan Table::scan(uint32_t space, const std::vector<Key>& keys) {
  const Namespace& ns = chunks_.namespaces()[space];
  Scan s{space, ns};
  for (uint32_t g = 0; g < ns.group_count; ++g) {
    const Group& group = ns.groups[g];
    bool full = group.kind == GroupKind::kFull;
    if (full) s.full_groups |= 1u << g;
    s.needs.push_back(full ? 0 : (group.window_tokens + ns.chunk_tokens - 1) / ns.chunk_tokens);
  }
  s.runs.resize(ns.group_count);
  // The table does not fit the processor's caches: prefetch the memory of all keys before the first is looked up.
  for (const Key& key : keys) chunks_.records().prefetch_key(space, key);
  std::vector<uint32_t> ids(keys.size(), kNone);
  for (size_t i = 0; i < keys.size(); ++i) {
    const KeyEntry* e = chunks_.find(space, keys[i]);
    if (!e || e->ready == kNone) continue;
    ids[i] = e->ready;
    chunks_.records().prefetch(e->ready);
  }
  s.found.reserve(keys.size());
  for (uint32_t id : ids) {
    uint32_t has = id == kNone ? 0 : chunks_.record(id).groups;
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

// The longest n <= limit such that each windowed group has every chunk that its window before n touches.
uint32_t Table::best_hit(const Scan& s, uint32_t limit) {
  for (uint32_t n = limit; n > 0; --n) {
    bool whole = true;
    for (uint32_t g = 0; g < s.ns.group_count && whole; ++g)
      whole = s.needs[g] == 0 || s.runs[g][n - 1] >= std::min(n, s.needs[g]);
    if (whole) return n;
  }
  return 0;
}

// Grants of the session may name slots only in segments with ids below the result; kNone: in any segment.
uint32_t Table::segments_in_reach(uint32_t session) {
  uint32_t through = members_.pinned_through(session);
  return through >= chunks_.slots().segment_end() ? kNone : through;
}

// The index from `first` on of the first chunk that is not wholly in segments that every rank has page-locked; else
// `end`.
uint32_t Table::within_pinned(const Scan& s, uint32_t session, uint32_t first, uint32_t end) {
  uint32_t below = segments_in_reach(session);
  if (below == kNone) return end;
  for (uint32_t i = first; i < end; ++i) {
    if (s.found[i] == kNone) continue;
    const Record& r = chunks_.record(s.found[i]);
    for (uint32_t p = 0; p < r.part_count; ++p)
      if (r.parts[p].segment >= below) return i;
  }
  return end;
}

// The index from `first` on of the first chunk that would exceed a byte cap if all up to it were pinned; else `end`.
uint32_t Table::within_caps(const Scan& s, uint32_t session, uint32_t first, uint32_t end) {
  uint64_t mine = chunks_.pins().held_bytes(session), all = chunks_.pins().held_bytes();
  for (uint32_t i = first; i < end; ++i) {
    uint32_t id = s.found[i];
    if (id == kNone) continue;
    uint64_t bytes = chunks_.records().bytes_of(id);
    if (!chunks_.pins().has(id)) all += bytes;
    if (!chunks_.pins().has(id, session)) mine += bytes;
    if (mine > session_cap_bytes() || all > total_cap_bytes()) return i;
  }
  return end;
}

// The lease that this call renews; nullptr: the call needs a new one.
Grant* Table::current_lease(uint32_t session, const LookupCall& call) {
  Grant* g = grants_.of_request(session, GrantKind::kLease, call.request);
  if (!g || call.epoch > g->epoch) return nullptr;
  if (call.epoch < g->epoch)
    throw TableError("stale_epoch", "the request has looked up in a later epoch since", call.epoch, g->epoch);
  if (!g->live_holders())
    throw TableError("grant_closed", "this epoch's lease has been released", call.epoch, call.epoch + 1);
  if (grants_.remaining(*g).size() != g->readers)
    throw TableError("stale_epoch", "ranks have released this epoch's lease, so it was handed out", call.epoch,
                     call.epoch + 1);
  if (g->readers != call.readers)
    throw TableError("id_reused", "the lookup was made for other readers", call.readers, g->readers);
  if (g->key_count && (call.keys.size() < g->key_count || !(call.keys[g->key_count - 1] == g->last_key)))
    throw TableError("id_reused", "the lookup does not extend the keys asked for before", int64_t(call.keys.size()),
                     g->key_count);
  return g;
}

LookupResult Table::lookup(uint64_t session, uint64_t member, const LookupCall& call, uint64_t now) {
  Members::Asker asker = members_.asker(session, member);
  uint32_t space = members_.session(asker.session).space();
  const Namespace& ns = chunks_.namespaces()[space];
  if (call.keys.size() > kMaxKeys)
    throw TableError("bad_argument", "too many keys", int64_t(call.keys.size()), kMaxKeys);
  if (call.readers < 1 || call.readers > kMaxRanks)
    throw TableError("bad_argument", "readers out of range", call.readers, "1.." + std::to_string(kMaxRanks));
  if (call.skip_tokens % ns.block_tokens)
    throw TableError("skip_misaligned", "skip_prefix_tokens is not a multiple of the block size",
                     int64_t(call.skip_tokens), ns.block_tokens);
  Grant* g = current_lease(asker.session, call);
  chunks_.set_now(now);

  Scan s = scan(space, call.keys);
  LookupResult out;
  uint32_t hit = best_hit(s, static_cast<uint32_t>(s.found.size()));
  uint32_t stored = hit;
  hit = limit_hit(s, asker.session, call.skip_tokens, hit, &out);
  promise(asker, call, s, stored, now, &out);
  counters_.lookup_tokens += call.keys.size() * ns.chunk_tokens;
  counters_.hit_tokens += out.hit_tokens;
  // One request is one use of each chunk that was found, even where a limit cuts the hit short.
  uint64_t tick = region_.header.use_tick += g ? 1 : std::max<uint64_t>(1, call.keys.size());
  if (!g) chunks_.asked(tick, call.keys.size());
  for (uint32_t id : s.found) {
    if (id == kNone) continue;
    if (g) chunks_.stamp(id, tick);
    else chunks_.use(id, tick, call.is_apart);
  }
  // The keys may start inside a sequence: then the chunks before them are in use as well.
  uint32_t first = s.found.empty() ? kNone : s.found[0];
  if (first != kNone) chunks_.stamp_path(space, chunks_.record(first).parent, tick);
  if (out.hit_tokens <= call.skip_tokens) {
    if (g) out.lease = g->id;
    return out;
  }

  grants_.require_entries(hit - out.first_chunk);
  if (!g) {
    g = &grants_.prepare({GrantKind::kLease, asker, call.request, call.readers, now});
    g->epoch = call.epoch;
    grants_.open(*g);
  }
  uint64_t reader = 0;
  std::memcpy(&reader, call.request.bytes, 8);
  lock_chunks(*g, s, out.first_chunk, hit, fold(reader, session) | 1, &out);
  g->key_count = static_cast<uint32_t>(call.keys.size());
  g->last_key = call.keys.back();
  g->asked_ms = now;
  out.lease = g->id;
  return out;
}

// The live session that stores the chunk now, or has promised to; kNone: none does, or the chunk is stored already.
uint32_t Table::storer_of(uint32_t space, const Key& key, uint64_t now) {
  const KeyEntry* e = chunks_.find(space, key);
  if (e && e->reserved != kNone) {
    uint32_t session = chunks_.pins().only_session(e->reserved);  // only its reservation pins a RESERVED record
    if (session != kNone && members_.lives(session)) return session;
  }
  if (e && e->ready != kNone) return kNone;
  const Promise* p = promises_.find(space, key);
  return p && holds(*p, now) ? members_.session_cell(p->session) : kNone;
}

bool Table::holds(const Promise& promise, uint64_t now) const {
  std::optional<uint32_t> session = members_.find_session(promise.session);
  if (!session || now > promise.until_ms || members_.session(*session).space() != promise.space) return false;
  return members_.is_live(promise.member) && members_.lives(*session);
}

// Reports how far other sessions store the prefix beyond its first `hit` chunks, which are stored, and promises the
// chunks that no other session stores.
void Table::promise(const Members::Asker& asker, const LookupCall& call, const Scan& s, uint32_t hit, uint64_t now,
                    LookupResult* out) {
  auto is_there = [&](uint32_t i) { return i < s.found.size() && s.found[i] != kNone; };
  auto count = static_cast<uint32_t>(call.keys.size());
  uint32_t end = hit;
  for (uint32_t i = hit; i < count; ++i) {
    if (is_there(i)) continue;
    uint32_t by = storer_of(s.space, call.keys[i], now);
    if (by == kNone || by == asker.session) break;
    end = i + 1;
  }
  if (end > hit) {
    out->being_stored = uint64_t{end} * s.ns.chunk_tokens;
    out->committed = uint64_t{hit} * s.ns.chunk_tokens;
  }
  if (!call.computes) return;
  std::vector<Key> wanted;
  for (uint32_t i = end; i < count; ++i) {
    if (is_there(i)) continue;
    uint32_t by = storer_of(s.space, call.keys[i], now);
    if (by == kNone || by == asker.session) wanted.push_back(call.keys[i]);
  }
  uint64_t session = members_.session_id(asker.session), member = members_.member_id(asker.member);
  promises_.make({session, member, call.request, s.space, s.ns.tenant}, wanted, now);
}

void Table::drop_promises(const Grant& reservation) {
  if (promises_.empty() || reservation.kind != GrantKind::kReservation) return;
  grants_.for_each_entry(reservation, [&](const GrantEntry& entry) {
    const Record& r = chunks_.record(entry.record);
    if (!chunks_.records().names_live(entry)) return;
    const bool was_found = r.state() == RecordState::kQuarantined && chunks_.records().was_cleared(r);  // by find()
    if (r.state() == RecordState::kReserved || was_found) promises_.drop(r.space, r.key);
  });
}

void Table::withdraw(uint64_t session, const Id16& request) {
  members_.session_cell(session);
  promises_.withdraw(session, request);
}

// Shortens a hit of `hit` chunks to the limits of this session, and writes the answer's tokens. The skipped tokens need
// no grant, so they always count as hit.
uint32_t Table::limit_hit(const Scan& s, uint32_t session, uint64_t skip_tokens, uint32_t hit, LookupResult* out) {
  uint64_t chunk_tokens = s.ns.chunk_tokens;
  out->hit_tokens = hit * chunk_tokens;
  ++counters_.lookups;
  if (skip_tokens > out->hit_tokens)
    throw TableError("skip_exceeds_hit", "skip_prefix_tokens is longer than the hit", int64_t(skip_tokens),
                     int64_t(out->hit_tokens));
  uint32_t first = out->first_chunk = static_cast<uint32_t>(skip_tokens / chunk_tokens);
  uint32_t pinned = within_pinned(s, session, first, hit);
  uint32_t allowed = within_caps(s, session, first, pinned);
  if (allowed == hit) return hit;
  auto tokens_up_to = [&](uint32_t end) { return std::max(best_hit(s, end) * chunk_tokens, skip_tokens); };
  out->limited = allowed < pinned ? Limit::held_bytes : Limit::pinning;
  out->unpinned_tokens = out->hit_tokens - tokens_up_to(pinned);
  out->hit_tokens = tokens_up_to(allowed);
  return best_hit(s, allowed);
}

// Adds an entry for each chunk of [first, hit) that the lease does not hold yet, and appends its parts to the answer.
void Table::lock_chunks(Grant& g, const Scan& s, uint32_t first, uint32_t hit, uint64_t reader, LookupResult* out) {
  out->parts.reserve((hit - first) * s.ns.writers * s.ns.group_count);
  out->part_ends.reserve(hit - first);
  std::vector<GrantEntry> have(hit, GrantEntry{0, kNone, 0, 0});
  grants_.for_each_entry(g, [&](const GrantEntry& entry) {
    if (entry.index < hit) have[entry.index] = entry;
  });
  for (uint32_t i = first; i < hit; ++i) {
    uint32_t groups = s.full_groups;
    for (uint32_t w = 0; w < s.ns.group_count; ++w)
      if (s.needs[w] && i + s.needs[w] >= hit) groups |= 1u << w;
    if (groups && s.found[i] != kNone) {
      Record& r = chunks_.record(s.found[i]);
      bool held = have[i].record == s.found[i] && have[i].generation == r.generation();
      if (!held || (groups & ~have[i].groups)) {
        auto all = static_cast<uint16_t>(groups | (held ? have[i].groups : 0));
        grants_.add_entry(g, {r.generation(), s.found[i], all, static_cast<uint16_t>(i)});
      }
      if (r.temporary && r.temp_seen != reader && r.temp_seen != kTempKept)
        r.temp_seen = r.temp_seen ? kTempKept : reader;
      append_parts(r, groups, &out->parts);
    }
    out->part_ends.push_back(static_cast<uint32_t>(out->parts.size()));
  }
}

uint64_t Table::peek(uint32_t space, const std::vector<Key>& keys) {
  chunks_.namespaces().require(space);
  Scan s = scan(space, keys);
  return uint64_t{best_hit(s, static_cast<uint32_t>(s.found.size()))} * s.ns.chunk_tokens;
}

std::vector<FateRun> Table::fates(uint32_t space, const std::vector<Key>& keys) {
  chunks_.namespaces().require(space);
  const Records& records = chunks_.records();
  std::vector<FateRun> runs;
  for (const Key& key : keys) {
    FateRun one{1, FateRun::kUnknown, 0, 0};
    const KeyEntry* e = chunks_.find(space, key);
    if (e && e->any() != kNone) {
      one.fate = e->ready != kNone ? FateRun::kReady : FateRun::kBeingStored;
    } else if (std::optional<Departure> gone = records.departure(space, key)) {
      one = {1, FateRun::kGone + static_cast<uint32_t>(gone->why), gone->at_ms, gone->used_ms};
    }
    if (!runs.empty() && runs.back().fate == one.fate) ++runs.back().chunks;
    else runs.push_back(one);
  }
  return runs;
}

uint32_t Table::children(uint32_t space, const Key& key) {
  chunks_.namespaces().require(space);
  const KeyEntry* e = chunks_.find(space, key);
  return e ? e->children : 0;
}

Changes Table::changes(uint32_t space, uint64_t since, size_t at_most) {
  chunks_.namespaces().require(space);
  uint64_t base = changes_base();
  Changes out = chunks_.records().changes().since(space, since >= base ? since - base : UINT64_MAX, at_most);
  std::get<1>(out) += base;
  return out;
}

AllChanges Table::all_changes(uint64_t since, size_t at_most) {
  uint64_t base = changes_base();
  AllChanges out = chunks_.records().changes().since(since >= base ? since - base : UINT64_MAX, at_most);
  std::get<1>(out) += base;
  return out;
}

}  // namespace kvdock
