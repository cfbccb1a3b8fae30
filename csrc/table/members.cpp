#include "table/members.h"

#include <algorithm>
#include <array>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

namespace {

constexpr uint32_t kCellMask = (1u << 20) - 1;

std::array<uint64_t, 2> bits_of(const std::vector<uint32_t>& ranks) {
  std::array<uint64_t, 2> bits{};
  for (uint32_t r : ranks)
    if (r < kMaxRanks) bits[r / 64] |= 1ull << (r % 64);
  return bits;
}

std::vector<uint32_t> ranks_of(const Member& m) {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < kMaxRanks; ++r)
    if (m.ranks[r / 64] >> (r % 64) & 1) out.push_back(r);
  return out;
}

}  // namespace

void Members::begin_empty() {
  for (uint32_t i = kMaxSessions; i-- > 0;) free_sessions_.push_back(i);
  for (uint32_t i = kMaxMembers; i-- > 0;) free_members_.push_back(i);
}

std::optional<uint32_t> Members::find_session(uint64_t id) const {
  auto cell = static_cast<uint32_t>(id & kCellMask);
  if (cell >= kMaxSessions || !sessions_[cell].live() || session_id(cell) != id) return std::nullopt;
  return cell;
}

uint32_t Members::session_cell(uint64_t id) const {
  std::optional<uint32_t> cell = find_session(id);
  if (!cell) throw TableError("unknown_session", "no such session", int64_t(id));
  return *cell;
}

std::optional<uint32_t> Members::find_member(uint64_t id) const {
  auto cell = static_cast<uint32_t>(id & kCellMask);
  if (cell >= kMaxMembers || members_[cell].state() == MemberState::kFree || member_id(cell) != id) return std::nullopt;
  return cell;
}

uint32_t Members::member_cell(uint64_t id) const {
  std::optional<uint32_t> cell = find_member(id);
  if (!cell) throw TableError("unknown_member", "no such member", int64_t(id));
  return *cell;
}

Members::Asker Members::asker(uint64_t session, uint64_t member) const {
  Asker out{session_cell(session), member_cell(member)};
  const Member& m = members_[out.member];
  if (m.session != out.session)
    throw TableError("unknown_member", "the member belongs to another session", int64_t(member));
  if (m.state() == MemberState::kSuspect)
    throw TableError("member_suspect", "heartbeats are missing; send one first", "suspect", "live");
  if (m.state() != MemberState::kLive)
    throw TableError("member_dead", "the member's lock was seen free", name_of(m.state()), "live");
  return out;
}

bool Members::is_live(uint64_t id) const {
  auto cell = static_cast<uint32_t>(id & kCellMask);
  return members_[cell].state() == MemberState::kLive && member_id(cell) == id;
}

bool Members::lives(uint32_t session) const {
  bool any = false;
  for (uint32_t cell : open_.at(session).members) {
    MemberState state = members_[cell].state();
    if (state == MemberState::kSuspect || state == MemberState::kDead) return false;
    any = any || state == MemberState::kLive;
  }
  return any;
}

uint64_t Members::session_of(const Id16& nonce) const {
  auto at = by_nonce_.find(nonce);
  return at == by_nonce_.end() ? 0 : session_id(at->second);
}

void Members::open(uint32_t session) {
  open_[session];
  by_nonce_[sessions_[session].nonce] = session;
}

uint64_t Members::open_session(const Id16& nonce, uint32_t space, uint64_t now) {
  if (uint64_t known = session_of(nonce)) {
    uint32_t filed = sessions_[session_cell(known)].space();
    if (!spaces_.differ_in_weights_alone(space, filed))
      throw TableError("id_reused", "the instance attached with another manifest", space, filed);
    return known;
  }
  if (free_sessions_.empty()) throw TableError("table_full", "no session left", kMaxSessions);
  uint32_t cell = free_sessions_.back();
  free_sessions_.pop_back();
  Session& s = sessions_[cell];
  s.filed = filed_word(cell, space);
  s.nonce = nonce;
  s.opened_ms = now;
  std::fill(std::begin(s.rank_member), std::end(s.rank_member), kNone);
  s.crc = body_crc(s);
  KVDOCK_PAUSE("attach.session_written");
  publish(s.word, sealed((s.use() + 1) << 1 | 1));
  KVDOCK_PAUSE("attach.session_open");
  open(cell);
  spaces_.enter_session(space);
  return session_id(cell);
}

