// What is derived from records and slots is computed again and compared.
#include "table/body_crc.h"
#include "table/chunks.h"

namespace kvdock {

void Chunks::check(const ImpliedPins& implied) {
  slots_.check();
  check_records();
  check_slots();
  check_pins(implied);
  check_index();
  check_wishes();
  check_spaces();
}

// Each namespace lists what may go of it, but for what an administrator keeps.
void Chunks::check_spaces() const {
  std::vector<uint32_t> wanted(kMaxNamespaces), found(kMaxNamespaces);
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1))
    if (info_[id].listed && !info_[id].kept) ++wanted[record(id).space];
  std::vector<bool> has_leaves(kMaxNamespaces);
  for (uint32_t space = 0; space < leaves_in_.size(); ++space) {
    uint32_t before = kNone;
    for (uint32_t id = leaves_in_[space]; id != kNone; before = id, id = info_[id].behind) {
      const Info& in = info_[id];
      require(in.listed && !in.kept && record(id).space == space, "a namespace lists what may not go", id);
      require(in.before == before, "the list of what may go of a namespace is broken", id);
      require(++found[space] <= wanted[space], "a namespace lists a chunk twice", id);
    }
    has_leaves[space] = found[space] != 0;
  }
  require(found == wanted, "a namespace does not list all that may go of it");
  spaces_.check(has_leaves);
}

// I4, I7: bodies are as they were written, and sums by state are those of the records.
void Chunks::check_records() const {
  Sums sums;
  std::vector<bool> taken(info_.size(), false);
  size_t listed = 0;
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1)) {
    const Record& r = record(id);
    taken[id] = r.state() != RecordState::kFree;
    if (!taken[id]) {
      require(info_[id].pins == 0, "I2: a FREE record is pinned", id);
      require(info_[id].pages == 0 && !info_[id].kept, "a FREE record has bytes or is kept", id);
      continue;
    }
    uint64_t named = 0;
    for (uint32_t p = 0; p < r.part_count; ++p) named += round_slot(r.parts[p].length);
    require(named == bytes_of(id), "a record's size is counted wrongly", id);
    require(r.crc == body_crc(r, r.generation()), "a record's body does not match its CRC", id);
    require(r.generation() <= header_.last_generation, "a generation was never given out", id);
    for (uint32_t p = 0; p < r.part_count; ++p)
      require(r.state() != RecordState::kReady || (r.parts[p].committed & kCommitted), "I4: READY with a part missing",
              id);
    require(r.state() == RecordState::kReady || info_[id].pins > 0, "an unpinned record is neither READY nor FREE", id);
    const Info& in = info_[id];
    require(in.listed == may_go(id), "what is listed is not what may go", id);
    require((in.kind == kNoKind) == (r.state() != RecordState::kReady), "a kind is not that of a READY record", id);
    auto usual = evictions_.find(in.priority);
    require(!in.listed || in.kept || usual != evictions_.end(), "an evictable chunk's priority has no list", id);
    const LeafLists& list = in.kept || !in.listed ? kept_ : usual->second;
    uint32_t shape = spaces_.shape_of(r.space), tenant = spaces_.tenant_of(r.space);
    require(!in.listed || list.lists(shape, tenant, in.kind, leaf_of(id)), "an evictable chunk is not listed", id);
    listed += in.listed;
    sums.bytes[static_cast<size_t>(r.state())] += named;
    ++sums.records[static_cast<size_t>(r.state())];
  }
  pages_.check(taken);
  size_t in_lists = kept_.size();
  for (auto& [priority, leaves] : evictions_) {
    require(priority == 0 || leaves.size() != 0, "a priority has an empty list", priority);
    in_lists += leaves.size();
  }
  require(listed == in_lists, "something is listed that is not there");
  require(sums == sums_, "I7: sums by state do not add up");
  require(sums.bytes[1] + sums.bytes[2] + sums.bytes[3] == slots_.used_bytes(),
          "I7: bytes by state are not the bytes in use");
}

std::vector<Usage> Chunks::count_usage() const {
  std::vector<Usage> by_tenant;
  auto of = [&](uint32_t space) -> Usage& {
    uint32_t tenant = spaces_.tenant_of(space);
    if (tenant >= by_tenant.size()) by_tenant.resize(tenant + 1);
    return by_tenant[tenant];
  };
  for (uint32_t space : spaces_.live()) ++of(space).namespaces;
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1)) {
    const Record& r = record(id);
    if (r.state() == RecordState::kFree) continue;
    of(r.space).bytes += bytes_of(id);
    ++of(r.space).chunks;
  }
  return by_tenant;
}

