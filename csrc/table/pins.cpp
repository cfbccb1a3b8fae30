#include "table/pins.h"

namespace kvdock {

void Pins::add(uint32_t id, uint32_t session) {
  RecordInfo& in = records_.info(id);
  uint64_t bytes = records_.bytes_of(id);
  if (in.pins++ == 0) {
    const Record& r = records_.at(id);
    held_bytes_ += bytes;
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.pin(r.parts[p].slab);
    in.sole = session;
    held_by(session) += bytes;
    return;
  }
  if (in.sole == session) return;
  if (in.sole != kMany) {
    shared_[pair_of(in.sole, id)] = in.pins - 1;
    in.sole = kMany;
  }
  if (++shared_[pair_of(session, id)] == 1) held_by(session) += bytes;
}

bool Pins::drop(uint32_t id, uint32_t session) {
  RecordInfo& in = records_.info(id);
  uint64_t bytes = records_.bytes_of(id);
  --in.pins;
  if (in.sole == kMany) {
    auto it = shared_.find(pair_of(session, id));
    if (--it->second == 0) {
      shared_.erase(it);
      held_by(session) -= bytes;
    }
  } else if (in.pins == 0) {
    held_by(session) -= bytes;
  }
  if (in.pins) return false;
  in.sole = kNone;
  held_bytes_ -= bytes;
  const Record& r = records_.at(id);
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.unpin(r.parts[p].slab);
  return true;
}

// I2, I7: pins, and the bytes that sessions hold by them, are what the grants imply. Slabs count their pinned slots.
void Pins::check(const ImpliedPins& implied) const {
  std::map<uint32_t, uint64_t> held;
  std::map<uint32_t, uint32_t> pinned_slots;  // by slab
  uint64_t all = 0;
  size_t shared = 0;
  for (uint32_t id = 0; id < records_.end(); ++id) {
    const RecordInfo& in = records_.info(id);
    auto it = implied.find(id);
    if (it == implied.end()) {
      require(in.pins == 0 && in.sole == kNone, "I2: a record is pinned that no grant names", id);
      continue;
    }
    uint32_t pins = 0;
    for (auto& [session, count] : it->second) {
      pins += count;
      held[session] += records_.bytes_of(id);
      if (in.sole == kMany) {
        auto found = shared_.find(pair_of(session, id));
        require(found != shared_.end() && found->second == count, "a session's pins are counted wrongly", id);
        ++shared;
      }
    }
    all += records_.bytes_of(id);
    require(in.pins == pins, "I2: pins are not what the grants imply", id);
    require(in.sole == kMany || (it->second.size() == 1 && in.sole == it->second.begin()->first),
            "a record is not pinned by its one session alone", id);
  }
  for (uint32_t id = records_.next(0); id < records_.end(); id = records_.next(id + 1)) {
    const Record& r = records_.at(id);
    if (r.state() == RecordState::kFree) continue;
    for (uint32_t p = 0; p < r.part_count; ++p) pinned_slots[r.parts[p].slab] += records_.info(id).pins != 0;
  }
  for (auto& [slab, count] : pinned_slots)
    require(slots_.pinned_slots(slab) == count, "a slab counts its pinned slots wrongly", slab);
  require(shared == shared_.size(), "a session's pins are counted for a record that it does not pin");
  require(all == held_bytes_, "held bytes do not add up");
  for (uint32_t session = 0; session < held_by_.size(); ++session)
    require(held_by_[session] == held[session], "a session's held bytes do not add up", session);
}

}  // namespace kvdock
