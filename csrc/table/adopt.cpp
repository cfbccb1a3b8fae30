// Judging the region of an earlier server: what SIGKILL can leave is accepted, anything else is named.
#include "table/adopt.h"
#include "base/pause.h"

#include <algorithm>
#include <bit>

namespace kvdock {

namespace {

constexpr uint64_t kLastIncarnation = (1ull << 24) - 1;  // grant ids have that much room for it

[[noreturn]] void refuse(const char* what, uint64_t where = 0, Value wanted = {}) {
  throw TableRefusal("not_adoptable", what, static_cast<int64_t>(where), std::move(wanted));
}

const TableHeader& checked_header(const uint8_t* region, uint64_t bytes, const TableOptions& options) {
  if (bytes < sizeof(TableHeader)) refuse("the region is shorter than a table's header", bytes);
  const auto& h = *reinterpret_cast<const TableHeader*>(region);
  if (h.magic != kTableMagic) refuse("the region holds no chunk table", h.magic);
  uint32_t version = std::atomic_ref<uint32_t>(const_cast<uint32_t&>(h.version)).load(std::memory_order_acquire);
  if (version == 0) refuse("the region was never finished");
  if (version != kTableVersion)
    throw TableRefusal("wrong_version", "the table is of another version", version, kTableVersion);
  if (h.crc != body_crc(h)) refuse("the header does not match its CRC");
  if (h.geometry != table_geometry())
    throw TableRefusal("wrong_version", "the table was laid out by another build", int64_t(h.geometry),
                       int64_t(table_geometry()));
  if (h.pool_id != options.pool_id) refuse("the table is another pool's", h.pool_id, int64_t(options.pool_id));
  if (h.region_bytes != bytes) refuse("the region has another size than it had", bytes, int64_t(h.region_bytes));
  if (h.lock_inode != options.lock_inode)
    refuse("the members hold their locks in another lock file", options.lock_inode, int64_t(h.lock_inode));
  if (RegionMap(h.max_grants, h.max_line_blocks, h.max_pages).end > bytes) refuse("the arrays do not fit", bytes);
  uint64_t life = h.incarnation & kWordMask;
  if (!whole(h.incarnation) || life < h.first_incarnation || life >= kLastIncarnation)
    refuse("the count of server lives is damaged or used up", life);
  return h;
}

}  // namespace

std::vector<SegmentFacts> Table::stored_segments(const uint8_t* region, uint64_t bytes, const TableOptions& options) {
  const TableHeader& h = checked_header(region, bytes, options);
  RegionMap at(h.max_grants, h.max_line_blocks, h.max_pages);
  auto* entries = reinterpret_cast<const SegmentEntry*>(region + at.segments);
  std::vector<SegmentFacts> out;
  for (uint32_t i = 0; i < kMaxSegments; ++i) {
    if (entries[i].word == 0) continue;
    uint64_t state = entries[i].word & kWordMask;
    if (!whole(entries[i].word) || state > kSegmentGone) refuse("a segment's state is damaged", i);
    out.push_back({i, state, entries[i].data_offset, entries[i].data_bytes});
  }
  return out;
}

Table::Table(uint8_t* region, uint64_t bytes, const TableOptions& options, const std::vector<SegmentFacts>& segments,
             Adoption* found)
    : options_(options),
      base_(region),
      header_(reinterpret_cast<TableHeader*>(region)),
      slots_(nullptr, 0),
      policy_(std::make_unique<LruPolicy>()) {
  checked_header(region, bytes, options);
  lay_out();
  Adopter{*this, *header_, *found}.run(segments);
}

void Table::Adopter::run(const std::vector<SegmentFacts>& segments) {
  judge_namespaces();
  judge_segments(segments);
  judge_slabs();
  judge_sessions();
  judge_members();
  judge_records();
  block_used.assign(h.max_line_blocks, false);
  for (uint32_t cell = 0; cell < h.max_grants; ++cell) judge_grant(cell);
  KVDOCK_PAUSE("adopt.judged");
  take_over();
  KVDOCK_PAUSE("adopt.taken_over");
  build_records();
  build_grants();
  settle_all();
  KVDOCK_PAUSE("adopt.settled");
  t.check_all();
}

void Table::Adopter::judge_namespaces() {
  uint32_t count = 0;
  for (uint32_t i = 0; i < kMaxNamespaces; ++i) {
    const Namespace& ns = t.spaces_[i];
    if (ns.word == 0) continue;
    if (ns.word != sealed(1) || ns.crc != body_crc(ns) || i != count) refuse("a namespace is damaged", i);
    if (ns.group_count < 1 || ns.group_count > kMaxGroups || ns.writers < 1 || ns.writers > kMaxRanks)
      refuse("a namespace has impossible groups or writers", i);
    if (ns.block_tokens == 0 || ns.chunk_tokens == 0 || ns.chunk_tokens % ns.block_tokens)
      refuse("a namespace has impossible chunks", i);
    for (uint32_t g = 0; g < ns.group_count; ++g)
      if (ns.groups[g].part_bytes == 0 || ns.groups[g].kind > GroupKind::kState)
        refuse("a namespace has an impossible group", i);
    ++count;
  }
  for (uint32_t i = 0; i < count; ++i) t.add_shape(t.spaces_[i]);
  t.space_count_ = count;
}

void Table::Adopter::judge_segments(const std::vector<SegmentFacts>& segments) {
  size_t matched = 0;
  for (uint32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentEntry& entry = t.segments_[i];
    uint64_t state = entry.word & kWordMask;
    if (entry.word == 0 || state == kSegmentGone) continue;
    auto it = std::find_if(segments.begin(), segments.end(), [i](const SegmentFacts& s) { return s.segment == i; });
    if (it == segments.end()) refuse("a segment's memory is missing", i);
    if (it->data_offset != entry.data_offset || it->data_bytes != entry.data_bytes)
      refuse("a segment is not as the table describes it", i);
    if (entry.data_offset % kSlotAlign || entry.data_bytes % kSlotAlign) refuse("a segment is not aligned", i);
    t.slots_.add_segment(i, entry.data_offset, entry.data_bytes);
    ++matched;
  }
  if (matched != segments.size()) refuse("there are segments that the table does not know", segments.size());
}

void Table::Adopter::judge_slabs() {
  const auto* slabs = reinterpret_cast<const Slab*>(
      t.base_ + RegionMap(h.max_grants, h.max_line_blocks, h.max_pages).slabs);
  for (uint32_t i = 0; i < kMaxSlabs; ++i)
    if (slabs[i].word && !t.slots_.adopt_slab(i)) refuse("a slab is damaged, or lies where it cannot", i);
}

void Table::Adopter::judge_sessions() {
  for (uint32_t cell = 0; cell < kMaxSessions; ++cell) {
    const Session& s = t.sessions_[cell];
    if (!whole(s.word)) refuse("a session's state is damaged", cell);
    if (!s.live()) continue;
    if (s.crc != body_crc(s) || s.space >= t.space_count_) refuse("a session is damaged", cell);
    t.session_state_[cell];
    found.clock_ms = std::max(found.clock_ms, s.opened_ms);
    ++found.sessions;
  }
}

void Table::Adopter::judge_members() {
  std::map<uint32_t, std::array<uint64_t, 2>> ranks;
  for (uint32_t cell = 0; cell < kMaxMembers; ++cell) {
    const Member& m = t.members_[cell];
    if (!whole(m.word) || m.state() > MemberState::kGone) refuse("a member's state is damaged", cell);
    if (m.state() == MemberState::kFree) continue;
    if (m.crc != body_crc(m) || m.session >= kMaxSessions || !t.sessions_[m.session].live())
      refuse("a member is damaged", cell);
    t.session_state_[m.session].members.insert(cell);
    if (m.state() == MemberState::kGone) continue;
    for (uint32_t i = 0; i < 2; ++i) {
      uint64_t& taken = ranks[m.session][i];
      if (taken & m.ranks[i]) refuse("two members have one rank", cell);
      taken |= m.ranks[i];
    }
    ++found.members;
  }
}

void Table::Adopter::judge_records() {
  for (uint32_t page = 0; page < h.max_pages; ++page)
    if (t.page_sizes_[page]) t.next_page_ = page + 1;
  t.page_info_.resize(t.next_page_);
  t.info_.resize(uint64_t{t.next_page_} * kPageRecords);
  for (uint32_t page = 0; page < t.next_page_; ++page) {
    uint32_t size = t.page_sizes_[page];
    if (size <= sizeof(Record) || size > kPageBytes || (size - sizeof(Record)) % sizeof(StoredPart)) {
      bad_pages.push_back(page);
      continue;
    }
    for (uint32_t i = 0; i < std::min(kPageBytes / size, kPageRecords); ++i) {
      uint32_t id = page * kPageRecords + i;
      const Record& r = t.record(id);
      if (r.word == 0) continue;
      if (!sound(r, size)) {
        damaged.push_back(id);
        continue;
      }
      uint64_t bytes = 0;
      for (uint32_t p = 0; p < r.part_count; ++p) {
        if (!t.slots_.can_own(r.parts[p])) refuse("I1: a record's slot has another owner, or does not exist", id);
        t.slots_.own(r.parts[p], id);
        bytes += round_slot(r.parts[p].length);
      }
      t.info_[id].pages = static_cast<uint32_t>(bytes / kSlotAlign);
      live.push_back(id);
      if (r.state() != RecordState::kReady) continue;
      KeyEntry& e = t.index_.insert(r.space, r.key);
      uint32_t loser = e.ready;
      if (loser == kNone || t.record(loser).generation() < r.generation())
        e.ready = id;
      else
        loser = id;
      if (loser != kNone) older.push_back(loser);
    }
  }
}

// Everything a record says of itself, checked against its namespace; its slots are checked by the caller.
bool Table::Adopter::sound(const Record& r, uint32_t size) const {
  if (!whole(r.word) || r.state() == RecordState::kFree || r.state() > RecordState::kQuarantined) return false;
  if (sizeof(Record) + r.part_count * sizeof(StoredPart) != size || r.crc != body_crc(r, r.generation())) return false;
  if (r.generation() == 0 || r.generation() > h.last_generation || r.space >= t.space_count_ || r.key.is_root())
    return false;
  const Namespace& ns = t.spaces_[r.space];
  if (r.groups >> ns.group_count || r.part_count != ns.writers * static_cast<uint32_t>(std::popcount(r.groups)))
    return false;
  uint32_t p = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g) {
    if (!(r.groups >> g & 1)) continue;
    for (uint32_t w = 0; w < ns.writers; ++w, ++p) {
      const StoredPart& part = r.parts[p];
      if (part.group != g || part.writer != w || part.length != ns.groups[g].part_bytes) return false;
      bool committed = part.committed & kCommitted;
      if (r.state() == RecordState::kReady && !committed) return false;
      if (committed ? (part.committed & ~kCommitted) >= kChecksumPrime : part.committed != 0) return false;
    }
  }
  return true;
}

