// Construction and the life of a record: FREE → RESERVED → READY → QUARANTINED → FREE.
#include "table/table.h"
#include "base/pause.h"

#include <algorithm>

#include "table/body_crc.h"

namespace kvdock {

namespace {
struct Capacity {
  uint32_t grants, line_blocks, pages;

  Capacity(uint64_t max_records, uint64_t max_grants)
      : grants(static_cast<uint32_t>(max_grants)),
        line_blocks(static_cast<uint32_t>(max_grants * 4 + 1024)),
        // Pages for records of up to 4 parts, and a few more, since each record size starts its own page.
        pages(static_cast<uint32_t>(max_records / (kPageBytes / (sizeof(Record) + 4 * sizeof(StoredPart))) + 8)) {}
};
}  // namespace

uint64_t Table::region_bytes(uint64_t max_records, uint64_t max_grants) {
  Capacity c(max_records, max_grants);
  return RegionMap(c.grants, c.line_blocks, c.pages).end;
}

Table::Table(uint8_t* region, uint64_t bytes, const TableOptions& options)
    : options_(options),
      base_(region),
      header_(reinterpret_cast<TableHeader*>(region)),
      slots_(nullptr, 0),
      policy_(std::make_unique<LruPolicy>()) {
  if (options.max_records == 0 || options.max_grants == 0)
    throw TableRefusal("bad_argument", "a table needs room for records and grants", 0, "1 or more");
  uint64_t need = region_bytes(options.max_records, options.max_grants);
  if (bytes < need)
    throw TableRefusal("bad_argument", "the region is too small for the table", int64_t(bytes), int64_t(need));
  Capacity capacity(options.max_records, options.max_grants);
  header_->crc = 0;
  header_->max_grants = capacity.grants;
  header_->max_line_blocks = capacity.line_blocks;
  header_->max_pages = capacity.pages;
  header_->pool_id = options.pool_id;
  header_->region_bytes = bytes;
  header_->lock_inode = options.lock_inode;
  header_->first_incarnation = static_cast<uint32_t>(options.incarnation);
  header_->incarnation = sealed(options.incarnation);
  header_->limit_bytes = options.limit_bytes;
  header_->geometry = table_geometry();
  header_->crc = body_crc(*header_);
  header_->magic = kTableMagic;
  lay_out();
  auto fill = [](std::vector<uint32_t>& v, uint32_t n) {
    v.resize(n);
    for (uint32_t i = 0; i < n; ++i) v[i] = n - 1 - i;
  };
  for (uint32_t cell = 0; cell < header_->max_grants; ++cell)
    grants_[cell].word = grant_word(cell, 0, GrantState::kAbsent);
  fill(free_sessions_, kMaxSessions);
  fill(free_members_, kMaxMembers);
  fill(free_grants_, header_->max_grants);
  fill(free_blocks_, header_->max_line_blocks);
  std::atomic_ref<uint32_t>(header_->version).store(kTableVersion, std::memory_order_release);
}

// Where the arrays are, and what does not depend on their content.
void Table::lay_out() {
  RegionMap at(header_->max_grants, header_->max_line_blocks, header_->max_pages);
  spaces_ = reinterpret_cast<Namespace*>(base_ + at.namespaces);
  segments_ = reinterpret_cast<SegmentEntry*>(base_ + at.segments);
  sessions_ = reinterpret_cast<Session*>(base_ + at.sessions);
  members_ = reinterpret_cast<Member*>(base_ + at.members);
  grants_ = reinterpret_cast<Grant*>(base_ + at.grants);
  blocks_ = reinterpret_cast<LineBlock*>(base_ + at.line_blocks);
  page_sizes_ = reinterpret_cast<uint32_t*>(base_ + at.page_sizes);
  pages_ = base_ + at.pages;
  slots_ = SlotAllocator(reinterpret_cast<Slab*>(base_ + at.slabs), kMaxSlabs);
  grant_request_.resize(header_->max_grants);
  widest_session_cap_ = options_.session_cap * static_cast<double>(options_.limit_bytes);
  widest_total_cap_ = options_.total_cap * static_cast<double>(options_.limit_bytes);
}

void Table::add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
  std::lock_guard lock(mutex_);
  if (segment >= kMaxSegments) throw TableRefusal("bad_argument", "segment id out of range", segment, kMaxSegments - 1);
  SegmentEntry& s = segments_[segment];
  if (s.word) throw TableRefusal("bad_argument", "segment was added before", segment);
  if (data_offset % kSlotAlign || data_bytes % kSlotAlign)
    throw TableRefusal("bad_argument", "segment data is not aligned to slots", int64_t(data_offset | data_bytes),
                       int64_t(kSlotAlign));
  s.data_offset = data_offset;
  s.data_bytes = data_bytes;
  KVDOCK_PAUSE("grow.entry_written");
  publish(s.word, sealed(kSegmentLive));
  KVDOCK_PAUSE("grow.known");
  slots_.add_segment(segment, data_offset, data_bytes);
}

