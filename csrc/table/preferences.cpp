#include "table/preferences.h"

#include <map>

namespace kvdock {

namespace {

constexpr double kRetainedShare = 0.25;  // of the pool: the rest stays for chunks without hints
constexpr double kShareOfTenant = 0.5;   // of what is retained, so that a tenant leaves some to others

}  // namespace

// ---- keeps

void Preferences::keep(uint32_t id, uint64_t until_ms) {
  RecordInfo& in = records_.info(id);
  Record& r = records_.at(id);
  if (in.kept) keeps_end_.erase({r.kept_until_ms, id});
  r.kept_until_ms = until_ms;
  bool kept = until_ms != 0;
  if (in.kept != kept) {
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.keep(r.parts[p].slab, kept ? 1 : -1);
    kept_bytes_ += kept ? records_.bytes_of(id) : -records_.bytes_of(id);
  }
  in.kept = kept;
  if (kept) keeps_end_.emplace(until_ms, id);
}

// ---- priorities

uint64_t Preferences::priority_until(uint32_t id) const {
  auto it = priority_until_.find(id);
  return it == priority_until_.end() ? 0 : it->second;
}

void Preferences::set_priority(uint32_t id, int8_t priority, uint64_t until_ms) {
  RecordInfo& in = records_.info(id);
  if (in.priority > 0) count_retained(id, -1);
  if (auto it = priority_until_.find(id); it != priority_until_.end()) {
    priorities_end_.erase({it->second, id});
    priority_until_.erase(it);
  }
  in.priority = priority;
  if (priority > 0) count_retained(id, 1);
  if (priority == 0 || until_ms == 0) return;
  priority_until_.emplace(id, until_ms);
  priorities_end_.emplace(until_ms, id);
}

void Preferences::count_retained(uint32_t id, int sign) {
  retained_bytes_ += sign * records_.bytes_of(id);
  records_.usage_of(id).retained_bytes += sign * records_.bytes_of(id);
}

bool Preferences::may_retain(uint32_t id) const {
  double most = kRetainedShare * static_cast<double>(header_.limit_bytes);
  uint64_t bytes = records_.bytes_of(id), of_tenant = records_.usage_of(id).retained_bytes;
  if (!records_.is_own_users(id) && static_cast<double>(of_tenant + bytes) > kShareOfTenant * most) return false;
  return static_cast<double>(retained_bytes_ + bytes) <= most;
}

// A chunk that another continues is not evicted, so a retained chunk also keeps its ancestors. None is retained longer,
// or at a higher priority, than its parent: so retained_bytes_ counts everything that hints retain.
Preferences::Retained Preferences::bound(uint32_t id, int8_t* priority, uint64_t* until_ms) const {
  const RecordInfo& in = records_.info(id);
  if (in.priority <= 0 && !may_retain(id)) return Retained::no_capacity;
  if (records_.at(id).parent.names_chunk()) {
    const KeyEntry* parent = records_.parent_of(records_.at(id));
    if (!parent || parent->any() == kNone || records_.info(parent->any()).priority <= 0) return Retained::no_parent;
    *priority = std::min(*priority, records_.info(parent->any()).priority);
    *until_ms = std::min(*until_ms, priority_until(parent->any()));
  }
  if (in.priority > 0) {
    *priority = std::max(*priority, in.priority);
    *until_ms = std::max(*until_ms, priority_until(id));
  }
  return Retained::yes;
}

void Preferences::move(uint32_t from, uint32_t to) {
  const RecordInfo& old = records_.info(from);
  if (old.kept) {
    keep(to, records_.at(from).kept_until_ms);
    keep(from, 0);
  }
  int8_t priority = old.priority;
  uint64_t until_ms = priority_until(from);
  set_priority(from, 0, 0);
  if (priority > 0 && records_.info(to).priority <= 0 && may_retain(to)) set_priority(to, priority, until_ms);
}

void Preferences::clear(uint32_t id) {
  if (records_.info(id).kept) keep(id, 0);
  if (records_.info(id).priority != 0) set_priority(id, 0, 0);
}

// ---- check

void Preferences::check() const {
  check_keeps();
  check_priorities();
}

// Each kept chunk has its end, and their bytes add up. Slabs count their kept slots.
void Preferences::check_keeps() const {
  std::map<uint32_t, uint32_t> kept_slots;  // by slab
  uint64_t kept = 0, ends = 0;
  for (uint32_t id = records_.next(0); id < records_.end(); id = records_.next(id + 1)) {
    const Record& r = records_.at(id);
    if (r.state() == RecordState::kFree) continue;
    bool is_kept = records_.info(id).kept;
    for (uint32_t p = 0; p < r.part_count; ++p) kept_slots[r.parts[p].slab] += is_kept;
    if (!is_kept) continue;
    kept += records_.bytes_of(id);
    ++ends;
    require(keeps_end_.count({r.kept_until_ms, id}) != 0, "a kept chunk has no end", id);
  }
  require(kept == kept_bytes_, "kept bytes do not add up");
  require(ends == keeps_end_.size(), "a keep ends that is not there", 0);
  for (auto& [slab, count] : kept_slots)
    require(slots_.kept_slots(slab) == count, "a slab counts its kept slots wrongly", slab);
}

// Only chunks that can be found have priorities, each end is that of a priority, and retained bytes add up.
void Preferences::check_priorities() const {
  uint64_t retained = 0, ends = 0;
  for (uint32_t id = 0; id < records_.end(); ++id) {
    const RecordInfo& in = records_.info(id);
    auto until = priority_until_.find(id);
    require(in.priority != 0 || until == priority_until_.end(), "a priority that is over has an end", id);
    if (in.priority == 0) continue;
    RecordState state = records_.at(id).state();
    require(state == RecordState::kReady || state == RecordState::kReserved,
            "a chunk that lookups cannot find has a priority", id);
    if (in.priority > 0) retained += records_.bytes_of(id);
    require(in.priority < 0 || until != priority_until_.end(), "a retained chunk has no end", id);
    if (until == priority_until_.end()) continue;
    ++ends;
    require(priorities_end_.count({until->second, id}) != 0, "a priority never ends", id);
  }
  require(retained == retained_bytes_, "retained bytes do not add up");
  require(ends == priority_until_.size() && ends == priorities_end_.size(), "an end is that of no priority", 0);
}

}  // namespace kvdock
