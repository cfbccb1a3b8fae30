// Construction, and the calls about the pool, members, grants and views. Lookups: lookup.cpp. Stores: store.cpp.
#include "table/table.h"

#include <algorithm>
#include <set>

namespace kvdock {

namespace {
constexpr size_t kDroppedForOne = 64;  // idle namespaces, at most, to make room for another one: it takes 9 µs each
}  // namespace

Table::Table(const Mapping& memory, const TableOptions& options)
    : options_(options),
      region_(Region::create(memory, options)),
      chunks_(region_, options.grace_ms),
      members_(region_, chunks_.namespaces()),
      grants_(region_, members_, chunks_) {
  members_.begin_empty();
  grants_.begin_empty();
  remember_widest_caps();
  region_.finish();
}

void Table::remember_widest_caps() {
  widest_session_cap_ = std::max(widest_session_cap_, cap_bytes(options_.session_cap));
  widest_total_cap_ = std::max(widest_total_cap_, cap_bytes(options_.total_cap));
}

// ---- pool

void Table::set_limits(uint64_t limit_bytes, double session_cap, double total_cap) {
  if (uint64_t total = chunks_.slots().total_bytes(); limit_bytes < total)
    throw TableError("bad_argument", "the limit is below what the segments hold; retire some first",
                     int64_t(limit_bytes), int64_t(total));
  for (double cap : {session_cap, total_cap})
    if (!(cap > 0 && cap <= 1))
      throw TableError("bad_argument", "a cap is no share of the pool", std::to_string(cap), "above 0, at most 1");
  region_.header.limit_bytes = options_.limit_bytes = limit_bytes;
  options_.session_cap = session_cap;
  options_.total_cap = total_cap;
  remember_widest_caps();
}

// ---- namespaces, sessions and members

uint32_t Table::add_namespace(const NewNamespace& wanted) {
  if (!chunks_.namespaces().has_room()) drop_idle_namespaces(kDroppedForOne);
  return chunks_.namespaces().add(wanted);
}

std::vector<uint32_t> Table::drop_idle_namespaces(size_t most) {
  chunks_.drop_idle(most);
  return chunks_.namespaces().live();
}

uint64_t Table::open_session(const Id16& nonce, uint32_t space, uint64_t now) {
  chunks_.namespaces().require(space);
  chunks_.set_now(now);
  return members_.open_session(nonce, space, now);
}

void Table::move_session(uint64_t session, uint32_t space, uint64_t now) {
  uint32_t cell = members_.session_cell(session);
  chunks_.namespaces().require(space);
  uint32_t filed = members_.session(cell).space();
  if (!chunks_.namespaces().differ_in_weights_alone(space, filed))
    throw TableError("bad_argument", "a session moves to a namespace of another manifest", space, filed);
  chunks_.set_now(now);
  members_.file_session(cell, space);
}

constexpr uint64_t kAsk = 8;  // what a question counts without its ranks

// The grants about which the member is asked. For a lease, the member that asked for it is asked first, and the ranks
// once it has finished or is dead; for a reservation, the ranks are asked once it is closed.
std::vector<Question> Table::heartbeat(uint64_t member, uint64_t now, uint64_t most) {
  uint32_t cell = members_.member_cell(member);
  members_.heartbeat(cell, now);
  std::vector<Question> out;
  Work asked(most);
  for (const Grant* g : grants_.held_by(members_.member(cell).session)) {
    if (asked.is_over()) break;
    bool asker_out = g->asker_done || members_.member(g->asker).state() >= MemberState::kDead;
    if (g->kind == GrantKind::kLease && !asker_out) {
      if (g->asker == cell && now >= g->asked_ms + options_.ask_ms) {
        asked.spend(kAsk);
        out.emplace_back(g->id, std::vector<uint32_t>());
      }
      continue;
    }
    if (g->kind == GrantKind::kReservation && g->state() == GrantState::kOpen) continue;
    std::vector<uint32_t> ranks;
    for (uint32_t r : grants_.remaining(*g))
      if (members_.speaker(g->session, r, g->asker) == cell) ranks.push_back(r);
    if (ranks.empty()) continue;
    asked.spend(kAsk + ranks.size());
    out.emplace_back(g->id, std::move(ranks));
  }
  return out;
}

// Its lock was found free: its unfinished stores are never published. Its holders are discharged when it is gone.
bool Table::member_dead(uint64_t member, uint64_t now, uint64_t most) {
  uint32_t cell = members_.member_cell(member);
  Work work(most);
  if (members_.member(cell).state() < MemberState::kDead) members_.set_dead(cell, now);
  grants_.member_dead(cell, work);
  return work.is_over();
}

void Table::gone(uint32_t member, Work& work) {
  uint32_t session = members_.member(member).session;
  work.spend(kChangeState);
  grants_.member_gone(member, work);
  if (work.is_over()) return;
  if (members_.set_gone(member) == Members::Left::none) members_.close_session(session);
  else if (!grants_.names(member)) members_.forget(member);
}

bool Table::leave(uint64_t member, uint64_t most) {
  uint32_t cell = members_.member_cell(member);
  if (members_.member(cell).state() == MemberState::kGone) return false;
  Work work(most);
  gone(cell, work);
  if (work.is_over() && members_.member(cell).state() < MemberState::kDead)
    members_.set_dead(cell, region_.header.clock_ms);
  return work.is_over();
}

bool Table::tick(uint64_t now, uint64_t most) {
  Work work(most);
  region_.header.clock_ms = now;
  chunks_.set_now(now);
  Members::Due due = members_.age(now, options_, work);
  chunks_.see_chunks(work);
  chunks_.end_preferences(now, work);
  grants_.close_late(now, work);
  promises_.sweep([&](const Promise& promise) { return holds(promise, now); });
  for (uint32_t session : due.empty) members_.close_session(session);
  for (uint32_t member : due.settled) {
    if (work.is_over()) break;
    gone(member, work);
  }
  return work.is_over();
}

// ---- grants: calls of holders and askers

std::vector<uint32_t> Table::release(uint64_t session, uint64_t id, const std::vector<uint32_t>& ranks) {
  Grant* g = grants_.of_session(session, id, GrantKind::kLease);
  if (!g) return {};
  grants_.require_ranks(*g, ranks);
  grants_.discharge(*g, ranks);
  return grants_.remaining(*g);
}

std::vector<uint32_t> Table::abort(uint64_t session, uint64_t id, const std::vector<uint32_t>& ranks) {
  Grant* g = grants_.of_session(session, id, GrantKind::kReservation);
  if (!g) return {};
  if (ranks.empty()) throw TableError("bad_argument", "an abort names no ranks", 0, "1 or more ranks");
  grants_.require_ranks(*g, ranks);
  if (g->live_holders()) {
    drop_promises(*g);
    grants_.close_reservation(*g);
  }
  grants_.discharge(*g, ranks);
  return grants_.remaining(*g);
}

void Table::cancel(uint64_t session, uint64_t member, uint64_t id) {
  uint32_t asker = members_.member_cell(member);
  Grant* g = grants_.of_session(session, id, std::nullopt);
  if (!g) return;
  if (g->asker != asker) throw TableError("not_the_asker", "only the member that asked may cancel", hex_of(id));
  auto left = grants_.remaining(*g);
  if (left.empty()) return;
  if (left.size() != g->readers)
    throw TableError("handed_out", "a rank has answered for this grant, so its plan was handed out",
                     int64_t(g->readers - left.size()), 0);
  drop_promises(*g);
  grants_.discharge(*g, left);
}

// D1, as the answer to heartbeat()'s question: it also discharges holders of closed grants, and does nothing for
// forgotten ones.
void Table::done(uint64_t member, uint64_t id, const std::vector<uint32_t>& ranks) {
  uint32_t cell = members_.member_cell(member);
  Grant* g = grants_.find(id);
  if (!g) return;
  grants_.require_own(*g, members_.member(cell).session);
  if (ranks.empty()) {
    if (g->asker != cell)
      throw TableError("not_the_asker", "only the member that asked may end its own part", hex_of(id));
    g->asker_done = 1;
    return;
  }
  grants_.require_ranks(*g, ranks);
  bool unfinished = std::any_of(ranks.begin(), ranks.end(), [&](uint32_t r) { return g->holds(r); });
  if (g->kind == GrantKind::kReservation && unfinished) {  // that rank never commits now
    drop_promises(*g);
    grants_.close_reservation(*g);
  }
  grants_.discharge(*g, ranks);
}

void Table::keep(uint64_t member, uint64_t id, uint64_t now) {
  uint32_t cell = members_.member_cell(member);
  if (Grant* g = grants_.find(id); g && g->asker == cell) g->asked_ms = now;
}

// A lease with entries has a holder, so it pins its records.
std::map<uint32_t, uint32_t> Table::ready_of(uint64_t session, uint64_t id, const std::vector<uint32_t>& chunks) {
  std::map<uint32_t, uint32_t> found;
  Grant* g = grants_.of_session(session, id, GrantKind::kLease);
  if (!g) return found;
  std::set<uint32_t> wanted(chunks.begin(), chunks.end());
  grants_.for_each_entry(*g, [&](const GrantEntry& entry) {
    if (!wanted.count(entry.index)) return;
    if (chunks_.record(entry.record).state() == RecordState::kReady) found.emplace(entry.record, entry.index);
  });
  return found;
}

std::vector<LeasedPart> Table::leased_parts(uint64_t session, uint64_t id, const std::vector<uint32_t>& chunks) {
  std::vector<LeasedPart> out;
  for (auto [record, index] : ready_of(session, id, chunks)) {
    std::vector<PartAt> parts;
    append_parts(chunks_.record(record), ~0u, &parts);
    for (const PartAt& part : parts) out.emplace_back(index, part);
  }
  return out;
}

Damaged Table::mismatch(uint64_t session, uint64_t id, const std::vector<uint32_t>& chunks) {
  Damaged found;
  std::vector<uint32_t> ids;
  for (auto [record, index] : ready_of(session, id, chunks)) {
    found.space = chunks_.record(record).space;  // a lease is of one namespace
    found.keys.push_back(chunks_.record(record).key);
    ids.push_back(record);
  }
  counters_.mismatches += take_out(std::move(ids), Gone::mismatched);
  return found;
}

// ---- hints

RetainResult Table::retain(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms) {
  chunks_.namespaces().require(space);
  if (priority < 1 || priority > kMostPriority)
    throw TableError("bad_argument", "a priority of retained chunks is out of range", priority,
                     "1.." + std::to_string(kMostPriority));
  if (until_ms == 0)
    throw TableError("bad_argument", "retained chunks have no end", 0, "milliseconds of the server clock");
  RetainResult out;
  for (const Key& key : keys) {
    const KeyEntry* e = chunks_.find(space, key);
    if (!e || e->any() == kNone) break;
    Preferences::Retained done = chunks_.retain(e->any(), static_cast<int8_t>(priority), until_ms);
    out.chunks += done == Preferences::Retained::yes;
    out.refused += done == Preferences::Retained::no_capacity;
  }
  counters_.refused_retains += out.refused;
  return out;
}

LowerResult Table::lower(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms,
                         const Key& following) {
  chunks_.namespaces().require(space);
  if (priority < kConversationEnded || priority > 0)
    throw TableError("bad_argument", "a lowered priority is out of range", priority,
                     std::to_string(kConversationEnded) + "..0");
  const KeyEntry* below = following.names_chunk() ? chunks_.find(space, following) : nullptr;
  uint32_t own_children = below && below->any() != kNone;  // children in this chain
  LowerResult out;
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    const KeyEntry* e = chunks_.find(space, *key);
    if (e && e->children > own_children) {
      out.shared = true;
      break;
    }
    own_children = e && e->any() != kNone;
    if (!own_children) continue;
    chunks_.set_priority(e->any(), static_cast<int8_t>(priority), until_ms);
    ++out.chunks;
  }
  return out;
}