uint32_t Table::add_namespace(const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens, uint32_t writers,
                              const std::vector<Group>& groups) {
  std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < space_count_; ++i)
    if (spaces_[i].digest == digest) return i;
  if (block_tokens == 0 || chunk_tokens == 0 || chunk_tokens % block_tokens)
    throw TableRefusal("bad_argument", "chunk_tokens is not a multiple of block_tokens", chunk_tokens, block_tokens);
  if (writers < 1 || writers > kMaxRanks) throw TableRefusal("bad_argument", "writers out of range", writers, "1..128");
  if (groups.empty() || groups.size() > kMaxGroups)
    throw TableRefusal("bad_argument", "number of groups out of range", int64_t(groups.size()), "1..16");
  if (space_count_ == kMaxNamespaces) throw TableRefusal("table_full", "no namespace left", kMaxNamespaces);
  Namespace& ns = spaces_[space_count_];
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].part_bytes == 0) throw TableRefusal("bad_argument", "part_bytes is 0", 0, "1 or more");
    if (groups[g].kind == GroupKind::kWindow && groups[g].window_tokens == 0)
      throw TableRefusal("bad_argument", "a window group has no window", 0, "1 or more tokens");
    ns.groups[g] = groups[g];
  }
  ns.chunk_tokens = chunk_tokens;
  ns.block_tokens = block_tokens;
  ns.writers = writers;
  ns.group_count = static_cast<uint32_t>(groups.size());
  ns.digest = digest;
  ns.crc = body_crc(ns);
  publish(ns.word, sealed(1));
  add_shape(ns);
  return space_count_++;
}

// Namespaces whose parts have the same slot sizes make room for each other.
void Table::add_shape(const Namespace& ns) {
  std::vector<uint64_t> shape;
  for (uint32_t g = 0; g < ns.group_count; ++g) shape.push_back(round_slot(ns.groups[g].part_bytes));
  std::sort(shape.begin(), shape.end());
  shape.erase(std::unique(shape.begin(), shape.end()), shape.end());
  auto known = std::find(shapes_.begin(), shapes_.end(), shape);
  space_shape_.push_back(static_cast<uint32_t>(known - shapes_.begin()));
  if (known == shapes_.end()) shapes_.push_back(shape);
}

// ---- records

std::optional<uint32_t> Table::new_record_id(uint32_t parts) {
  auto size = static_cast<uint32_t>((sizeof(Record) + parts * sizeof(StoredPart) + 15) / 16 * 16);
  auto& room = pages_with_room_[size];
  if (room.empty()) {
    auto page = open_page(size);
    if (!page) return std::nullopt;
    room.insert(*page);
  }
  Page& page = page_info_[*room.begin()];
  uint32_t id = page.free.back();
  page.free.pop_back();
  ++page.live;
  if (page.free.empty()) room.erase(room.begin());
  return id;
}

