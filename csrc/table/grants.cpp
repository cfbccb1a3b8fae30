// Grants: leases and reservations, their lines and holders. A holder is discharged once, by its word (D1),
// by its member being gone (D2) or by the asker's cancel (D3); time alone discharges nobody.
#include <algorithm>

#include "table/body_crc.h"
#include "base/pause.h"

namespace kvdock {

namespace {
std::string hex(uint64_t v) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(v));
  return text;
}
}  // namespace

// A cell and the grant's id; the caller fills the body and seals it.
Grant& Table::new_grant(GrantKind kind, uint32_t session, uint32_t asker, const Id16& request, uint32_t readers,
                        uint64_t now) {
  if (free_grants_.empty() && !reclaim_tombstone())
    throw TableRefusal("table_full", "every grant is held", header_->max_grants);
  uint32_t cell = free_grants_.back();
  free_grants_.pop_back();
  Grant& g = grants_[cell];
  uint64_t use = g.use() + 1;
  std::memset(&g.crc, 0, sizeof g - offsetof(Grant, crc));  // the word keeps its count of uses
  g.kind = kind;
  g.id = incarnation() << 40 | (use * header_->max_grants + cell);
  g.session = session;
  g.session_use = sessions_[session].use();
  g.asker = asker;
  g.readers = readers;
  g.request = request;
  g.opened_ms = g.asked_ms = now;
  for (uint32_t r = 0; r < readers; ++r) g.holders[r / 64] |= 1ull << (r % 64);
  for (int i = 0; i < 2; ++i) g.released[i] = ~g.holders[i];
  KVDOCK_PAUSE("grant.body_begun");
  g.first_block = g.last_block = kNone;
  return g;
}

// The store that opens the grant: it happens before the answer is sent.
void Table::seal_grant(uint32_t cell) {
  Grant& g = grants_[cell];
  g.crc = body_crc(g);
  KVDOCK_PAUSE("grant.body_written");
  publish(g.word, grant_word(cell, g.use() + 1, GrantState::kOpen));
  KVDOCK_PAUSE("grant.open");
  session_state_[g.session].grants.insert(cell);
  RequestKey key{session_id(g.session), g.kind, g.request};
  requests_[key] = cell;
  grant_request_[cell] = key;
}

// The cell of an id; `forgotten` when it was issued in this pool's life and everybody has said done since.
std::optional<uint32_t> Table::grant_cell(uint64_t id, bool* forgotten) {
  *forgotten = false;
  uint64_t n = id & ((1ull << 40) - 1);
  auto cell = static_cast<uint32_t>(n % header_->max_grants);
  const Grant& g = grants_[cell];
  if (g.state() != GrantState::kAbsent && g.id == id) return cell;
  uint64_t life = id >> 40;
  bool of_this_pool = header_->first_incarnation <= life && life <= incarnation();
  *forgotten = of_this_pool && n / header_->max_grants <= g.use() && n >= header_->max_grants;
  return std::nullopt;
}

// nullptr: forgotten, so long done. `kind` guards against releasing a reservation and the like.
Grant* Table::find_grant(uint64_t session, uint64_t id, GrantKind kind, uint32_t* cell) {
  uint32_t session_cell;
  session_at(session, &session_cell);
  bool forgotten;
  auto at = grant_cell(id, &forgotten);
  if (!at && forgotten) return nullptr;
  if (!at || grants_[*at].kind != kind) throw TableRefusal("unknown_grant", "no such grant was given", hex(id));
  Grant& g = grants_[*at];
  if (g.session != session_cell) throw TableRefusal("foreign_grant", "the grant belongs to another session", hex(id));
  *cell = *at;
  return &g;
}

Grant* Table::request_grant(uint32_t session, GrantKind kind, const Id16& request, uint32_t* cell) {
  auto it = requests_.find({session_id(session), kind, request});
  if (it == requests_.end()) return nullptr;
  *cell = it->second;
  return &grants_[it->second];
}

void Table::free_lines(Grant& g) {
  g.line_count = 0;
  for (uint32_t b = g.first_block; b != kNone; b = blocks_[b].next) free_blocks_.push_back(b);
  g.first_block = g.last_block = kNone;
}

bool Table::reclaim_tombstone() {
  if (tombstones_.empty()) return false;
  uint32_t cell = tombstones_.front();
  tombstones_.pop_front();
  Grant& g = grants_[cell];
  free_lines(g);
  auto it = requests_.find(grant_request_[cell]);
  if (it != requests_.end() && it->second == cell) requests_.erase(it);
  publish(g.word, grant_word(cell, g.use(), GrantState::kAbsent));
  free_grants_.push_back(cell);
  return true;
}

void Table::require_lines(uint32_t count) {
  uint32_t blocks = (count + kLinesPerBlock - 1) / kLinesPerBlock + 1;
  while (free_blocks_.size() < blocks)
    if (!reclaim_tombstone())
      throw TableRefusal("table_full", "no room for the grant's lines", int64_t(free_blocks_.size()), blocks);
}