// ---- administration

uint32_t Table::take_out(std::vector<uint32_t> ids, Gone why) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (uint32_t id : ids) chunks_.take_out(id, why);
  return static_cast<uint32_t>(ids.size());
}

uint32_t Table::remove(uint32_t space, const std::vector<Key>& keys) {
  chunks_.namespaces().require(space);
  std::vector<uint32_t> ready, reserved;
  for (const Key& k : keys) {
    const KeyEntry* e = chunks_.find(space, k);
    if (!e) continue;
    if (e->ready != kNone) ready.push_back(e->ready);
    if (e->reserved != kNone) reserved.push_back(e->reserved);
    promises_.drop(space, k);
  }
  take_out(std::move(reserved), Gone::deleted);  // its writer's commit publishes nothing
  return take_out(std::move(ready), Gone::deleted);
}

uint64_t Table::raise_generation(uint32_t space, uint64_t least) {
  chunks_.namespaces().require(space);
  uint64_t now = chunks_.namespaces().generation(space);
  if (least > kMostGeneration || now >= kMostGeneration)
    throw TableError("bad_argument", "a namespace's generation is out of range", int64_t(least),
                     int64_t(kMostGeneration));
  if (least != 0 && least <= now) return now;
  chunks_.raise_generation(space, std::max(now + 1, least));
  return chunks_.namespaces().generation(space);
}

