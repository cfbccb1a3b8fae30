#include "table/grants.h"

#include <algorithm>
#include <cstdio>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

namespace {
constexpr uint64_t kNumberMask = (1ull << 40) - 1;  // the bits of an id below the server's incarnation
}  // namespace

std::string hex_of(uint64_t id) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(id));
  return text;
}

Grants::Grants(const Region& region, Members& members, Chunks& chunks)
    : header_(region.header),
      grants_(region.grants),
      blocks_(region.blocks),
      members_(members),
      chunks_(chunks),
      asked_(kMaxMembers) {}

void Grants::begin_empty() {
  for (uint32_t cell = header_.max_grants; cell-- > 0;) {
    grants_[cell].word = grant_word(cell, 0, GrantState::kAbsent);
    free_grants_.push_back(cell);
  }
  for (uint32_t i = header_.max_entry_blocks; i-- > 0;) free_blocks_.push_back(i);
}

// ---- finding

Grant* Grants::find(uint64_t id) const {
  Grant& g = grants_[(id & kNumberMask) % header_.max_grants];
  return g.state() != GrantState::kAbsent && g.id == id ? &g : nullptr;
}

Grant* Grants::of_session(uint64_t session, uint64_t id, std::optional<GrantKind> kind) const {
  uint32_t cell = members_.session_cell(session);
  Grant* g = find(id);
  uint64_t use = (id & kNumberMask) / header_.max_grants, server = id >> 40;
  bool of_this_pool = header_.first_incarnation <= server && server <= (header_.incarnation & kWordMask);
  bool was_given = use > 0 && use <= grants_[(id & kNumberMask) % header_.max_grants].use();
  if (!g && of_this_pool && was_given) return nullptr;
  if (!g || (kind && g->kind != *kind)) throw TableError("unknown_grant", "no such grant was given", hex_of(id));
  require_own(*g, cell);
  return g;
}

void Grants::require_own(const Grant& g, uint32_t cell) const {
  if (g.session == cell && g.session_use == members_.session(cell).use()) return;
  // For a grant of another tenant or of an ended session the error is that of a grant that was never given.
  bool open = members_.is_open(g.session) && g.session_use == members_.session(g.session).use();
  if (!open || !members_.of_one_tenant(g.session, cell))
    throw TableError("unknown_grant", "no such grant was given", hex_of(g.id));
  throw TableError("foreign_grant", "the grant belongs to another session", hex_of(g.id));
}

Grant* Grants::of_request(uint32_t session, GrantKind kind, const Id16& request) const {
  auto it = requests_.find({members_.session_id(session), kind, request});
  return it == requests_.end() ? nullptr : &grants_[it->second];
}

std::vector<Grant*> Grants::held_by(uint32_t session) const {
  std::vector<Grant*> out;
  if (auto it = held_.find(session); it != held_.end())
    for (uint32_t cell : it->second) out.push_back(&grants_[cell]);
  return out;
}

std::vector<uint32_t> Grants::holders() const {
  std::vector<uint32_t> out;
  for (auto& [session, cells] : held_) out.push_back(session);
  return out;
}

bool Grants::is_held(const Grant& g) const {
  auto it = held_.find(g.session);
  return it != held_.end() && it->second.count(cell_of(g));
}

std::vector<uint32_t> Grants::remaining(const Grant& g) const {
  std::vector<uint32_t> out;
  for (uint32_t r = 0; r < g.readers; ++r)
    if (g.holds(r)) out.push_back(r);
  return out;
}

void Grants::require_ranks(const Grant& g, std::span<const uint32_t> ranks) const {
  for (uint32_t r : ranks)
    if (r >= g.readers) throw TableError("not_a_holder", "the grant has no such rank", r, g.readers - 1);
}

// ---- opening