uint64_t Members::add_member(uint64_t id, const NewMember& wanted, uint64_t now) {
  uint32_t session = session_cell(id);
  Session& s = sessions_[session];
  for (uint32_t cell : open_[session].members) {
    if (!(members_[cell].nonce == wanted.nonce)) continue;
    if (members_[cell].state() >= MemberState::kDead)
      throw TableError("member_dead", "a member with this id died; come back under a new one",
                       name_of(members_[cell].state()), "a new id");
    return come_back(cell, wanted, now);
  }
  for (uint32_t r : wanted.ranks) {
    if (r >= kMaxRanks) throw TableError("bad_argument", "rank out of range", r, kMaxRanks - 1);
    if (s.rank_member[r] != kNone) throw TableError("rank_taken", "another member has the rank", r);
  }
  if (members_of(session) >= kMaxSessionMembers)
    throw TableError("quota_exceeded", "the session has as many members as it may have", members_of(session),
                     "< " + std::to_string(kMaxSessionMembers));
  if (free_members_.empty()) throw TableError("table_full", "no member left", kMaxMembers);
  uint32_t cell = free_members_.back();
  free_members_.pop_back();
  Member& m = members_[cell];
  m.session = session;
  m.nonce = wanted.nonce;
  m.scheduler = wanted.scheduler;
  auto bits = bits_of(wanted.ranks);
  std::copy(bits.begin(), bits.end(), m.ranks);
  m.lock_offset = wanted.lock_offset;
  m.heartbeat_ms = now;
  m.dead_ms = 0;
  m.pinned_through = kNone;
  m.crc = body_crc(m);
  KVDOCK_PAUSE("attach.member_written");
  publish(m.word, sealed((m.use() + 1) << 3 | static_cast<uint64_t>(MemberState::kLive)));
  KVDOCK_PAUSE("attach.member_live");
  for (uint32_t r : wanted.ranks) s.rank_member[r] = cell;
  open_[session].members.insert(cell);
  ++count_of(session);
  return member_id(cell);
}

// A member attaches once more: after an adoption this is its first sign of life.
uint64_t Members::come_back(uint32_t cell, const NewMember& wanted, uint64_t now) {
  Member& m = members_[cell];
  auto bits = bits_of(wanted.ranks);
  if (bits[0] != m.ranks[0] || bits[1] != m.ranks[1] || wanted.scheduler != (m.scheduler != 0))
    throw TableError("id_reused", "the member attached with other ranks");
  if (m.lock_offset != wanted.lock_offset)
    throw TableError("id_reused", "the member attached with another lock", int64_t(wanted.lock_offset),
                     int64_t(m.lock_offset));
  heartbeat(cell, now);
  return member_id(cell);
}

void Members::heartbeat(uint32_t cell, uint64_t now) {
  Member& m = members_[cell];
  if (m.state() >= MemberState::kDead)
    throw TableError("member_dead", "the member's lock was seen free", name_of(m.state()), "live");
  m.heartbeat_ms = now;
  if (m.state() == MemberState::kSuspect) set_state(cell, MemberState::kLive);
}

void Members::set_state(uint32_t cell, MemberState state) {
  Member& m = members_[cell];
  publish(m.word, sealed(m.use() << 3 | static_cast<uint64_t>(state)));
  Open& session = open_[m.session];
  session.pinned_through = least_pinned(session);
}

uint32_t Members::least_pinned(const Open& session) const {
  uint32_t least = kNone;
  for (uint32_t m : session.members)
    if (members_[m].state() < MemberState::kDead) least = std::min(least, members_[m].pinned_through);
  return least;
}

void Members::report_pinned(uint64_t id, uint32_t through) {
  uint32_t cell = member_cell(id);
  if (through > kSegmentIds)
    throw TableError("bad_argument", "pinned_through is above every segment id", through, kSegmentIds);
  members_[cell].pinned_through = through;
  Open& session = open_[members_[cell].session];
  session.pinned_through = least_pinned(session);
}