int64_t Table::close_cleared(uint64_t start, uint64_t most) {
  Work work(most);
  auto next = static_cast<int64_t>(start);
  while (next >= 0) {
    auto [g, after] = grants_.next_cleared(static_cast<uint64_t>(next), work);
    next = after;
    if (!g) break;
    drop_promises(*g);
    grants_.close_reservation(*g);
  }
  return next;
}

// A reservation publishes nothing after its deadline, or once its namespace was cleared.
void Table::close_if_over(Grant& g, uint64_t now) {
  if (g.state() != GrantState::kOpen) return;
  const bool cleared = grants_.was_cleared(g);
  if (cleared) drop_promises(g);
  if (cleared || now > g.deadline_ms) grants_.close_reservation(g);
}

uint32_t Table::keep_chunks(uint32_t space, const std::vector<Key>& keys, uint64_t until_ms) {
  chunks_.namespaces().require(space);
  uint32_t found = 0;
  for (const Key& key : keys) {
    const KeyEntry* e = chunks_.find(space, key);
    if (!e || e->ready == kNone) continue;
    chunks_.keep(e->ready, until_ms);
    ++found;
  }
  return found;
}

// ---- views

SessionInfo Table::session_info(uint32_t cell) {
  const Session& s = members_.session(cell);
  auto [leases, reservations] = grants_.count(cell);
  return {members_.session_id(cell), s.nonce, s.space(), leases, reservations, chunks_.pins().held_bytes(cell),
          s.opened_ms};
}