Grant& Grants::prepare(const NewGrant& wanted) {
  if (free_grants_.empty() && !reclaim_tombstone())
    throw TableError("table_full", "every grant is held", header_.max_grants);
  uint32_t cell = free_grants_.back();
  free_grants_.pop_back();
  Grant& g = grants_[cell];
  uint64_t use = g.use() + 1;
  std::memset(&g.crc, 0, sizeof g - offsetof(Grant, crc));  // g.word stays: it counts the uses of the cell
  g.kind = wanted.kind;
  g.id = (header_.incarnation & kWordMask) << 40 | (use * header_.max_grants + cell);
  g.session = wanted.asker.session;
  g.session_use = members_.session(g.session).use();
  g.asker = wanted.asker.member;
  g.readers = wanted.readers;
  g.request = wanted.request;
  g.opened_ms = g.asked_ms = wanted.now;
  for (uint32_t r = 0; r < g.readers; ++r) g.holders[r / 64] |= 1ull << (r % 64);
  for (int i = 0; i < 2; ++i) g.released[i] = ~g.holders[i];
  KVDOCK_PAUSE("grant.body_begun");
  g.first_block = g.last_block = kNone;
  return g;
}

void Grants::open(Grant& g) {
  uint32_t cell = cell_of(g);
  g.crc = body_crc(g);
  KVDOCK_PAUSE("grant.body_written");
  publish(g.word, grant_word(cell, g.use() + 1, GrantState::kOpen));
  KVDOCK_PAUSE("grant.open");
  held_[g.session].insert(cell);
  ++asked_[g.asker];
  ++(g.kind == GrantKind::kLease ? count_.leases : count_.reservations);
  ++usage_of(g).grants;
  requests_[key_of(g)] = cell;
}

void Grants::require_entries(uint32_t count) {
  uint32_t blocks = (count + kEntriesPerBlock - 1) / kEntriesPerBlock + 1;
  while (free_blocks_.size() < blocks)
    if (!reclaim_tombstone())
      throw TableError("table_full", "too few blocks are free for the grant's entries", int64_t(free_blocks_.size()),
                       blocks);
}

void Grants::add_entry(Grant& g, const GrantEntry& entry) {
  uint32_t at = g.entry_count % kEntriesPerBlock;
  if (at == 0) {
    uint32_t b = free_blocks_.back();
    free_blocks_.pop_back();
    std::memset(&blocks_[b], 0, sizeof blocks_[b]);  // generation 0 marks an entry that was not written
    blocks_[b].next = kNone;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // adoption follows the link, so the block is written first
    (g.first_block == kNone ? g.first_block : blocks_[g.last_block].next) = b;
    g.last_block = b;
    KVDOCK_PAUSE("grant.block_linked");
  }
  blocks_[g.last_block].entries[at] = entry;
  KVDOCK_PAUSE("grant.entry_written");
  publish(g.entry_count, g.entry_count + 1);
  chunks_.add_pin(entry.record, g.session);
}

void Grants::free_entries(Grant& g) {
  g.entry_count = 0;
  for (uint32_t b = g.first_block; b != kNone; b = blocks_[b].next) free_blocks_.push_back(b);
  g.first_block = g.last_block = kNone;
}

bool Grants::reclaim_tombstone() {
  if (tombstones_.empty()) return false;
  uint32_t cell = tombstones_.front();
  tombstones_.pop_front();
  Grant& g = grants_[cell];
  free_entries(g);
  auto it = requests_.find(key_of(g));
  if (it != requests_.end() && it->second == cell) requests_.erase(it);
  publish(g.word, grant_word(cell, g.use(), GrantState::kAbsent));
  free_grants_.push_back(cell);
  return true;
}

// ---- ending

void Grants::discharge(Grant& g, std::span<const uint32_t> ranks) {
  for (uint32_t rank : ranks) {
    if (!g.holds(rank)) continue;
    uint64_t bit = 1ull << (rank % 64);
    KVDOCK_PAUSE("discharge.begun");
    publish(g.holders[rank / 64], g.holders[rank / 64] & ~bit);
    KVDOCK_PAUSE("discharge.half");
    publish(g.released[rank / 64], g.released[rank / 64] | bit);
  }
  if (!g.live_holders() && is_held(g)) close(g);
}

// The last holder is discharged: drops the pins, and makes the cell a tombstone.
void Grants::close(Grant& g) {
  uint32_t cell = cell_of(g);
  if (g.kind == GrantKind::kReservation && !g.completed) close_reservation(g);
  publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
  KVDOCK_PAUSE("discharge.closed");
  auto held = held_.find(g.session);
  held->second.erase(cell);
  if (held->second.empty()) held_.erase(held);
  --(g.kind == GrantKind::kLease ? count_.leases : count_.reservations);
  --usage_of(g).grants;
  answers_.erase(cell);
  for_each_entry(g, [&](const GrantEntry& entry) { chunks_.records().prefetch(entry.record); });
  for_each_entry(g, [&](const GrantEntry& entry) { chunks_.drop_pin(entry.record, g.session); });
  if (g.kind == GrantKind::kLease) free_entries(g);  // a reservation's stay, to compare repeated commits with
  tombstones_.push_back(cell);
  if (--asked_[g.asker] == 0 && members_.member(g.asker).state() == MemberState::kGone) members_.forget(g.asker);
}