// A page for records of `size`: one whose records are all FREE, or one that was never used.
std::optional<uint32_t> Table::open_page(uint32_t size) {
  uint32_t page;
  if (!spare_pages_.empty()) {
    page = spare_pages_.back();
    spare_pages_.pop_back();
    // State words of another size lie where bodies of the old one did: all FREE before the size changes.
    if (page_sizes_[page] != size) std::memset(pages_ + uint64_t{page} * kPageBytes, 0, kPageBytes);
  } else if (next_page_ < header_->max_pages) {
    page = next_page_++;
    page_info_.resize(next_page_);
    info_.resize(uint64_t{next_page_} * kPageRecords);
  } else {
    return std::nullopt;
  }
  page_sizes_[page] = size;
  page_info_[page].free.clear();
  for (uint32_t i = std::min(kPageBytes / size, kPageRecords); i-- > 0;)
    page_info_[page].free.push_back(page * kPageRecords + i);
  return page;
}

void Table::give_record_id(uint32_t id) {
  uint32_t at = id / kPageRecords;
  Page& page = page_info_[at];
  page.free.push_back(id);
  auto& room = pages_with_room_[page_sizes_[at]];
  if (--page.live > 0) {
    room.insert(at);
  } else {
    room.erase(at);
    spare_pages_.push_back(at);
  }
}

void Table::count_state(uint32_t id, int sign) {
  auto s = static_cast<size_t>(record(id).state());
  bytes_in_[s] += sign * record_bytes(id);
  records_in_[s] += sign;
}

// Every transition of a record passes here: one 64-bit store.
void Table::set_state(uint32_t id, RecordState state) {
  Record& r = record(id);
  if (r.state() != RecordState::kFree) count_state(id, -1);
  publish(r.word, state == RecordState::kFree ? 0 : sealed(r.generation() << 3 | static_cast<uint64_t>(state)));
  if (state != RecordState::kFree) count_state(id, 1);
}

void Table::free_record(uint32_t id) {
  Record& r = record(id);
  KVDOCK_PAUSE("quarantine.held_by_none");
  set_state(id, RecordState::kFree);
  KVDOCK_PAUSE("quarantine.freed");
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.give(r.parts[p].slab, r.parts[p].offset);
  info_[id] = RecordInfo{};
  give_record_id(id);
}

// Leaves the key index: from now on nobody finds the record.
void Table::unlink(uint32_t id) {
  Record& r = record(id);
  if (info_[id].kept) set_kept(id, 0);
  KeyEntry* e = index_.find(r.space, r.key);
  if (e->ready == id) e->ready = kNone;
  if (e->reserved == id) e->reserved = kNone;
  index_.drop_if_unused(*e);
  uncount_child(r.space, r.parent);
}

void Table::count_child(uint32_t space, const Key& parent) {
  if (parent.is_root()) return;
  KeyEntry& e = index_.insert(space, parent);
  ++e.children;
  if (e.ready != kNone) info_[e.ready].children = e.children;
}

void Table::uncount_child(uint32_t space, const Key& parent) {
  if (parent.is_root()) return;
  KeyEntry* e = index_.find(space, parent);
  uint32_t ready = e->ready, left = --e->children;
  index_.drop_if_unused(*e);
  if (ready == kNone) return;
  info_[ready].children = left;
  if (left == 0) offer(ready);
}

void Table::quarantine(uint32_t id) {
  const Record& r = record(id);
  if (r.state() == RecordState::kReady) changes_.note(r.space, r.key, false);
  unlink(id);
  KVDOCK_PAUSE("evict.unlinked");
  set_state(id, RecordState::kQuarantined);
  KVDOCK_PAUSE("evict.quarantined");
  settle(id);
}

