// Sessions and members: who lives, who is suspect, who is dead, who is gone (section 2).
#include <algorithm>

#include "table/body_crc.h"
#include "base/pause.h"

namespace kvdock {

namespace {
constexpr uint32_t kCellMask = (1u << 20) - 1;
constexpr const char* kStates[] = {"free", "live", "suspect", "dead", "gone"};
}  // namespace

Session& Table::session_at(uint64_t id, uint32_t* cell) {
  *cell = static_cast<uint32_t>(id & kCellMask);
  if (*cell >= kMaxSessions || !sessions_[*cell].live() || session_id(*cell) != id)
    throw TableRefusal("unknown_session", "no such session", int64_t(id));
  return sessions_[*cell];
}

Member& Table::member_at(uint64_t id, uint32_t* cell) {
  *cell = static_cast<uint32_t>(id & kCellMask);
  if (*cell >= kMaxMembers || members_[*cell].state() == MemberState::kFree || member_id(*cell) != id)
    throw TableRefusal("unknown_member", "no such member", int64_t(id));
  return members_[*cell];
}

// Only a live member of the session gets new grants.
Member& Table::asker_at(uint64_t session, uint64_t member, uint32_t* session_cell, uint32_t* member_cell) {
  session_at(session, session_cell);
  Member& m = member_at(member, member_cell);
  if (m.session != *session_cell)
    throw TableRefusal("unknown_member", "the member belongs to another session", int64_t(member));
  if (m.state() == MemberState::kSuspect)
    throw TableRefusal("member_suspect", "heartbeats are missing; send one first", "suspect", "live");
  if (m.state() != MemberState::kLive)
    throw TableRefusal("member_dead", "the member's lock was seen free", kStates[static_cast<int>(m.state())], "live");
  return m;
}

uint64_t Table::open_session(const Id16& nonce, uint32_t space, uint64_t now) {
  std::lock_guard lock(mutex_);
  if (space >= space_count_) throw TableRefusal("unknown_namespace", "no such namespace", space);
  for (auto& [cell, state] : session_state_) {
    if (!(sessions_[cell].nonce == nonce)) continue;
    if (sessions_[cell].space != space)
      throw TableRefusal("id_reused", "the instance attached with another manifest", space, sessions_[cell].space);
    return session_id(cell);
  }
  if (free_sessions_.empty()) throw TableRefusal("table_full", "no session left", kMaxSessions);
  uint32_t cell = free_sessions_.back();
  free_sessions_.pop_back();
  Session& s = sessions_[cell];
  s.space = space;
  s.nonce = nonce;
  s.opened_ms = now;
  std::fill(std::begin(s.rank_member), std::end(s.rank_member), kNone);
  s.crc = body_crc(s);
  KVDOCK_PAUSE("attach.session_written");
  publish(s.word, sealed((s.use() + 1) << 1 | 1));
  KVDOCK_PAUSE("attach.session_open");
  session_state_[cell];
  return session_id(cell);
}

uint64_t Table::add_member(uint64_t session, const Id16& nonce, const std::vector<uint32_t>& ranks, bool scheduler,
                           uint64_t lock_offset, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t session_cell;
  Session& s = session_at(session, &session_cell);
  for (uint32_t cell : session_state_[session_cell].members) {
    if (!(members_[cell].nonce == nonce)) continue;
    if (members_[cell].state() >= MemberState::kDead)
      throw TableRefusal("member_dead", "a member with this id died; come back under a new one",
                         kStates[static_cast<int>(members_[cell].state())], "a new id");
    return come_back(cell, ranks, scheduler, lock_offset, now);
  }
  for (uint32_t r : ranks) {
    if (r >= kMaxRanks) throw TableRefusal("bad_argument", "rank out of range", r, kMaxRanks - 1);
    if (s.rank_member[r] != kNone) throw TableRefusal("rank_taken", "another member has the rank", r);
  }
  if (free_members_.empty()) throw TableRefusal("table_full", "no member left", kMaxMembers);
  uint32_t cell = free_members_.back();
  free_members_.pop_back();
  Member& m = members_[cell];
  m.session = session_cell;
  m.nonce = nonce;
  m.scheduler = scheduler;
  m.ranks[0] = m.ranks[1] = 0;
  for (uint32_t r : ranks) m.ranks[r / 64] |= 1ull << (r % 64);
  m.lock_offset = lock_offset;
  m.heartbeat_ms = now;
  m.dead_ms = 0;
  m.pinned_through = kNone;
  m.crc = body_crc(m);
  KVDOCK_PAUSE("attach.member_written");
  publish(m.word, sealed((m.use() + 1) << 3 | static_cast<uint64_t>(MemberState::kLive)));
  KVDOCK_PAUSE("attach.member_live");
  for (uint32_t r : ranks) s.rank_member[r] = cell;
  session_state_[session_cell].members.insert(cell);
  return member_id(cell);
}

// A member attaches once more: after an adoption this is how it is heard of again.
uint64_t Table::come_back(uint32_t cell, const std::vector<uint32_t>& ranks, bool scheduler, uint64_t lock_offset,
                          uint64_t now) {
  Member& m = members_[cell];
  uint64_t bits[2] = {0, 0};
  for (uint32_t r : ranks)
    if (r < kMaxRanks) bits[r / 64] |= 1ull << (r % 64);
  if (bits[0] != m.ranks[0] || bits[1] != m.ranks[1] || scheduler != (m.scheduler != 0))
    throw TableRefusal("id_reused", "the member attached with other ranks");
  if (m.lock_offset != lock_offset)
    throw TableRefusal("id_reused", "the member attached with another lock", int64_t(lock_offset),
                       int64_t(m.lock_offset));
  m.heartbeat_ms = now;
  if (m.state() == MemberState::kSuspect) set_member_state(cell, MemberState::kLive);
  return member_id(cell);
}

uint64_t Table::find_member(uint64_t session, const Id16& nonce) {
  std::lock_guard lock(mutex_);
  uint32_t session_cell;
  session_at(session, &session_cell);
  for (uint32_t cell : session_state_[session_cell].members)
    if (members_[cell].nonce == nonce) return member_id(cell);
  throw TableRefusal("unknown_member", "the session has no such member");
}

void Table::set_member_state(uint32_t cell, MemberState state) {
  publish(members_[cell].word, sealed(members_[cell].use() << 3 | static_cast<uint64_t>(state)));
  SessionState& session = session_state_[members_[cell].session];
  session.pinned_through = least_pinned(session);
}

// Over the members that may still be given grants; kNone when none of them pins.
uint32_t Table::least_pinned(const SessionState& state) const {
  uint32_t least = kNone;
  for (uint32_t m : state.members)
    if (members_[m].state() < MemberState::kDead) least = std::min(least, members_[m].pinned_through);
  return least;
}

// Grants of the session name slots in segments with ids below this; kNone: in any.
uint32_t Table::segments_in_reach(uint32_t session) {
  uint32_t through = session_state_[session].pinned_through;
  return through >= slots_.segment_end() ? kNone : through;
}

void Table::report_pinned(uint64_t member, uint32_t through) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Member& m = member_at(member, &cell);
  if (through > kMaxSegments)
    throw TableRefusal("bad_argument", "pinned_through is above every segment id", through, kMaxSegments);
  m.pinned_through = through;
  SessionState& session = session_state_[m.session];
  session.pinned_through = least_pinned(session);
}