std::vector<SessionInfo> Table::sessions(const std::optional<std::vector<uint64_t>>& named) {
  std::vector<SessionInfo> out;
  for (uint32_t cell : members_.open_sessions(named)) out.push_back(session_info(cell));
  return out;
}

std::optional<SessionInfo> Table::most_holding(bool by_grants) {
  std::optional<SessionInfo> most;
  auto held = [by_grants](const SessionInfo& s) { return by_grants ? s.leases + s.reservations : s.held_bytes; };
  for (uint32_t cell : grants_.holders())
    if (SessionInfo one = session_info(cell); !most || held(one) > held(*most)) most = one;
  return most;
}

const char* Table::state_of(uint32_t space, const Key& key) {
  const KeyEntry* e = chunks_.find(space, key);
  if (e && e->ready != kNone) return "ready";
  return e && e->reserved != kNone ? "reserved" : "absent";
}

std::map<std::string, uint64_t> Table::stats() {
  const Grants::Count& grants = grants_.count();
  const Records::Sums& sums = chunks_.records().sums();
  return {
      {"pool_bytes", chunks_.slots().total_bytes()},
      {"free_bytes", chunks_.slots().free_bytes()},
      {"reserved_bytes", sums.bytes[1]},
      {"ready_bytes", sums.bytes[2]},
      {"quarantined_bytes", sums.bytes[3]},
      {"kv_bytes", sums.kv_bytes[2]},
      {"raw_parts", sums.raw_parts[2]},
      {"held_bytes", chunks_.pins().held_bytes()},
      {"kept_bytes", chunks_.preferences().kept_bytes()},
      {"retained_bytes", chunks_.preferences().retained_bytes()},
      {"limit_bytes", options_.limit_bytes},
      {"reserved_chunks", sums.records[1]},
      {"ready_chunks", sums.records[2]},
      {"quarantined_chunks", sums.records[3]},
      {"sessions", members_.session_count()},
      {"members", members_.member_count()},
      {"leases", grants.leases},
      {"reservations", grants.reservations},
      {"lookups", counters_.lookups},
      {"lookup_tokens", counters_.lookup_tokens},
      {"hit_tokens", counters_.hit_tokens},
      {"reserve_calls", counters_.reservations},
      {"stored_chunks", chunks_.counters().stored_chunks},
      {"stored_bytes", chunks_.counters().stored_bytes},
      {"aborted_chunks", grants_.aborted_chunks()},
      {"evicted_chunks", chunks_.eviction().evicted_chunks()},
      {"evicted_by_operator", chunks_.eviction().evicted_by_operator()},
      {"oldest_used_ms", chunks_.eviction().oldest_used_ms()},
      {"mismatches", counters_.mismatches},
      {"refused_retains", counters_.refused_retains},
  };
}

void Table::check_integrity() {
  require(region_.header.magic == kTableMagic && region_.header.geometry == table_geometry(),
          "the header is not this table's");
  members_.check();
  chunks_.check(grants_.check());
  promises_.check();
  for (uint32_t cell : members_.gone())
    require(grants_.names(cell), "a member that nothing names is not forgotten", cell);
  for (uint32_t cell : members_.open_sessions())
    require(static_cast<double>(chunks_.pins().held_bytes(cell)) <= widest_session_cap_,
            "I7: a session is over its cap", cell);
  require(static_cast<double>(chunks_.pins().held_bytes()) <= widest_total_cap_, "I7: the pool is over its cap");
  check_tenants();
}

void Table::check_tenants() {
  std::vector<Usage> counted = chunks_.records().count_usage();
  for (uint32_t cell : members_.open_sessions()) {
    Usage& usage = counted.at(chunks_.namespaces().tenant_of(members_.session(cell).space()));
    ++usage.sessions;
    usage.members += members_.members_of(cell);
    usage.grants += static_cast<uint32_t>(grants_.held_by(cell).size());
  }
  chunks_.namespaces().tenants().check(counted);
}

}  // namespace kvdock