void Table::publish_record(uint32_t id) {
  Record& r = record(id);
  KeyEntry& e = *index_.find(r.space, r.key);
  uint32_t old = e.ready;
  KVDOCK_PAUSE("publish.whole");
  set_state(id, RecordState::kReady);
  KVDOCK_PAUSE("publish.ready");
  e.reserved = kNone;
  e.ready = id;
  info_[id].children = e.children;
  ++counters_.stored_chunks;
  counters_.stored_bytes += record_bytes(id);
  changes_.note(r.space, r.key, true);
  if (old == kNone) return;
  // The old record is no longer found by key; its child's place under the parent is the new one's.
  if (info_[old].kept) {
    set_kept(id, record(old).kept_until_ms);
    set_kept(old, 0);
  }
  set_state(old, RecordState::kQuarantined);
  uncount_child(record(old).space, record(old).parent);
  settle(old);
}

// What a record without pins becomes.
void Table::settle(uint32_t id) {
  if (info_[id].pins) return;
  Record& r = record(id);
  if (r.state() == RecordState::kQuarantined) return free_record(id);
  if (r.state() != RecordState::kReady) return;
  if (r.temporary && r.temp_seen != 0 && r.temp_seen != kTempKept) return quarantine(id);
  offer(id);
}

bool Table::evictable(const Record& r, uint32_t id) {
  const RecordInfo& in = info_[id];
  return r.state() == RecordState::kReady && in.pins == 0 && in.children == 0 && !in.kept;
}

void Table::offer(uint32_t id) {
  Record& r = record(id);
  if (evictable(r, id)) policy_->offer(space_shape_[r.space], {id, r.generation(), r.last_used});
}

void Table::stamp(Record& r, uint64_t tick) {
  r.last_used = tick;
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.touch(r.parts[p].slab, tick);
}

// ---- pins: bytes a session holds are counted once however many of its grants name them (section 8)

void Table::add_pin(uint32_t id, uint32_t session) {
  RecordInfo& in = info_[id];
  const Record& r = record(id);
  if (in.pins++ == 0) {
    held_bytes_ += record_bytes(id);
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.pin(r.parts[p].slab);
    in.sole = session;
    session_state_[session].held_bytes += record_bytes(id);
    return;
  }
  if (in.sole == session) return;
  if (in.sole != kMany) {
    shared_pins_[uint64_t{in.sole} << 32 | id] = in.pins - 1;
    in.sole = kMany;
  }
  if (++shared_pins_[uint64_t{session} << 32 | id] == 1) session_state_[session].held_bytes += record_bytes(id);
}

void Table::drop_pin(uint32_t id, uint32_t session) {
  RecordInfo& in = info_[id];
  const Record& r = record(id);
  --in.pins;
  if (in.sole == kMany) {
    auto it = shared_pins_.find(uint64_t{session} << 32 | id);
    if (--it->second == 0) {
      shared_pins_.erase(it);
      session_state_[session].held_bytes -= record_bytes(id);
    }
  } else if (in.pins == 0) {
    session_state_[session].held_bytes -= record_bytes(id);
  }
  if (in.pins) return;
  in.sole = kNone;
  held_bytes_ -= record_bytes(id);
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.unpin(r.parts[p].slab);
  settle(id);
}

uint32_t Table::remove(uint32_t space, const std::vector<Key>* keys) {
  std::lock_guard lock(mutex_);
  if (space >= space_count_) throw TableRefusal("unknown_namespace", "no such namespace", space);
  std::vector<uint32_t> doomed;
  if (keys) {
    for (const Key& k : *keys)
      if (KeyEntry* e = index_.find(space, k); e && e->ready != kNone) doomed.push_back(e->ready);
  } else {
    index_.for_each([&](const KeyEntry& e) {
      if (e.space == space && e.ready != kNone) doomed.push_back(e.ready);
    });
  }
  std::sort(doomed.begin(), doomed.end());
  doomed.erase(std::unique(doomed.begin(), doomed.end()), doomed.end());
  for (uint32_t id : doomed) quarantine(id);
  return static_cast<uint32_t>(doomed.size());
}

const char* Table::state_of(uint32_t space, const Key& key) {
  std::lock_guard lock(mutex_);
  KeyEntry* e = index_.find(space, key);
  if (e && e->ready != kNone) return "ready";
  return e && e->reserved != kNone ? "reserved" : "absent";
}

}  // namespace kvdock
