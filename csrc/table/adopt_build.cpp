// The transitions of a new server life, and everything derived from the region.
#include <algorithm>

#include "table/adopt.h"
#include "base/pause.h"

namespace kvdock {

namespace {
constexpr uint64_t kSaneMs = 1ull << 50;      // no clock gets there
constexpr uint64_t kSaneKeepMs = 1ull << 40;  // nor does anybody keep a chunk for so long
constexpr uint64_t kSaneTick = 1ull << 62;
constexpr uint32_t kSmallestRecord = sizeof(Record) + sizeof(StoredPart);
}  // namespace

// Each write stands for itself: a server killed between two of them leaves a region as good as before.
void Table::Adopter::take_over() {
  publish(h.incarnation, sealed(t.incarnation() + 1));
  KVDOCK_PAUSE("adopt.new_life");
  h.limit_bytes = t.options_.limit_bytes;
  if (h.use_tick >= kSaneTick) h.use_tick = 0;
  if (h.clock_ms < kSaneMs) found.clock_ms = std::max(found.clock_ms, h.clock_ms);
  found.dropped = static_cast<uint32_t>(damaged.size() + bad_pages.size());
  found.replaced = static_cast<uint32_t>(older.size());
  for (uint32_t id : damaged) publish(t.record(id).word, 0);
  for (uint32_t page : bad_pages) {
    std::memset(t.pages_ + uint64_t{page} * kPageBytes, 0, kPageBytes);
    t.page_sizes_[page] = kSmallestRecord;
  }
  for (auto& [cell, lines] : grants) restart_grant(cell, lines);
  auto quarantine = [this](uint32_t id) {
    Record& r = t.record(id);
    publish(r.word, sealed(r.generation() << 3 | static_cast<uint64_t>(RecordState::kQuarantined)));
  };
  KVDOCK_PAUSE("adopt.grants_restarted");
  for (uint32_t id : older) quarantine(id);
  for (uint32_t id : live) {
    if (t.record(id).state() != RecordState::kReserved) continue;
    quarantine(id);
    KVDOCK_PAUSE("adopt.one_aborted");
    ++found.aborted;
  }
  for (uint32_t cell : forgotten) {
    Grant& g = t.grants_[cell];
    publish(g.word, grant_word(cell, g.use(), GrantState::kAbsent));
  }
  for (uint32_t cell : done) {
    Grant& g = t.grants_[cell];
    publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
    if (g.kind != GrantKind::kLease) continue;
    g.line_count = 0;
    g.first_block = g.last_block = kNone;
  }
  KVDOCK_PAUSE("adopt.records_done");
  restart_members();
}

// Nobody has been heard of yet: the living are suspect until they come back, the dead settle once more.
void Table::Adopter::restart_members() {
  for (auto& [session, state] : t.session_state_) {
    uint32_t* rank_member = t.sessions_[session].rank_member;
    std::fill_n(rank_member, kMaxRanks, kNone);
    for (uint32_t cell : state.members) {
      Member& m = t.members_[cell];
      m.heartbeat_ms = m.dead_ms = found.clock_ms;
      if (m.state() == MemberState::kGone) continue;
      if (m.state() == MemberState::kLive) t.set_member_state(cell, MemberState::kSuspect);
      for (uint32_t r = 0; r < kMaxRanks; ++r)
        if (m.ranks[r / 64] >> (r % 64) & 1) rank_member[r] = cell;
    }
    state.pinned_through = t.least_pinned(state);
  }
}

// Reservations close; a lease is as it was, asked about after the usual time, and open to any repeat of its lookup.
void Table::Adopter::restart_grant(uint32_t cell, const Lines& lines) {
  Grant& g = t.grants_[cell];
  uint64_t holders[2];
  holders_of(g, holders);
  g.line_count = lines.count;
  g.first_block = lines.blocks.empty() ? kNone : lines.blocks.front();
  g.last_block = lines.blocks.empty() ? kNone : lines.blocks.back();
  if (lines.count % kLinesPerBlock == 0 && lines.count / kLinesPerBlock < lines.blocks.size()) {
    // The last block was linked and never used.
    g.last_block = lines.blocks.size() > 1 ? lines.blocks[lines.blocks.size() - 2] : kNone;
    (g.last_block == kNone ? g.first_block : t.blocks_[g.last_block].next) = kNone;
    block_used[lines.blocks.back()] = false;
  }
  g.asked_ms = found.clock_ms;
  g.key_count = 0;
  KVDOCK_PAUSE("adopt.grant_relinked");
  if (g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen) finish_commits(g, holders);
  for (int i = 0; i < 2; ++i) {
    publish(g.holders[i], holders[i]);
    KVDOCK_PAUSE("adopt.holders_half");
    publish(g.released[i], ~holders[i]);
  }
  if (g.kind == GrantKind::kReservation)
    publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
  ++(g.kind == GrantKind::kLease ? found.leases : found.reservations);
}

// A commit may have been cut short between the last part's word and the discharge that follows from it.
void Table::Adopter::finish_commits(Grant& g, uint64_t holders[2]) {
  bool published = true;
  uint64_t busy[2] = {0, 0};
  t.for_each_line(g, [&](const Line& line) {
    const Record& r = t.record(line.record);
    published = published && r.state() != RecordState::kReserved;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      bool committed = r.parts[p].committed & kCommitted;
      published = published && committed;
      if (!committed) busy[r.parts[p].writer / 64] |= 1ull << (r.parts[p].writer % 64);
    }
  });
  g.completed = published;
  for (int i = 0; i < 2; ++i) holders[i] &= busy[i];
}