void Grants::close_reservation(Grant& g) {
  if (g.state() != GrantState::kOpen) return;
  uint32_t cell = cell_of(g);
  publish(g.word, grant_word(cell, g.use(), GrantState::kClosed));
  answers_.erase(cell);
  for_each_entry(g, [&](const GrantEntry& entry) {
    if (!chunks_.records().names_live(entry) || chunks_.record(entry.record).state() != RecordState::kReserved) return;
    ++aborted_chunks_;
    chunks_.take_out(entry.record, Gone::deleted);  // lookups never found it
  });
}

// Asks the record, because a session may have moved to another namespace after it reserved it. The grant pins it.
bool Grants::was_cleared(const Grant& g) const {
  const GrantEntry& first = blocks_[g.first_block].entries[0];
  return chunks_.namespaces().was_cleared(chunks_.record(first.record).space, first.generation);
}

// What it costs to end the grant now.
uint64_t Grants::cost_of(const Grant& g) {
  bool is_open = g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen;
  return kEndGrant + g.entry_count * (is_open ? kAbortChunk : kDropPin);
}

void Grants::member_dead(uint32_t member, Work& work) {
  for (Grant* g : held_by(members_.member(member).session)) {
    if (work.is_over()) return;
    if (g->kind != GrantKind::kReservation || g->state() != GrantState::kOpen) continue;
    std::vector<uint32_t> ranks = remaining(*g);
    auto speaks = [&](uint32_t r) { return members_.speaker(g->session, r, g->asker) == member; };
    if (std::none_of(ranks.begin(), ranks.end(), speaks)) continue;
    work.spend(cost_of(*g));
    close_reservation(*g);
  }
}

void Grants::member_gone(uint32_t member, Work& work) {
  for (Grant* g : held_by(members_.member(member).session)) {
    if (work.is_over()) return;
    std::vector<uint32_t> ranks = remaining(*g);
    std::erase_if(ranks, [&](uint32_t r) { return members_.speaker(g->session, r, g->asker) != member; });
    if (ranks.empty()) continue;
    work.spend(cost_of(*g));
    if (g->kind == GrantKind::kReservation) close_reservation(*g);
    discharge(*g, ranks);
  }
}

void Grants::close_late(uint64_t now, Work& work) {
  for (auto& [session, cells] : held_)
    for (uint32_t cell : cells) {
      Grant& g = grants_[cell];
      bool is_late = g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen && now > g.deadline_ms;
      if (!is_late) continue;
      if (work.is_over()) return;
      work.spend(cost_of(g));
      close_reservation(g);
    }
}

std::pair<Grant*, int64_t> Grants::next_cleared(uint64_t start, Work& work) {
  for (uint64_t cell = start; cell < header_.max_grants; ++cell) {
    if (work.is_over()) return {nullptr, static_cast<int64_t>(cell)};
    Grant& g = grants_[cell];
    work.spend(1);
    if (g.state() != GrantState::kOpen || g.kind != GrantKind::kReservation) continue;
    work.spend(kSeeChunk);
    if (!was_cleared(g)) continue;
    work.spend(cost_of(g));
    return {&g, static_cast<int64_t>(cell) + 1};
  }
  return {nullptr, -1};
}

// ---- views

GrantInfo Grants::info_of(const Grant& g) const {
  bool closed = g.state() == GrantState::kClosed;
  GrantInfo info{g.id,         g.kind, members_.session_id(g.session), g.request,   g.epoch, g.readers, remaining(g),
                 g.entry_count, 0,      g.opened_ms,                    place_of(g), closed};
  for_each_entry(g, [&](const GrantEntry& entry) { info.bytes += chunks_.records().bytes_of(entry.record); });
  return info;
}

