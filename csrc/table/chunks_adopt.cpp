#include "table/adopters.h"

#include <algorithm>
#include <bit>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

namespace {
constexpr uint64_t kSaneKeepMs = 1ull << 40;  // no administrator keeps a chunk for so long
}  // namespace

void Chunks::Adopter::judge(const Region& region, const std::vector<SegmentFacts>& segments) {
  c.spaces_.judge();
  if (c.header_.last_generation >= kGenerations)
    refuse_adoption("the last generation is damaged", c.header_.last_generation, int64_t(kGenerations - 1));
  for (uint32_t space : c.spaces_.live())
    if (c.spaces_.cleared_through(space) > c.header_.last_generation)
      refuse_adoption("a namespace was cleared through a generation that was never given", space);
  judge_segments(segments);
  judge_slabs(region.slabs);
  bad_pages = c.records_.pages().judge();
  c.records_.cover_pages();
  finish_move();
  auto bad = bad_pages.begin();
  for (uint32_t page = 0; page < c.records_.pages().page_count(); ++page) {
    if (bad != bad_pages.end() && *bad == page) {
      ++bad;
      continue;
    }
    for (uint32_t i = 0; i < c.records_.pages().records_in(page); ++i) judge_record(page * kPageRecords + i);
  }
}

// What judge() writes: it ends the move of a part that the earlier server began.
void Chunks::Adopter::finish_move() {
  const uint64_t word = c.header_.move.word;
  if (word == 0) return;
  const auto [id, part] = move_of(word);
  RecordPages& pages = c.records_.pages();
  if (!whole(word) || id >= pages.end() || id % kPageRecords >= pages.records_in(id / kPageRecords) ||
      sizeof(Record) + (part + 1) * sizeof(StoredPart) > pages.size_at(id))
    refuse_adoption("the move of a part is damaged", id);
  c.records_.finish_move();
}

void Chunks::Adopter::judge_segments(const std::vector<SegmentFacts>& segments) {
  size_t matched = 0;
  for (uint32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentEntry& entry = c.segments_[i];
    if (!entry.in_use()) continue;
    uint32_t id = entry.id();
    auto it = std::find_if(segments.begin(), segments.end(), [id](const SegmentFacts& s) { return s.segment == id; });
    if (it == segments.end()) refuse_adoption("a segment's memory is missing", id);
    if (it->data_offset != entry.data_offset || it->data_bytes != entry.data_bytes)
      refuse_adoption("a segment is not as the table describes it", id);
    if (entry.data_offset % kSlotAlign || entry.data_bytes % kSlotAlign)
      refuse_adoption("a segment is not aligned", id);
    c.slots_.add_segment(id, entry.data_offset, entry.data_bytes);
    ++matched;
  }
  if (matched != segments.size())
    refuse_adoption("there are segments that the table does not know", segments.size());
}

void Chunks::Adopter::judge_slabs(const Slab* slabs) {
  for (uint32_t i = 0; i < kMaxSlabs; ++i)
    if (slabs[i].word && !c.slots_.adopt_slab(i)) refuse_adoption("a slab is damaged, or lies where it cannot", i);
}

void Chunks::Adopter::judge_record(uint32_t id) {
  const Record& r = c.record(id);
  if (r.word == 0) return;
  if (!sound(r, c.records_.pages().size_at(id))) {
    damaged.push_back(id);
    return;
  }
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < r.part_count; ++p) {
    uint32_t* owner = c.slots_.owner_of(r.parts[p]);
    if (!owner || *owner != kNone) refuse_adoption("I1: a record's slot has another owner, or does not exist", id);
    *owner = id;
    bytes += round_slot(r.parts[p].length);
  }
  c.records_.info(id).pages = static_cast<uint32_t>(bytes / kSlotAlign);
  live.push_back(id);
  if (r.state() != RecordState::kReady) return;
  if (c.records_.was_cleared(r)) {
    cleared.push_back(id);
    return;
  }
  KeyEntry& e = c.records_.entry(r.space, r.key);
  uint32_t loser = e.ready;
  if (loser == kNone || c.record(loser).generation() < r.generation())
    e.ready = id;
  else
    loser = id;
  if (loser != kNone) older.push_back(loser);
}