void Table::Adopter::build_records() {
  std::vector<bool> is_live(t.info_.size(), false);
  for (uint32_t id : live) is_live[id] = true;
  t.slots_.adopted();
  for (uint32_t i = 0; i < kMaxSegments; ++i)
    if ((t.segments_[i].word & kWordMask) == kSegmentRetiring) t.slots_.retire_segment(i);
  for (uint32_t page = 0; page < t.next_page_; ++page) {
    uint32_t size = t.page_sizes_[page];
    Page& p = t.page_info_[page];
    for (uint32_t i = std::min(kPageBytes / size, kPageRecords); i-- > 0;) {
      uint32_t id = page * kPageRecords + i;
      if (is_live[id])
        ++p.live;
      else
        p.free.push_back(id);
    }
    if (p.live == 0)
      t.spare_pages_.push_back(page);
    else if (!p.free.empty())
      t.pages_with_room_[size].insert(page);
  }
  for (uint32_t id : live) {
    Record& r = t.record(id);
    r.last_used = std::min(r.last_used, h.use_tick);
    for (uint32_t p = 0; p < r.part_count; ++p) t.slots_.touch(r.parts[p].slab, r.last_used);
    t.count_state(id, 1);
    if (r.state() != RecordState::kReady) continue;
    t.count_child(r.space, r.parent);
    t.info_[id].children = t.index_.find(r.space, r.key)->children;
    bool kept = r.kept_until_ms > found.clock_ms && r.kept_until_ms < found.clock_ms + kSaneKeepMs;
    r.kept_until_ms = kept ? r.kept_until_ms : 0;
    if (kept) t.set_kept(id, r.kept_until_ms);
    ++found.chunks;
  }
}

void Table::Adopter::build_grants() {
  auto fill = [](std::vector<uint32_t>& v, uint32_t n, auto&& free) {
    for (uint32_t i = n; i-- > 0;)
      if (free(i)) v.push_back(i);
  };
  fill(t.free_sessions_, kMaxSessions, [&](uint32_t i) { return !t.sessions_[i].live(); });
  fill(t.free_members_, kMaxMembers, [&](uint32_t i) { return t.members_[i].state() == MemberState::kFree; });
  fill(t.free_grants_, h.max_grants, [&](uint32_t i) { return t.grants_[i].state() == GrantState::kAbsent; });
  fill(t.free_blocks_, h.max_line_blocks, [&](uint32_t i) { return !block_used[i]; });
  auto name = [this](uint32_t cell) {
    Grant& g = t.grants_[cell];
    RequestKey key{t.session_id(g.session), g.kind, g.request};
    t.grant_request_[cell] = key;
    auto [at, fresh] = t.requests_.try_emplace(key, cell);
    // A request may have a lease for each epoch: the last one answers.
    const Grant& other = t.grants_[at->second];
    if (!fresh && std::pair(other.epoch, other.id) < std::pair(g.epoch, g.id)) at->second = cell;
  };
  std::sort(done.begin(), done.end(),
            [this](uint32_t a, uint32_t b) { return t.grants_[a].opened_ms < t.grants_[b].opened_ms; });
  for (uint32_t cell : done) {
    name(cell);
    t.tombstones_.push_back(cell);
  }
  for (auto& [cell, lines] : grants) {
    const Grant& g = t.grants_[cell];
    name(cell);
    t.session_state_[g.session].grants.insert(cell);
    t.for_each_line(g, [&](const Line& line) { t.add_pin(line.record, g.session); });
  }
}

// What nobody holds any more goes where it would have gone.
void Table::Adopter::settle_all() {
  for (auto& [cell, state] : t.session_state_)
    t.widest_session_cap_ = std::max(t.widest_session_cap_, static_cast<double>(state.held_bytes));
  t.widest_total_cap_ = std::max(t.widest_total_cap_, static_cast<double>(t.held_bytes_));
  for (uint32_t id : live) t.settle(id);
  for (auto& [cell, lines] : grants) t.finish_if_done(cell);
  std::vector<uint32_t> empty;
  for (auto& [cell, state] : t.session_state_)
    if (state.grants.empty() && std::all_of(state.members.begin(), state.members.end(), [this](uint32_t m) {
          return t.members_[m].state() == MemberState::kGone;
        }))
      empty.push_back(cell);
  for (uint32_t cell : empty) t.close_session(cell);
}

}  // namespace kvdock