void Table::add_line(uint32_t cell, const Line& line) {
  Grant& g = grants_[cell];
  uint32_t at = g.line_count % kLinesPerBlock;
  if (at == 0) {
    uint32_t b = free_blocks_.back();
    free_blocks_.pop_back();
    std::memset(&blocks_[b], 0, sizeof blocks_[b]);  // a line that was not written has generation 0
    blocks_[b].next = kNone;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // adoption may follow the link as soon as it is there
    (g.first_block == kNone ? g.first_block : blocks_[g.last_block].next) = b;
    g.last_block = b;
    KVDOCK_PAUSE("grant.block_linked");
  }
  blocks_[g.last_block].lines[at] = line;
  KVDOCK_PAUSE("grant.line_written");
  std::atomic_ref<uint32_t>(g.line_count).store(g.line_count + 1, std::memory_order_release);
  add_pin(line.record, g.session);
}

void Table::check_ranks(const Grant& g, const std::vector<uint32_t>& ranks) const {
  for (uint32_t r : ranks)
    if (r >= g.readers) throw TableRefusal("not_a_holder", "the grant has no such rank", r, g.readers - 1);
}

std::vector<uint32_t> Table::remaining(const Grant& g) const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < g.readers; ++r)
    if (g.holds(r)) out.push_back(r);
  return out;
}

void Table::discharge(uint32_t cell, uint32_t rank) {
  Grant& g = grants_[cell];
  if (!g.holds(rank)) return;
  uint64_t bit = 1ull << (rank % 64);
  KVDOCK_PAUSE("discharge.begun");
  publish(g.holders[rank / 64], g.holders[rank / 64] & ~bit);
  KVDOCK_PAUSE("discharge.half");
  publish(g.released[rank / 64], g.released[rank / 64] | bit);
}

// Unpublishable from now on; the memory waits for whoever was given it.
void Table::close_reservation(uint32_t cell) {
  Grant& g = grants_[cell];
  if (g.state() != GrantState::kOpen) return;
  publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
  answers_.erase(cell);
  for_each_line(g, [&](const Line& line) {
    Record& r = record(line.record);
    if (r.generation() == line.generation && r.state() == RecordState::kReserved) {
      ++counters_.aborted_chunks;
      quarantine(line.record);
    }
  });
}

// The last holder is discharged: pins go, the cell becomes a tombstone that still answers repeats.
void Table::finish_if_done(uint32_t cell) {
  Grant& g = grants_[cell];
  if (g.live_holders() || !session_state_[g.session].grants.count(cell)) return;
  if (g.kind == GrantKind::kReservation && !g.completed) close_reservation(cell);
  publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
  KVDOCK_PAUSE("discharge.closed");
  session_state_[g.session].grants.erase(cell);
  answers_.erase(cell);
  for_each_line(g, [&](const Line& line) { prefetch_record(line.record); });
  for_each_line(g, [&](const Line& line) { drop_pin(line.record, g.session); });
  if (g.kind == GrantKind::kLease) free_lines(g);  // a reservation's are what a repeated commit is held against
  tombstones_.push_back(cell);
}

std::vector<uint32_t> Table::release(uint64_t session, uint64_t id, const std::vector<uint32_t>& ranks, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Grant* g = find_grant(session, id, GrantKind::kLease, &cell);
  if (!g) return {};
  check_ranks(*g, ranks);
  for (uint32_t r : ranks) discharge(cell, r);
  finish_if_done(cell);
  return remaining(*g);
}

void Table::cancel(uint64_t session, uint64_t member, uint64_t id, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t session_cell, member_cell, cell;
  session_at(session, &session_cell);
  member_at(member, &member_cell);
  bool forgotten;
  auto at = grant_cell(id, &forgotten);
  if (!at && forgotten) return;
  if (!at) throw TableRefusal("unknown_grant", "no such grant was given", hex(id));
  cell = *at;
  Grant& g = grants_[cell];
  if (g.session != session_cell) throw TableRefusal("foreign_grant", "the grant belongs to another session", hex(id));
  if (g.asker != member_cell) throw TableRefusal("not_the_asker", "only the member that asked may cancel", hex(id));
  auto left = remaining(g);
  if (left.empty()) return;
  if (left.size() != g.readers)
    throw TableRefusal("handed_out", "a rank has answered for this grant, so its plan was handed out",
                       int64_t(g.readers - left.size()), 0);
  for (uint32_t r : left) discharge(cell, r);
  finish_if_done(cell);
}

std::vector<uint32_t> Table::abort(uint64_t session, uint64_t id, const std::vector<uint32_t>& ranks, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Grant* g = find_grant(session, id, GrantKind::kReservation, &cell);
  if (!g) return {};
  if (ranks.empty()) throw TableRefusal("bad_argument", "an abort names the ranks that say done", 0, "1 or more ranks");
  check_ranks(*g, ranks);
  if (g->live_holders()) close_reservation(cell);
  for (uint32_t r : ranks) discharge(cell, r);
  finish_if_done(cell);
  return remaining(*g);
}