// Checks all fields of a record against its namespace; judge_record() checks its slots.
bool Chunks::Adopter::sound(const Record& r, uint32_t size) const {
  if (!whole(r.word) || r.state() == RecordState::kFree || r.state() > RecordState::kQuarantined) return false;
  if (sizeof(Record) + r.part_count * sizeof(StoredPart) != size || r.crc != body_crc(r, r.generation())) return false;
  if (r.generation() == 0 || r.generation() > c.header_.last_generation || !c.spaces_.has(r.space) ||
      !r.key.names_chunk())
    return false;
  const Namespace& ns = c.spaces_[r.space];
  if (r.groups >> ns.group_count || r.part_count != ns.writers * static_cast<uint32_t>(std::popcount(r.groups)))
    return false;
  uint32_t p = 0;
  for (uint32_t g = 0; g < ns.group_count; ++g) {
    if (!(r.groups >> g & 1)) continue;
    for (uint32_t w = 0; w < ns.writers; ++w, ++p) {
      const StoredPart& part = r.parts[p];
      if (part.group != g || part.writer != w || !ns.groups[g].may_have(part.length)) return false;
      bool committed = part.committed & kCommitted;
      if (r.state() == RecordState::kReady && !committed) return false;
      if (committed ? (part.committed & ~kCommitted) >= kChecksumPrime : part.committed != 0) return false;
    }
  }
  return true;
}

void Chunks::Adopter::drop_damaged() {
  found.dropped = static_cast<uint32_t>(damaged.size() + bad_pages.size());
  for (uint32_t id : damaged) publish(c.record(id).word, 0);
  for (uint32_t page : bad_pages) c.records_.pages().clear_page(page);
}

void Chunks::Adopter::quarantine_unfinished() {
  auto quarantine = [this](uint32_t id) {
    publish(c.record(id).word, record_word(c.record(id).generation(), RecordState::kQuarantined));
  };
  found.replaced = static_cast<uint32_t>(older.size());
  for (uint32_t id : older) quarantine(id);
  found.cleared = static_cast<uint32_t>(cleared.size());
  for (uint32_t id : cleared) quarantine(id);
  for (uint32_t id : live) {
    if (c.record(id).state() != RecordState::kReserved) continue;
    quarantine(id);
    KVDOCK_PAUSE("adopt.one_aborted");
    ++found.aborted;
  }
}

void Chunks::Adopter::rebuild() {
  std::vector<bool> taken(c.records_.end(), false);
  for (uint32_t id : live) taken[id] = true;
  c.slots_.adopted();
  for (uint32_t i = 0; i < kMaxSegments; ++i)
    if (c.segments_[i].state() == SegmentState::kRetiring) c.slots_.retire_segment(c.segments_[i].id());
  c.records_.pages().rebuild(taken);
  for (uint32_t id : live) {
    Record& r = c.record(id);
    r.last_used = std::min(r.last_used, c.header_.use_tick);
    for (uint32_t p = 0; p < r.part_count; ++p) c.slots_.touch(r.parts[p].slab, r.last_used);
    c.records_.count(id, 1);
    if (r.state() != RecordState::kReady) continue;
    c.eviction_.add_child(r.space, r.parent);
    c.records_.info(id).children = c.records_.find(r.space, r.key)->children;
    c.eviction_.adopted(id);
    bool kept = r.kept_until_ms > found.clock_ms && r.kept_until_ms < found.clock_ms + kSaneKeepMs;
    c.preferences_.keep(id, kept ? r.kept_until_ms : 0);
    ++found.chunks;
  }
}

void Chunks::Adopter::settle() {
  for (uint32_t id : live)
    if (!c.pins_.has(id)) c.eviction_.unpinned(id);
}

}  // namespace kvdock