// Who speaks for a holder: the member with that rank, else the one that asked.
uint32_t Table::bound_member(const Grant& g, uint32_t rank) const {
  uint32_t m = sessions_[g.session].rank_member[rank];
  return m != kNone ? m : g.asker;
}

std::vector<Question> Table::heartbeat(uint64_t member, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Member& m = member_at(member, &cell);
  if (m.state() >= MemberState::kDead)
    throw TableRefusal("member_dead", "the member's lock was seen free", kStates[static_cast<int>(m.state())], "live");
  m.heartbeat_ms = now;
  if (m.state() == MemberState::kSuspect) set_member_state(cell, MemberState::kLive);

  std::vector<Question> out;
  for (uint32_t at : session_state_[m.session].grants) {
    Grant& g = grants_[at];
    bool asker_out = g.asker_done || members_[g.asker].state() >= MemberState::kDead;
    if (g.kind == GrantKind::kLease && !asker_out) {
      if (g.asker == cell && now >= g.asked_ms + options_.ask_ms) out.push_back({g.id, {}});
      continue;
    }
    if (g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen) continue;
    Question q{g.id, {}};
    for (uint32_t r : remaining(g))
      if (bound_member(g, r) == cell) q.ranks.push_back(r);
    if (!q.ranks.empty()) out.push_back(std::move(q));
  }
  return out;
}