// D1 by answer to a question; also for grants that closed meanwhile, and no error for forgotten ones.
void Table::done(uint64_t member, uint64_t id, const std::vector<uint32_t>& ranks, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t member_cell;
  Member& m = member_at(member, &member_cell);
  bool forgotten;
  auto cell = grant_cell(id, &forgotten);
  if (!cell) return;
  Grant& g = grants_[*cell];
  if (g.session != m.session) throw TableRefusal("foreign_grant", "the grant belongs to another session", hex(id));
  if (ranks.empty()) {
    if (g.asker != member_cell)
      throw TableRefusal("not_the_asker", "only the member that asked has this word", hex(id));
    g.asker_done = 1;
    return;
  }
  check_ranks(g, ranks);
  bool unfinished = std::any_of(ranks.begin(), ranks.end(), [&](uint32_t r) { return g.holds(r); });
  if (g.kind == GrantKind::kReservation && unfinished) close_reservation(*cell);  // that rank will never commit
  for (uint32_t r : ranks) discharge(*cell, r);
  finish_if_done(*cell);
}

void Table::keep(uint64_t member, uint64_t id, uint64_t now) {
  std::lock_guard lock(mutex_);
  uint32_t member_cell;
  member_at(member, &member_cell);
  bool forgotten;
  if (auto cell = grant_cell(id, &forgotten); cell && grants_[*cell].asker == member_cell)
    grants_[*cell].asked_ms = now;
}

uint32_t Table::mismatch(uint64_t session, uint64_t id, const std::vector<uint32_t>& chunks, uint64_t) {
  std::lock_guard lock(mutex_);
  uint32_t cell;
  Grant* g = find_grant(session, id, GrantKind::kLease, &cell);
  if (!g) return 0;
  std::vector<uint32_t> doomed;
  for_each_line(*g, [&](const Line& line) {
    const Record& r = record(line.record);
    if (std::find(chunks.begin(), chunks.end(), line.index) == chunks.end()) return;
    if (r.generation() == line.generation && r.state() == RecordState::kReady) doomed.push_back(line.record);
  });
  std::sort(doomed.begin(), doomed.end());
  doomed.erase(std::unique(doomed.begin(), doomed.end()), doomed.end());
  for (uint32_t r : doomed) quarantine(r);
  counters_.mismatches += doomed.size();
  return static_cast<uint32_t>(doomed.size());
}

void Table::append_parts(const Record& r, uint32_t groups, std::vector<PartAt>* out) {
  for (uint32_t p = 0; p < r.part_count; ++p) {
    const StoredPart& part = r.parts[p];
    if (groups >> part.group & 1)
      out->push_back({part.group, part.writer, part.segment, part.offset, part.length, part.committed & ~kCommitted});
  }
}

std::vector<PartAt> Table::parts_of(const Record& r, uint32_t groups) {
  std::vector<PartAt> out;
  append_parts(r, groups, &out);
  return out;
}

GrantInfo Table::info_of(const Grant& g) {
  bool closed = g.state() == GrantState::kClosed;
  GrantInfo info{g.id,         g.kind, session_id(g.session), g.request,   g.epoch, g.readers, remaining(g),
                 g.line_count, 0,      g.opened_ms,           place_of(g), closed};
  for_each_line(g, [&](const Line& line) { info.bytes += record_bytes(line.record); });
  return info;
}

// Only the page's grants are looked at closely; of the others no more than their places.
std::vector<GrantInfo> Table::grants(uint64_t session, uint64_t from, size_t at_most) {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, uint32_t>> found;
  for (auto& [cell, state] : session_state_) {
    if (session && session_id(cell) != session) continue;
    for (uint32_t at : state.grants)
      if (uint64_t place = place_of(grants_[at]); place >= from) found.emplace_back(place, at);
  }
  auto end = found.begin() + static_cast<ptrdiff_t>(std::min(at_most, found.size()));
  std::partial_sort(found.begin(), end, found.end());
  std::vector<GrantInfo> out;
  for (auto it = found.begin(); it != end; ++it) out.push_back(info_of(grants_[it->second]));
  return out;
}

std::optional<GrantInfo> Table::grant(uint64_t id) {
  std::lock_guard lock(mutex_);
  bool forgotten;
  auto cell = grant_cell(id, &forgotten);
  if (!cell || !grants_[*cell].live_holders()) return std::nullopt;
  return info_of(grants_[*cell]);
}

// How many of the session's grants have a holder left, and whether one of them was asked for by that name.
std::pair<uint32_t, bool> Table::open_grants(uint64_t session, const Id16& request) {
  std::lock_guard lock(mutex_);
  uint32_t cell, at;
  session_at(session, &cell);
  bool known = false;
  for (GrantKind kind : {GrantKind::kLease, GrantKind::kReservation})
    if (Grant* g = request_grant(cell, kind, request, &at)) known = known || g->live_holders();
  return {static_cast<uint32_t>(session_state_[cell].grants.size()), known};
}

}  // namespace kvdock
