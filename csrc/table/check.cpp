// The integrity check: everything derived is computed again from the region and compared. Tests call it after
// every step; the names in the messages are the invariants of docs/lifetime_protocol.md.
#include <algorithm>

#include "table/body_crc.h"

namespace kvdock {

namespace {
void require(bool ok, const char* what, int64_t where = 0) {
  if (!ok) throw TableRefusal("corrupt", what, where);
}
}  // namespace

void Table::check_integrity() {
  std::lock_guard lock(mutex_);
  check_all();
}

void Table::check_all() {
  require(header_->magic == kTableMagic && header_->geometry == table_geometry(), "the header is not this table's");
  try {
    slots_.check();
  } catch (const std::logic_error& e) {
    throw TableRefusal("corrupt", std::string("slots: ") + e.what());
  }
  check_records();
  check_grants();
  check_index();
}

// I1, I4, I7: each slot has the one owner that names it; sums by state add up to the pool.
void Table::check_records() {
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> owned;
  for (const auto& o : slots_.owners()) owned[{o.segment, o.offset}] = o.record;
  std::array<uint64_t, 4> bytes{}, count{};
  std::map<uint32_t, uint32_t> pinned_in, kept_in;
  size_t slots_named = 0, free_ids = 0;
  for (uint32_t page = 0; page < next_page_; ++page) {
    for (uint32_t i = 0; i < std::min(kPageBytes / page_sizes_[page], kPageRecords); ++i) {
      uint32_t id = page * kPageRecords + i;
      const Record& r = record(id);
      if (r.state() == RecordState::kFree) {
        ++free_ids;
        require(info_[id].pins == 0, "I2: a FREE record is pinned", id);
        continue;
      }
      uint64_t named = 0;
      for (uint32_t p = 0; p < r.part_count; ++p) named += round_slot(r.parts[p].length);
      require(named == record_bytes(id), "a record's size is counted wrongly", id);
      require(r.crc == body_crc(r, r.generation()), "a record's body does not match its CRC", id);
      require(r.generation() <= header_->last_generation, "a generation was never given out", id);
      bytes[static_cast<size_t>(r.state())] += record_bytes(id);
      ++count[static_cast<size_t>(r.state())];
      for (uint32_t p = 0; p < r.part_count; ++p) {
        const StoredPart& part = r.parts[p];
        auto it = owned.find({part.segment, part.offset});
        require(it != owned.end() && it->second == id, "I1: a slot's owner is not the record that names it", id);
        require(r.state() != RecordState::kReady || (part.committed & kCommitted), "I4: READY with a part missing", id);
        ++slots_named;
        if (info_[id].pins) ++pinned_in[part.slab];
        if (info_[id].kept) ++kept_in[part.slab];
      }
      require(r.state() == RecordState::kReady || info_[id].pins > 0, "an unpinned record is neither READY nor FREE",
              id);
      require(!evictable(r, id) || policy_->lists(id, r.generation()), "an evictable chunk is not listed", id);
    }
  }
  require(slots_named == owned.size(), "I1: a slot is owned by no live record", int64_t(owned.size()));
  require(bytes == bytes_in_ && count == records_in_, "I7: sums by state do not add up");
  require(bytes[1] + bytes[2] + bytes[3] == slots_.used_bytes(), "I7: bytes by state are not the bytes in use");
  for (const auto& o : slots_.owners()) {
    uint32_t slab = kNone;
    const Record& r = record(o.record);
    for (uint32_t p = 0; p < r.part_count; ++p)
      if (r.parts[p].offset == o.offset && r.parts[p].segment == o.segment) slab = r.parts[p].slab;
    require(slots_.pinned_slots(slab) == pinned_in[slab], "a slab counts its pinned slots wrongly", slab);
    require(slots_.kept_slots(slab) == kept_in[slab], "a slab counts its kept slots wrongly", slab);
  }
  size_t listed = 0;
  for (const Page& page : page_info_) listed += page.free.size();
  require(listed == free_ids, "a FREE record is not in a free list", int64_t(free_ids));
}

// I2, I7: pins and held bytes are what the undischarged grants imply.
void Table::check_grants() {
  std::map<uint32_t, uint32_t> pins;
  std::map<uint32_t, std::set<uint32_t>> held;
  uint32_t live = 0, blocks = 0;
  for (uint32_t cell = 0; cell < header_->max_grants; ++cell) {
    const Grant& g = grants_[cell];
    if (g.state() == GrantState::kAbsent) continue;
    ++live;
    require(g.crc == body_crc(g), "a grant's body does not match its CRC", cell);
    blocks += (g.line_count + kLinesPerBlock - 1) / kLinesPerBlock;
    if (!g.live_holders()) continue;
    require(session_state_.count(g.session) && session_state_[g.session].grants.count(cell),
            "L1: a grant outlived its session", cell);
    for_each_line(g, [&](const Line& line) {
      const Record& r = record(line.record);
      require(r.state() != RecordState::kFree && r.generation() == line.generation,
              "I2: a pinned record was given away", line.record);
      ++pins[line.record];
      held[g.session].insert(line.record);
      if (g.kind == GrantKind::kReservation && g.state() == GrantState::kClosed)
        require(r.state() != RecordState::kReserved, "a closed reservation can still publish", line.record);
    });
  }
  require(live + free_grants_.size() == header_->max_grants, "a grant cell is lost", live);
  require(blocks + free_blocks_.size() == header_->max_line_blocks, "a line block is lost", blocks);
  uint64_t all = 0;
  for (uint32_t id = 0; id < info_.size(); ++id) {
    auto it = pins.find(id);
    require(info_[id].pins == (it == pins.end() ? 0 : it->second), "I2: pins are not what the grants imply", id);
    if (info_[id].pins) all += record_bytes(id);
  }
  require(all == held_bytes_, "held bytes do not add up");
  for (auto& [cell, state] : session_state_) {
    uint64_t mine = 0;
    for (uint32_t id : held[cell]) mine += record_bytes(id);
    require(state.pinned_through == least_pinned(state), "a session's pinned segments are counted wrongly", cell);
    require(mine == state.held_bytes, "a session's held bytes do not add up", cell);
    require(static_cast<double>(mine) <= widest_session_cap_, "I7: a session is over its cap", cell);
  }
  require(static_cast<double>(all) <= widest_total_cap_, "I7: the pool is over its cap");
}

// I5: per key at most one READY and one RESERVED; children are what the parents' keys say.
void Table::check_index() {
  std::map<std::pair<uint32_t, std::string>, std::array<uint32_t, 3>> want;  // ready, reserved, children
  auto name = [](const Key& k) { return std::string(reinterpret_cast<const char*>(k.bytes), kKeyBytes); };
  auto entry = [&](uint32_t space, const Key& k) -> auto& {
    return want.try_emplace({space, name(k)}, std::array<uint32_t, 3>{kNone, kNone, 0}).first->second;
  };
  for (uint32_t page = 0; page < next_page_; ++page) {
    for (uint32_t i = 0; i < std::min(kPageBytes / page_sizes_[page], kPageRecords); ++i) {
      uint32_t id = page * kPageRecords + i;
      const Record& r = record(id);
      if (r.state() != RecordState::kReady && r.state() != RecordState::kReserved) continue;
      uint32_t& at = entry(r.space, r.key)[r.state() == RecordState::kReady ? 0 : 1];
      require(at == kNone, "I5: two records of one key and state", id);
      at = id;
      if (!r.parent.is_root()) ++entry(r.space, r.parent)[2];
    }
  }
  size_t seen = 0;
  index_.for_each([&](const KeyEntry& e) {
    ++seen;
    auto it = want.find({e.space, name(e.key)});
    require(it != want.end() && it->second == std::array<uint32_t, 3>{e.ready, e.reserved, e.children},
            "the key index disagrees with the records", e.ready);
    require(e.ready == kNone || info_[e.ready].children == e.children, "a READY record counts its children wrongly",
            e.ready);
    require(index_.find(e.space, e.key) != nullptr, "the key index cannot find its own entry", e.ready);
  });
  require(seen == want.size(), "the key index misses a key", int64_t(want.size()));
}

std::map<std::string, uint64_t> Table::stats() {
  std::lock_guard lock(mutex_);
  uint64_t leases = 0, reservations = 0, members = 0;
  for (auto& [cell, state] : session_state_) {
    members += state.members.size();
    for (uint32_t at : state.grants) ++(grants_[at].kind == GrantKind::kLease ? leases : reservations);
  }
  return {
      {"pool_bytes", slots_.total_bytes()},
      {"free_bytes", slots_.free_bytes()},
      {"reserved_bytes", bytes_in_[1]},
      {"ready_bytes", bytes_in_[2]},
      {"quarantined_bytes", bytes_in_[3]},
      {"held_bytes", held_bytes_},
      {"kept_bytes", kept_bytes_},
      {"limit_bytes", options_.limit_bytes},
      {"reserved_chunks", records_in_[1]},
      {"ready_chunks", records_in_[2]},
      {"quarantined_chunks", records_in_[3]},
      {"sessions", session_state_.size()},
      {"members", members},
      {"leases", leases},
      {"reservations", reservations},
      {"lookups", counters_.lookups},
      {"lookup_tokens", counters_.lookup_tokens},
      {"hit_tokens", counters_.hit_tokens},
      {"reserve_calls", counters_.reservations},
      {"stored_chunks", counters_.stored_chunks},
      {"stored_bytes", counters_.stored_bytes},
      {"aborted_chunks", counters_.aborted_chunks},
      {"evicted_chunks", counters_.evicted_chunks},
      {"mismatches", counters_.mismatches},
  };
}

}  // namespace kvdock