// Its lock was seen free: nothing it has not finished is published. Its holders wait for settling.
void Table::member_dead(uint64_t member, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Member& m = member_at(member, &cell);
  if (m.state() >= MemberState::kDead) return;
  m.dead_ms = now;
  set_member_state(cell, MemberState::kDead);
  auto grants = session_state_[m.session].grants;
  for (uint32_t at : grants) {
    Grant& g = grants_[at];
    if (g.kind != GrantKind::kReservation) continue;
    for (uint32_t r : remaining(g))
      if (bound_member(g, r) == cell) close_reservation(at);
  }
}

// D2, or the leaving member's own word: every holder bound to it is discharged.
void Table::gone(uint32_t cell) {
  uint32_t session = members_[cell].session;
  auto grants = session_state_[session].grants;
  for (uint32_t at : grants) {
    for (uint32_t r : remaining(grants_[at])) {
      if (bound_member(grants_[at], r) != cell) continue;
      if (grants_[at].kind == GrantKind::kReservation) close_reservation(at);
      discharge(at, r);
    }
    finish_if_done(at);
  }
  set_member_state(cell, MemberState::kGone);
  for (uint32_t& m : sessions_[session].rank_member)
    if (m == cell) m = kNone;
  auto& members = session_state_[session].members;
  bool all_gone = std::all_of(members.begin(), members.end(),
                              [this](uint32_t m) { return members_[m].state() == MemberState::kGone; });
  if (all_gone) close_session(session);
}

void Table::close_session(uint32_t cell) {
  for (uint32_t m : session_state_[cell].members) {
    set_member_state(m, MemberState::kFree);
    free_members_.push_back(m);
  }
  publish(sessions_[cell].word, sealed(sessions_[cell].use() << 1));
  session_state_.erase(cell);
  free_sessions_.push_back(cell);
}

void Table::leave(uint64_t member, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  if (member_at(member, &cell).state() != MemberState::kGone) gone(cell);
}

void Table::tick(uint64_t now) {
  std::lock_guard lock(mutex_);
  header_->clock_ms = now;
  std::vector<uint32_t> settled, late, empty;
  for (auto& [session, state] : session_state_) {
    if (state.members.empty()) empty.push_back(session);  // its only attach was refused
    for (uint32_t cell : state.members) {
      Member& m = members_[cell];
      if (m.state() == MemberState::kLive && now > m.heartbeat_ms + options_.suspect_ms)
        set_member_state(cell, MemberState::kSuspect);
      if (m.state() == MemberState::kDead && now >= m.dead_ms + options_.settle_ms) settled.push_back(cell);
    }
    for (uint32_t at : state.grants)
      if (grants_[at].kind == GrantKind::kReservation && grants_[at].state() == GrantState::kOpen &&
          now > grants_[at].deadline_ms)
        late.push_back(at);
  }
  expire_kept(now);
  for (uint32_t at : late) close_reservation(at);
  for (uint32_t cell : empty) close_session(cell);
  for (uint32_t cell : settled) gone(cell);
}

// ---- views

uint32_t Table::session_namespace(uint64_t session) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  return session_at(session, &cell).space;
}

std::vector<SessionInfo> Table::sessions() {
  std::lock_guard lock(mutex_);
  std::vector<SessionInfo> out;
  for (auto& [cell, state] : session_state_) {
    const Session& s = sessions_[cell];
    SessionInfo info{session_id(cell), s.nonce, s.space, 0, 0, state.held_bytes, s.opened_ms};
    for (uint32_t at : state.grants) ++(grants_[at].kind == GrantKind::kLease ? info.leases : info.reservations);
    out.push_back(info);
  }
  return out;
}

std::vector<MemberInfo> Table::members() {
  std::lock_guard lock(mutex_);
  std::vector<MemberInfo> out;
  for (auto& [session, state] : session_state_)
    for (uint32_t cell : state.members) {
      const Member& m = members_[cell];
      MemberInfo info{member_id(cell), session_id(session), m.nonce, {}, m.scheduler != 0, m.state(), m.heartbeat_ms,
                      m.lock_offset, std::nullopt};
      if (m.pinned_through != kNone) info.pinned_through = m.pinned_through;
      for (uint32_t r = 0; r < kMaxRanks; ++r)
        if (m.ranks[r / 64] >> (r % 64) & 1) info.ranks.push_back(r);
      out.push_back(std::move(info));
    }
  return out;
}

}  // namespace kvdock