// I1: each slot that a record names is its own; as their bytes are the bytes in use, no other slot has an owner. Slabs
// count their pinned and kept slots. Each kept chunk has its time, and their bytes add up.
void Chunks::check_slots() {
  std::map<uint32_t, std::pair<uint32_t, uint32_t>> counted;  // by slab: pinned and kept slots
  uint64_t kept = 0, timed = 0;
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1)) {
    const Record& r = record(id);
    const Info& in = info_[id];
    if (r.state() == RecordState::kFree) continue;
    for (uint32_t p = 0; p < r.part_count; ++p) {
      const uint32_t* owner = slots_.owner_of(r.parts[p]);
      require(owner && *owner == id, "I1: a slot's owner is not the record that names it", id);
      auto& [pinned_slots, kept_slots] = counted[r.parts[p].slab];
      pinned_slots += in.pins != 0;
      kept_slots += in.kept;
    }
    if (!in.kept) continue;
    kept += bytes_of(id);
    ++timed;
    require(kept_until_.count({r.kept_until_ms, id}) != 0, "a kept chunk has no end", id);
  }
  require(kept == kept_bytes_, "kept bytes do not add up");
  require(timed == kept_until_.size(), "what ends is not a kept chunk", 0);
  for (auto& [slab, count] : counted) {
    require(slots_.pinned_slots(slab) == count.first, "a slab counts its pinned slots wrongly", slab);
    require(slots_.kept_slots(slab) == count.second, "a slab counts its kept slots wrongly", slab);
  }
}

// Wishes are of chunks that can be found, each end is that of a wish, and the bytes of retained ones add up.
void Chunks::check_wishes() const {
  uint64_t retained = 0, ends = 0;
  for (uint32_t id = 0; id < info_.size(); ++id) {
    const Info& in = info_[id];
    auto until = wished_until_.find(id);
    require(in.priority != 0 || until == wished_until_.end(), "a wish that is over has an end", id);
    if (in.priority == 0) continue;
    RecordState state = record(id).state();
    require(state == RecordState::kReady || state == RecordState::kReserved, "a wish is for what nobody finds", id);
    if (in.priority > 0) retained += bytes_of(id);
    require(in.priority < 0 || until != wished_until_.end(), "a retained chunk has no end", id);
    if (until == wished_until_.end()) continue;
    ++ends;
    require(wishes_end_.count({until->second, id}) != 0, "a wish never ends", id);
  }
  require(retained == retained_bytes_, "retained bytes do not add up");
  require(ends == wished_until_.size() && ends == wishes_end_.size(), "what ends is not a wish", 0);
}

// I2, I7: pins, and the bytes that sessions hold by them, are what the grants imply.
void Chunks::check_pins(const ImpliedPins& implied) const {
  std::map<uint32_t, uint64_t> held;
  uint64_t all = 0;
  size_t shared = 0;
  for (uint32_t id = 0; id < info_.size(); ++id) {
    const Info& in = info_[id];
    auto it = implied.find(id);
    if (it == implied.end()) {
      require(in.pins == 0 && in.sole == kNone, "I2: a record is pinned that no grant names", id);
      continue;
    }
    uint32_t pins = 0;
    for (auto& [session, count] : it->second) {
      pins += count;
      held[session] += bytes_of(id);
      if (in.sole == kMany) {
        auto found = shared_pins_.find(pair_of(session, id));
        require(found != shared_pins_.end() && found->second == count, "a session's pins are counted wrongly", id);
        ++shared;
      }
    }
    all += bytes_of(id);
    require(in.pins == pins, "I2: pins are not what the grants imply", id);
    require(in.sole == kMany || (it->second.size() == 1 && in.sole == it->second.begin()->first),
            "a record is not pinned by its one session alone", id);
  }
  require(shared == shared_pins_.size(), "a session's pins are counted for a record that it does not pin");
  require(all == held_bytes_, "held bytes do not add up");
  for (uint32_t session = 0; session < held_by_.size(); ++session)
    require(held_by_[session] == held[session], "a session's held bytes do not add up", session);
}

// I5: per key at most one READY and one RESERVED; children are the records that name the key as parent.
void Chunks::check_index() const {
  struct Want {
    uint32_t ready = kNone, reserved = kNone, children = 0;
  };
  std::map<std::pair<uint32_t, std::string>, Want> want;
  auto entry = [&](uint32_t space, const Key& k) -> Want& {
    return want[{space, std::string(reinterpret_cast<const char*>(k.bytes), kKeyBytes)}];
  };
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1)) {
    const Record& r = record(id);
    if (r.state() != RecordState::kReady && r.state() != RecordState::kReserved) continue;
    Want& w = entry(r.space, r.key);
    uint32_t& at = r.state() == RecordState::kReady ? w.ready : w.reserved;
    require(at == kNone, "I5: two records of one key and state", id);
    at = id;
    if (r.parent.names_chunk()) ++entry(r.space, r.parent).children;
  }
  index_.for_each([&](const KeyEntry& e) {
    const Want& w = entry(e.space, e.key);
    require(w.ready == e.ready && w.reserved == e.reserved && w.children == e.children && !e.unused(),
            "the key index disagrees with the records", e.ready);
    require(e.ready == kNone || info_[e.ready].children == e.children, "a READY record counts its children wrongly",
            e.ready);
    require(index_.find(e.space, e.key) == &e, "the key index cannot find its own entry", e.ready);
  });
  require(index_.size() == want.size(), "the key index misses a key", int64_t(want.size()));
}

}  // namespace kvdock
