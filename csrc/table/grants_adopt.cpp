#include "table/adopters.h"

#include <algorithm>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

namespace {

// The bits of word i of a grant's `holders` that stand for its readers.
uint64_t readers_mask(const Grant& g, uint32_t i) {
  uint32_t ranks = g.readers > 64 * i ? std::min(g.readers - 64 * i, 64u) : 0;
  return ranks == 64 ? ~0ull : (1ull << ranks) - 1;
}

// The holders that are not discharged: a rank is one unless `holders` and `released` agree that it is not.
void holders_of(const Grant& g, uint64_t out[2]) {
  for (uint32_t i = 0; i < 2; ++i) out[i] = (g.holders[i] | ~g.released[i]) & readers_mask(g, i);
}

// No rank is both holder and released; bits beyond the readers are as they were when the grant was opened.
bool holders_possible(const Grant& g) {
  for (uint32_t i = 0; i < 2; ++i)
    if ((g.holders[i] & g.released[i]) || ((g.holders[i] | ~g.released[i]) & ~readers_mask(g, i))) return false;
  return true;
}

}  // namespace

void Grants::Adopter::judge() {
  block_used_.assign(g.header_.max_entry_blocks, false);
  for (uint32_t cell = 0; cell < g.header_.max_grants; ++cell) judge_cell(cell);
}

void Grants::Adopter::judge_body(const Grant& grant, uint32_t cell) const {
  const TableHeader& h = g.header_;
  if (grant.crc != body_crc(grant)) refuse_adoption("a grant's body does not match its CRC", cell);
  uint64_t n = grant.id & ((1ull << 40) - 1), server = grant.id >> 40;
  if (n % h.max_grants != cell || n / h.max_grants != grant.use() || server < h.first_incarnation ||
      server > (h.incarnation & kWordMask))
    refuse_adoption("a grant's id is not its cell's", cell);
  if (grant.readers < 1 || grant.readers > kMaxRanks || grant.session >= kMaxSessions || grant.asker >= kMaxMembers)
    refuse_adoption("a grant names what cannot be", cell);
  if (grant.kind != GrantKind::kLease && grant.kind != GrantKind::kReservation)
    refuse_adoption("a grant is of no kind", cell);
}

void Grants::Adopter::judge_cell(uint32_t cell) {
  const Grant& grant = g.grants_[cell];
  if (!whole(grant.word, cell + 1) || grant.state() > GrantState::kClosed)
    refuse_adoption("a grant's state is damaged", cell);
  if (grant.state() == GrantState::kAbsent) return;
  judge_body(grant, cell);
  found.clock_ms = std::max(found.clock_ms, grant.opened_ms);
  const Session& s = g.members_.session(grant.session);
  bool session_open = s.live() && s.use() == grant.session_use;
  if (!holders_possible(grant)) refuse_adoption("a grant's holders are damaged", cell);
  uint64_t holders[2];
  holders_of(grant, holders);
  if (!(holders[0] | holders[1])) {
    // Nothing depends on a grant without holders: one that cannot answer repeats any more is forgotten.
    std::optional<Entries> entries;
    if (session_open)
      entries = grant.kind == GrantKind::kLease ? Entries{{}, 0} : follow_entries(grant, Chain::discharged);
    if (entries) answering_.emplace_back(cell, std::move(*entries));
    else forgotten_.push_back(cell);
    return;
  }
  const Member& asker = g.members_.member(grant.asker);
  if (!session_open || asker.state() == MemberState::kFree || asker.session != grant.session)
    refuse_adoption("L1: a grant outlived its session or its asker", cell);
  auto entries = follow_entries(grant, Chain::held);
  if (!entries) refuse_adoption("a grant's entries are damaged", cell);
  for (uint32_t i = 0; i < entries->count; ++i) {
    const GrantEntry& entry = entry_of(*entries, i);
    if (!names_its_record(entry)) refuse_adoption("I2: a record that is held is damaged or gone", entry.record);
  }
  if (grant.kind == GrantKind::kReservation && !in_order(*entries))
    refuse_adoption("a reservation's entries are not in their order", cell);
  held_.emplace(cell, std::move(*entries));
}

bool Grants::Adopter::names_its_record(const GrantEntry& entry) const {
  return g.chunks_.records().names_live(entry) && !(entry.groups & ~g.chunks_.record(entry.record).groups);
}

const GrantEntry& Grants::Adopter::entry_of(const Entries& entries, uint32_t i) const {
  return g.blocks_[entries.blocks[i / kEntriesPerBlock]].entries[i % kEntriesPerBlock];
}

// As a reservation adds them; commits search them by their index.
bool Grants::Adopter::in_order(const Entries& entries) const {
  for (uint32_t i = 1; i < entries.count; ++i)
    if (entry_of(entries, i).index <= entry_of(entries, i - 1).index) return false;
  return true;
}

// The grant's chain of entry blocks; nullopt if it is broken, or shares a block with another grant. After the last
// counted entry of a held grant there may be one that was being added: it counts if it names its record. The rest of
// that block is zero.
std::optional<Grants::Adopter::Entries> Grants::Adopter::follow_entries(const Grant& grant, Chain chain) {
  bool held = chain == Chain::held;
  Entries out{{}, grant.entry_count};
  uint64_t blocks = (uint64_t{grant.entry_count} + kEntriesPerBlock - 1) / kEntriesPerBlock;  // it may be damaged
  uint32_t used = grant.entry_count % kEntriesPerBlock;
  uint32_t b = grant.first_block;
  auto take = [&] {
    if (b >= g.header_.max_entry_blocks || block_used_[b]) return false;
    block_used_[b] = true;
    out.blocks.push_back(b);
    b = g.blocks_[b].next;
    return true;
  };
  bool chained = blocks <= g.header_.max_entry_blocks;
  for (uint32_t i = 0; chained && i < blocks; ++i) chained = take();
  if (chained && held && !used && b != kNone) chained = take();
  if (chained && held && b == kNone && !out.blocks.empty()) {
    const GrantEntry* tail = g.blocks_[out.blocks.back()].entries;
    bool full = !used && out.blocks.size() == blocks;
    for (uint32_t i = full ? kEntriesPerBlock : used + 1; i < kEntriesPerBlock; ++i)
      chained = chained && tail[i].generation == 0;
    if (!full && names_its_record(tail[used])) ++out.count;
  }
  if (chained && (held ? b == kNone : in_order(out))) return out;
  for (uint32_t one : out.blocks) block_used_[one] = false;
  return std::nullopt;
}