// Describes only the grants of the page; of the others it reads the places.
std::vector<GrantInfo> Grants::page(uint64_t session, uint64_t from, size_t at_most) const {
  std::vector<std::pair<uint64_t, uint32_t>> found;
  for (auto& [owner, cells] : held_) {
    if (session && members_.session_id(owner) != session) continue;
    for (uint32_t cell : cells)
      if (uint64_t place = place_of(grants_[cell]); place >= from) found.emplace_back(place, cell);
  }
  auto end = found.begin() + static_cast<ptrdiff_t>(std::min(at_most, found.size()));
  std::partial_sort(found.begin(), end, found.end());
  std::vector<GrantInfo> out;
  for (auto it = found.begin(); it != end; ++it) out.push_back(info_of(grants_[it->second]));
  return out;
}

std::optional<GrantInfo> Grants::view(uint64_t id) const {
  const Grant* g = find(id);
  return g && g->live_holders() ? std::optional(info_of(*g)) : std::nullopt;
}

std::pair<uint32_t, bool> Grants::open_grants(uint64_t session, const Id16& request) const {
  uint32_t cell = members_.session_cell(session);
  bool named = false;
  for (GrantKind kind : {GrantKind::kLease, GrantKind::kReservation})
    if (const Grant* g = of_request(cell, kind, request)) named = named || g->live_holders();
  return {static_cast<uint32_t>(held_by(cell).size()), named};
}

Grants::Count Grants::count(uint32_t session) const {
  Count out;
  for (const Grant* g : held_by(session)) ++(g->kind == GrantKind::kLease ? out.leases : out.reservations);
  return out;
}

// ---- checks

ImpliedPins Grants::check() const {
  ImpliedPins implied;
  std::set<uint32_t> tombstones(tombstones_.begin(), tombstones_.end());
  uint32_t present = 0, blocks = 0, open_reservations = 0;
  Count held;
  size_t named = 0;
  for (uint32_t cell = 0; cell < header_.max_grants; ++cell) {
    const Grant& g = grants_[cell];
    if (g.state() == GrantState::kAbsent) continue;
    ++present;
    check_cell(cell);
    blocks += (g.entry_count + kEntriesPerBlock - 1) / kEntriesPerBlock;
    auto request = requests_.find(key_of(g));
    named += request != requests_.end() && request->second == cell;
    require(request == requests_.end() || request->second == cell || grants_[request->second].request == g.request,
            "a request names another one's grant", cell);
    require(is_held(g) == g.live_holders() && tombstones.count(cell) == !g.live_holders(),
            "a grant is neither held nor a tombstone", cell);
    if (!g.live_holders()) continue;
    ++(g.kind == GrantKind::kLease ? held.leases : held.reservations);
    open_reservations += g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen;
    require(members_.is_open(g.session), "L1: a grant outlived its session", cell);
    for_each_entry(g, [&](const GrantEntry& entry) { ++implied[entry.record][g.session]; });
  }
  require(present + free_grants_.size() == header_.max_grants, "a grant cell is lost", present);
  require(tombstones.size() == tombstones_.size(), "a tombstone is listed twice", 0);
  require(blocks + free_blocks_.size() == header_.max_entry_blocks, "an entry block is lost", blocks);
  require(held.leases == count_.leases && held.reservations == count_.reservations, "held grants are miscounted",
          held.leases);
  require(named == requests_.size(), "a request names a grant that is not its own", 0);
  require(answers_.size() == open_reservations, "an answer is kept for a reservation that is not open", 0);
  return implied;
}

// Checks I2, and that a closed reservation publishes nothing.
void Grants::check_cell(uint32_t cell) const {
  const Grant& g = grants_[cell];
  require(g.crc == body_crc(g), "a grant's body does not match its CRC", cell);
  bool open_reservation = g.kind == GrantKind::kReservation && g.state() == GrantState::kOpen;
  require(!answers_.count(cell) || open_reservation, "an answer is kept for a reservation that is not open", cell);
  if (!g.live_holders()) return;
  for_each_entry(g, [&](const GrantEntry& entry) {
    require(chunks_.records().names_live(entry), "I2: a pinned record was given away", entry.record);
    require(g.kind == GrantKind::kLease || open_reservation ||
                chunks_.record(entry.record).state() != RecordState::kReserved,
            "a closed reservation can still publish", entry.record);
  });
}

}  // namespace kvdock
