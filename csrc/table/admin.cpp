// What an administrator may do: clear, keep, limits, retiring a segment. None of it discharges a holder (I6):
// memory that somebody was given waits, whatever is asked for here.
#include <algorithm>

#include "table/body_crc.h"
#include "base/pause.h"

namespace kvdock {

// In slices, so that no caller waits long: `start` is a cursor over records, `budget` how many to look at.
std::pair<uint32_t, int64_t> Table::clear(int64_t space, uint64_t start, uint32_t budget) {
  std::lock_guard lock(mutex_);
  if (space >= int64_t{space_count_}) throw TableRefusal("unknown_namespace", "no such namespace", space);
  uint32_t taken = 0;
  uint64_t end = uint64_t{next_page_} * kPageRecords;
  for (uint64_t id = start; id < end; ++id) {
    auto page = static_cast<uint32_t>(id / kPageRecords);
    if (id % kPageRecords >= kPageBytes / page_sizes_[page]) {  // behind the page's last record
      id = uint64_t{page} * kPageRecords + kPageRecords - 1;
      continue;
    }
    if (budget-- == 0) return {taken, static_cast<int64_t>(id)};
    const Record& r = record(static_cast<uint32_t>(id));
    if (r.state() != RecordState::kReady || (space >= 0 && r.space != space)) continue;
    quarantine(static_cast<uint32_t>(id));
    ++taken;
  }
  return {taken, -1};
}

void Table::set_kept(uint32_t id, uint64_t until) {
  Record& r = record(id);
  r.kept_until_ms = until;
  if (info_[id].kept != (until != 0)) {
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.keep(r.parts[p].slab, until ? 1 : -1);
    kept_bytes_ += until ? record_bytes(id) : -record_bytes(id);
  }
  info_[id].kept = until != 0;
  if (until) kept_until_.emplace(until, std::pair(id, r.generation()));
}

uint32_t Table::keep_chunks(uint32_t space, const std::vector<Key>& keys, uint64_t until) {
  std::lock_guard lock(mutex_);
  if (space >= space_count_) throw TableRefusal("unknown_namespace", "no such namespace", space);
  uint32_t found = 0;
  for (const Key& key : keys) {
    KeyEntry* e = index_.find(space, key);
    if (!e || e->ready == kNone) continue;
    set_kept(e->ready, until);
    if (!until) offer(e->ready);
    ++found;
  }
  return found;
}

bool Table::can_evict() {
  std::lock_guard lock(mutex_);
  for (uint32_t shape : policy_->shapes())
    if (oldest(shape)) return true;
  return false;
}

void Table::expire_kept(uint64_t now) {
  while (!kept_until_.empty() && kept_until_.begin()->first <= now) {
    auto [id, generation] = kept_until_.begin()->second;
    kept_until_.erase(kept_until_.begin());
    const Record& r = record(id);
    if (r.generation() != generation || !info_[id].kept || r.kept_until_ms > now) continue;
    set_kept(id, 0);
    offer(id);
  }
}

void Table::set_limits(uint64_t limit_bytes, double session_cap, double total_cap) {
  std::lock_guard lock(mutex_);
  if (limit_bytes < slots_.total_bytes())
    throw TableRefusal("bad_argument", "the limit is below what the segments hold; retire some first",
                       int64_t(limit_bytes), int64_t(slots_.total_bytes()));
  for (double cap : {session_cap, total_cap})
    if (!(cap > 0 && cap <= 1))
      throw TableRefusal("bad_argument", "a cap is a share of the pool", std::to_string(cap), "above 0, at most 1");
  // What was granted under wider caps stays granted: the integrity check knows the widest there were.
  widest_session_cap_ = std::max(widest_session_cap_, session_cap * static_cast<double>(limit_bytes));
  widest_total_cap_ = std::max(widest_total_cap_, total_cap * static_cast<double>(limit_bytes));
  header_->limit_bytes = options_.limit_bytes = limit_bytes;
  options_.session_cap = session_cap;
  options_.total_cap = total_cap;
}

// Drains: nothing new goes in, what nobody pins or keeps goes out. Returns the bytes still in use.
uint64_t Table::retire_segment(uint32_t segment, uint32_t max_chunks) {
  std::lock_guard lock(mutex_);
  if (!slots_.knows(segment)) throw TableRefusal("bad_argument", "no such segment", segment);
  if (!slots_.retired(segment)) {
    publish(segments_[segment].word, sealed(kSegmentRetiring));
    KVDOCK_PAUSE("retire.begun");
    slots_.retire_segment(segment);
  }
  for (uint32_t id : slots_.records_in(segment)) {
    if (max_chunks == 0) break;
    if (record(id).state() != RecordState::kReady || info_[id].pins || info_[id].kept) continue;
    quarantine(id);
    ++counters_.evicted_chunks;
    --max_chunks;
  }
  return slots_.used_bytes(segment);
}

void Table::remove_segment(uint32_t segment) {
  std::lock_guard lock(mutex_);
  if (!slots_.knows(segment) || !slots_.retired(segment))
    throw TableRefusal("bad_argument", "the segment was not retired", segment);
  if (uint64_t used = slots_.used_bytes(segment))
    throw TableRefusal("bad_argument", "the segment is still in use", int64_t(used), 0);
  KVDOCK_PAUSE("retire.empty");
  publish(segments_[segment].word, sealed(kSegmentGone));
  KVDOCK_PAUSE("retire.gone");
  slots_.remove_segment(segment);
}

}  // namespace kvdock