void Grants::Adopter::restart_held() {
  for (auto& [cell, entries] : held_) restart(g.grants_[cell], entries);
}

// Writes anew what the region says of the chain, whose end was not judged.
void Grants::Adopter::link(Grant& grant, const Entries& entries) {
  bool empty = entries.blocks.empty();
  grant.entry_count = entries.count;
  grant.first_block = empty ? kNone : entries.blocks.front();
  grant.last_block = empty ? kNone : entries.blocks.back();
  if (!empty) g.blocks_[grant.last_block].next = kNone;
}

// After this, a lease's holders are asked as if it had just been opened, and a lookup may renew it whatever keys it
// names.
void Grants::Adopter::restart(Grant& grant, const Entries& entries) {
  uint64_t holders[2];
  holders_of(grant, holders);
  link(grant, entries);
  if (entries.count % kEntriesPerBlock == 0 && entries.count / kEntriesPerBlock < entries.blocks.size()) {
    // The last block was linked and never used.
    grant.last_block = entries.blocks.size() > 1 ? entries.blocks[entries.blocks.size() - 2] : kNone;
    (grant.last_block == kNone ? grant.first_block : g.blocks_[grant.last_block].next) = kNone;
    block_used_[entries.blocks.back()] = false;
  }
  grant.asked_ms = found.clock_ms;
  grant.key_count = 0;
  KVDOCK_PAUSE("adopt.grant_relinked");
  bool reservation = grant.kind == GrantKind::kReservation;
  if (reservation && grant.state() == GrantState::kOpen) finish_commits(grant, holders);
  for (int i = 0; i < 2; ++i) {
    publish(grant.holders[i], holders[i]);
    KVDOCK_PAUSE("adopt.holders_half");
    publish(grant.released[i], ~holders[i]);
  }
  if (reservation) publish(grant.word, grant_word(g.cell_of(grant), grant.use(), GrantState::kClosed));
  ++(reservation ? found.reservations : found.leases);
}

// The earlier server may have been killed after it stored the last part's checksum and before it discharged the rank.
void Grants::Adopter::finish_commits(Grant& grant, uint64_t holders[2]) {
  bool published = true;
  uint64_t busy[2] = {0, 0};
  g.for_each_entry(grant, [&](const GrantEntry& entry) {
    const Record& r = g.chunks_.record(entry.record);
    published = published && r.state() != RecordState::kReserved;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      bool committed = r.parts[p].committed & kCommitted;
      published = published && committed;
      if (!committed) busy[r.parts[p].writer / 64] |= 1ull << (r.parts[p].writer % 64);
    }
  });
  grant.completed = published;
  for (int i = 0; i < 2; ++i) holders[i] &= busy[i];
}

void Grants::Adopter::finish_discharged() {
  for (uint32_t cell : forgotten_) {
    Grant& grant = g.grants_[cell];
    publish(grant.word, grant_word(cell, grant.use(), GrantState::kAbsent));
  }
  for (auto& [cell, entries] : answering_) {
    Grant& grant = g.grants_[cell];
    publish(grant.word, grant_word(cell, grant.use(), GrantState::kClosed));
    link(grant, entries);
  }
}

void Grants::Adopter::rebuild() {
  for (uint32_t i = g.header_.max_grants; i-- > 0;)
    if (g.grants_[i].state() == GrantState::kAbsent) g.free_grants_.push_back(i);
  for (uint32_t i = g.header_.max_entry_blocks; i-- > 0;)
    if (!block_used_[i]) g.free_blocks_.push_back(i);
  std::sort(answering_.begin(), answering_.end(),
            [this](auto& a, auto& b) { return g.grants_[a.first].opened_ms < g.grants_[b.first].opened_ms; });
  for (auto& [cell, entries] : answering_) {
    name(cell);
    g.tombstones_.push_back(cell);
  }
  for (auto& [cell, entries] : held_) {
    const Grant& grant = g.grants_[cell];
    name(cell);
    g.held_[grant.session].insert(cell);
    ++g.asked_[grant.asker];
    ++(grant.kind == GrantKind::kLease ? g.count_.leases : g.count_.reservations);
    ++g.usage_of(grant).grants;
    g.for_each_entry(grant, [&](const GrantEntry& entry) { g.chunks_.add_pin(entry.record, grant.session); });
  }
}

// A request may have a lease for each of its epochs: its name leads to the last one.
void Grants::Adopter::name(uint32_t cell) {
  const Grant& grant = g.grants_[cell];
  auto [at, fresh] = g.requests_.try_emplace(g.key_of(grant), cell);
  const Grant& other = g.grants_[at->second];
  if (!fresh && std::pair(other.epoch, other.id) < std::pair(grant.epoch, grant.id)) at->second = cell;
}

void Grants::Adopter::settle() {
  for (auto& [cell, entries] : held_) g.discharge(g.grants_[cell], {});
}

}  // namespace kvdock