Members::Due Members::age(uint64_t now, const TableOptions& options, Work& work) {
  Due due;
  for (auto& [session, open] : open_) {
    if (open.members.empty()) due.empty.push_back(session);  // its only attach was refused
    for (uint32_t cell : open.members) {
      const Member& m = members_[cell];
      if (m.state() == MemberState::kLive && now > m.heartbeat_ms + options.suspect_ms && !work.is_over()) {
        work.spend(kChangeState);
        set_state(cell, MemberState::kSuspect);
      }
      if (m.state() == MemberState::kDead && now >= m.dead_ms + options.settle_ms) due.settled.push_back(cell);
    }
  }
  return due;
}

void Members::set_dead(uint32_t cell, uint64_t now) {
  members_[cell].dead_ms = now;
  set_state(cell, MemberState::kDead);
}

bool Members::all_gone(const Open& session) const {
  return std::all_of(session.members.begin(), session.members.end(),
                     [this](uint32_t m) { return members_[m].state() == MemberState::kGone; });
}

Members::Left Members::set_gone(uint32_t cell) {
  uint32_t session = members_[cell].session;
  set_state(cell, MemberState::kGone);
  for (uint32_t& m : sessions_[session].rank_member)
    if (m == cell) m = kNone;
  return all_gone(open_[session]) ? Left::none : Left::some;
}

void Members::forget(uint32_t cell) {
  uint32_t session = members_[cell].session;
  open_[session].members.erase(cell);  // first: what a free member has page-locked counts no more
  set_state(cell, MemberState::kFree);
  --count_of(session);
  free_members_.push_back(cell);
}

void Members::close_session(uint32_t cell) {
  for (uint32_t m : open_[cell].members) {
    set_state(m, MemberState::kFree);
    free_members_.push_back(m);
  }
  count_of(cell) -= members_of(cell);
  publish(sessions_[cell].word, sealed(sessions_[cell].use() << 1));
  open_.erase(cell);
  by_nonce_.erase(sessions_[cell].nonce);
  spaces_.leave_session(sessions_[cell].space(), Namespaces::Leaves::ended);
  free_sessions_.push_back(cell);
}

void Members::file_session(uint32_t cell, uint32_t space) {
  uint32_t before = sessions_[cell].space();
  if (before == space) return;
  publish(sessions_[cell].filed, filed_word(cell, space));
  KVDOCK_PAUSE("move.filed");
  spaces_.enter_session(space);
  spaces_.leave_session(before, Namespaces::Leaves::moved);
  KVDOCK_PAUSE("move.left");
}

// ---- views

std::vector<uint32_t> Members::open_sessions(const std::optional<std::vector<uint64_t>>& named) const {
  std::vector<uint32_t> out;
  if (!named)
    for (auto& [cell, open] : open_) out.push_back(cell);
  else
    for (uint64_t id : *named)
      if (auto cell = find_session(id)) out.push_back(*cell);
  return out;
}

MemberInfo Members::info_of(uint32_t cell) const {
  const Member& m = members_[cell];
  MemberInfo info{member_id(cell), session_id(m.session), m.nonce, ranks_of(m), m.scheduler != 0, m.state(),
                  m.heartbeat_ms, m.lock_offset, std::nullopt};
  if (m.pinned_through != kNone) info.pinned_through = m.pinned_through;
  return info;
}

std::vector<MemberInfo> Members::views() const {
  std::vector<MemberInfo> out;
  for (auto& [session, open] : open_)
    for (uint32_t cell : open.members) out.push_back(info_of(cell));
  return out;
}

std::vector<MemberInfo> Members::views_of(const std::vector<uint64_t>& ids) const {
  std::vector<MemberInfo> out;
  for (uint64_t id : ids)
    if (auto cell = find_member(id)) out.push_back(info_of(*cell));
  return out;
}

// ---- adoption