void Table::Adopter::judge_body(const Grant& g, uint32_t cell) const {
  if (g.crc != body_crc(g)) refuse("a grant's body does not match its CRC", cell);
  uint64_t n = g.id & ((1ull << 40) - 1), life = g.id >> 40;
  if (n % h.max_grants != cell || n / h.max_grants != g.use() || life < h.first_incarnation || life > t.incarnation())
    refuse("a grant's id is not its place's", cell);
  if (g.readers < 1 || g.readers > kMaxRanks || g.session >= kMaxSessions || g.asker >= kMaxMembers)
    refuse("a grant names what cannot be", cell);
  if (g.kind != GrantKind::kLease && g.kind != GrantKind::kReservation) refuse("a grant is of no kind", cell);
}

void Table::Adopter::judge_grant(uint32_t cell) {
  const Grant& g = t.grants_[cell];
  if (!whole(g.word, cell + 1) || g.state() > GrantState::kClosed) refuse("a grant's state is damaged", cell);
  if (g.state() == GrantState::kAbsent) return;
  judge_body(g, cell);
  found.clock_ms = std::max(found.clock_ms, g.opened_ms);
  const Session& s = t.sessions_[g.session];
  bool session_open = s.live() && s.use() == g.session_use;
  if (!holders_possible(g)) refuse("a grant's holders are damaged", cell);
  uint64_t holders[2];
  holders_of(g, holders);
  if (!(holders[0] | holders[1])) {
    // Nothing depends on it: one that cannot answer repeats any more is forgotten.
    bool answers = session_open && (g.kind == GrantKind::kLease || follow_lines(g, false));
    (answers ? done : forgotten).push_back(cell);
    return;
  }
  const Member& asker = t.members_[g.asker];
  if (!session_open || asker.state() == MemberState::kFree || asker.session != g.session)
    refuse("L1: a grant outlived its session or its asker", cell);
  auto lines = follow_lines(g, true);
  if (!lines) refuse("a grant's lines are damaged", cell);
  for (uint32_t i = 0; i < lines->count; ++i) {
    const Line& line = t.blocks_[lines->blocks[i / kLinesPerBlock]].lines[i % kLinesPerBlock];
    if (!holds_its_record(line)) refuse("I2: a record that is held is damaged or gone", line.record);
  }
  grants.emplace(cell, std::move(*lines));
}

bool Table::Adopter::holds_its_record(const Line& line) const {
  if (line.record >= t.info_.size() || t.info_[line.record].pages == 0) return false;
  const Record& r = t.record(line.record);
  return r.generation() == line.generation && !(line.groups & ~r.groups);
}

// The chain of line blocks, each in one grant only; nullopt when it is no such chain. Behind the last line of a
// held grant there may be one that was being added: if it names its record it counts. After that all is zero.
std::optional<Table::Adopter::Lines> Table::Adopter::follow_lines(const Grant& g, bool held) {
  Lines out{{}, g.line_count};
  uint32_t blocks = (g.line_count + kLinesPerBlock - 1) / kLinesPerBlock, used = g.line_count % kLinesPerBlock;
  uint32_t b = g.first_block;
  auto take = [&] {
    if (b >= h.max_line_blocks || block_used[b]) return false;
    block_used[b] = true;
    out.blocks.push_back(b);
    b = t.blocks_[b].next;
    return true;
  };
  bool chained = blocks <= h.max_line_blocks;
  for (uint32_t i = 0; chained && i < blocks; ++i) chained = take();
  if (chained && held && !used && b != kNone) chained = take();
  if (chained && held && b == kNone && !out.blocks.empty()) {
    const Line* tail = t.blocks_[out.blocks.back()].lines;
    bool full = !used && out.blocks.size() == blocks;
    for (uint32_t i = full ? kLinesPerBlock : used + 1; i < kLinesPerBlock; ++i)
      chained = chained && tail[i].generation == 0;
    if (!full && holds_its_record(tail[used])) ++out.count;
  }
  if (chained && (!held || b == kNone)) return out;
  for (uint32_t one : out.blocks) block_used[one] = false;
  return std::nullopt;
}

}  // namespace kvdock