void Members::judge(const std::vector<bool>& namespaces, Adoption* found) {
  for (uint32_t cell = 0; cell < kMaxSessions; ++cell) {
    const Session& s = sessions_[cell];
    if (!whole(s.word)) refuse_adoption("a session's state is damaged", cell);
    if (!s.live()) {
      free_sessions_.push_back(cell);
      continue;
    }
    bool filed = whole(s.filed, cell + 1) && s.space() < namespaces.size() && namespaces[s.space()];
    if (s.crc != body_crc(s) || !filed)
      refuse_adoption("a session is damaged", cell);
    if (by_nonce_.count(s.nonce)) refuse_adoption("two sessions have one nonce", cell);
    open(cell);
    spaces_.count_session(s.space());
    found->clock_ms = std::max(found->clock_ms, s.opened_ms);
    ++found->sessions;
  }
  std::map<uint32_t, std::array<uint64_t, 2>> ranks;
  for (uint32_t cell = 0; cell < kMaxMembers; ++cell) {
    const Member& m = members_[cell];
    if (!whole(m.word) || m.state() > MemberState::kGone) refuse_adoption("a member's state is damaged", cell);
    if (m.state() == MemberState::kFree) {
      free_members_.push_back(cell);
      continue;
    }
    if (m.crc != body_crc(m) || m.session >= kMaxSessions || !sessions_[m.session].live())
      refuse_adoption("a member is damaged", cell);
    open_[m.session].members.insert(cell);
    ++count_of(m.session);
    if (m.state() == MemberState::kGone) continue;
    for (uint32_t i = 0; i < 2; ++i) {
      uint64_t& taken = ranks[m.session][i];
      if (taken & m.ranks[i]) refuse_adoption("two members have one rank", cell);
      taken |= m.ranks[i];
    }
    ++found->members;
  }
  std::reverse(free_sessions_.begin(), free_sessions_.end());  // the lowest cells are used first
  std::reverse(free_members_.begin(), free_members_.end());
}

void Members::restart(uint64_t clock_ms) {
  for (auto& [session, open] : open_) {
    uint32_t* rank_member = sessions_[session].rank_member;
    std::fill_n(rank_member, kMaxRanks, kNone);
    for (uint32_t cell : open.members) {
      Member& m = members_[cell];
      m.heartbeat_ms = m.dead_ms = clock_ms;
      if (m.state() == MemberState::kGone) continue;
      if (m.state() == MemberState::kLive) set_state(cell, MemberState::kSuspect);
      for (uint32_t r : ranks_of(m)) rank_member[r] = cell;
    }
    open.pinned_through = least_pinned(open);
  }
}

std::vector<uint32_t> Members::sessions_without_members() const {
  std::vector<uint32_t> out;
  for (auto& [cell, open] : open_)
    if (all_gone(open)) out.push_back(cell);
  return out;
}

std::vector<uint32_t> Members::gone() const {
  std::vector<uint32_t> out;
  for (auto& [session, open] : open_)
    for (uint32_t cell : open.members)
      if (members_[cell].state() == MemberState::kGone) out.push_back(cell);
  return out;
}

void Members::check() const {
  require(open_.size() + free_sessions_.size() == kMaxSessions, "a session cell is lost", 0);
  require(by_nonce_.size() == open_.size(), "a session is not found by its nonce", 0);
  size_t members = 0;
  for (auto& [session, open] : open_) members += open.members.size();
  require(members == member_count(), "a member cell is lost", 0);
  std::map<uint32_t, uint32_t> in;  // by namespace
  for (auto& [session, open] : open_) ++in[sessions_[session].space()];
  for (auto& [space, count] : in)
    require(spaces_.sessions_in(space) == count, "a namespace's sessions are counted wrongly", space);
  for (auto& [session, open] : open_) {
    require(sessions_[session].live(), "an open session is not live", session);
    require(by_nonce_.at(sessions_[session].nonce) == session, "a session is not found by its nonce", session);
    require(open.pinned_through == least_pinned(open), "a session's pinned segments are counted wrongly", session);
    for (uint32_t cell : open.members) {
      const Member& m = members_[cell];
      require(m.session == session && m.state() != MemberState::kFree, "a member is listed by another session", cell);
      for (uint32_t r : ranks_of(m))
        require(m.state() == MemberState::kGone || sessions_[session].rank_member[r] == cell,
                "a member does not have its rank", cell);
    }
    for (uint32_t m : sessions_[session].rank_member)
      require(m == kNone || open.members.count(m), "a rank belongs to nobody of its session", session);
  }
}

}  // namespace kvdock
