// Which chunks go when room is needed, and what an administrator may ask for. Nothing here discharges a holder (I6):
// memory that somebody was given waits, whoever asks for it.
#include <algorithm>

#include "table/chunks.h"

namespace kvdock {

void Chunks::evict_one(uint32_t id) {
  const Record& r = record(id);
  ++counters_.evicted_chunks;
  if (spaces_.left().has(r.space)) {  // a policy learns nothing from it
    take_out(id, spaces_.goes_first(r.space) ? Gone::weights : cause_);
    next_.reset();
    return;
  }
  policy_->evicted(described(id), header_.use_tick);
  unlist(id);
  info_[id].kind = kNoKind;
  take_out(id, cause_);
  next_.reset();
}

// For what least() or least_with() chose: then its parent, if it is as old and of its kind, is the next least.
void Chunks::evict_least(const Choice& least) {
  const Record& r = record(least.leaf.record);
  uint32_t space = r.space;
  uint64_t used = r.last_used;
  Key parent = r.parent;
  evict_one(least.leaf.record);
  const KeyEntry* above = parent.names_chunk() ? index_.find(space, parent) : nullptr;
  if (!above || above->ready == kNone) return;
  const Info& in = info_[above->ready];
  if (!in.listed || in.kept || in.priority != least.priority) return;
  if (in.kind != least.kind || record(above->ready).last_used != used) return;
  next_ = {policy_->worth(in.kind, used, header_.use_tick), leaf_of(above->ready), in.kind, in.priority};
  next_shape_ = spaces_.shape_of(space);
  next_tick_ = header_.use_tick;
}

std::optional<Choice> Chunks::least_in(int8_t priority, const LeafLists& leaves, uint32_t shape) const {
  if (next_ && next_->priority == priority && next_shape_ == shape && next_tick_ == header_.use_tick) return next_;
  auto c = leaves.of_shape(shape, *policy_, header_.use_tick);
  if (c) c->priority = priority;
  return c;
}

// Some chunk that may go of a namespace that was left: all of them are dead.
std::optional<Choice> Chunks::first_of(const std::optional<LeftSpaces::Left>& left) const {
  if (!left) return std::nullopt;
  uint32_t id = leaves_in_[left->space];
  return Choice{static_cast<double>(left->at_ms), leaf_of(id), info_[id].kind, kLeft};
}

// Chunks of weights that nobody runs any more go first; then the lowest priority that has a leaf.
std::optional<Choice> Chunks::least(uint32_t shape) {
  cause_ = Gone::room;  // a store has no record
  if (auto c = first_of(spaces_.left().of_shape(shape, spaces_.left_until_ms()))) return c;
  for (auto& [priority, leaves] : evictions_)
    if (auto c = least_in(priority, leaves, shape)) return c;
  return std::nullopt;
}

// Of all chunks, or of those of namespaces that have slots of that size.
std::optional<Choice> Chunks::least_with(std::optional<uint64_t> slot_bytes) {
  std::optional<Choice> best;
  auto look = [&](const auto& lists, auto&& least_of) {
    lists.for_each_shape([&](uint32_t shape) {
      if (slot_bytes && !spaces_.shape_has(shape, *slot_bytes)) return;
      if (auto c = least_of(shape); c && (!best || c->goes_before(*best))) best = c;
    });
  };
  look(spaces_.left(), [&](uint32_t shape) {
    return first_of(spaces_.left().of_shape(shape, spaces_.left_until_ms()));
  });
  if (best) return best;
  for (auto it = evictions_.begin(); it != evictions_.end() && !best; ++it)
    look(it->second, [&](uint32_t shape) { return least_in(it->first, it->second, shape); });
  return best;
}

// Frees something on the way to a slot of `bytes`; false when no leaf and no window may go. A window has chunks of all
// priorities: it goes after leaves of a low one, and before leaves that are retained.
bool Chunks::evict_for(uint64_t bytes) {
  std::optional<Choice> own = least_with(round_slot(bytes));
  std::optional<uint64_t> own_use;
  if (own) own_use = own->leaf.used;
  std::optional<SlotAllocator::Window> window;
  if (slots_.has_other_sizes(bytes) && !(own && own->priority < 0)) window = slots_.oldest_window(bytes, own_use);
  if (own && (!window || (own->priority == 0 && own->leaf.used <= window->newest))) {
    evict_least(*own);
    return true;
  }
  if (!window || window->records.empty()) return false;
  for (uint32_t id : window->records)
    if (record(id).state() == RecordState::kReady) evict_one(id);  // else it went with an earlier one
  return true;
}

bool Chunks::make_room(uint64_t bytes, const NewChunk& chunk) {
  cause_ = Gone::room;
  wanted_.insert(round_slot(bytes));
  return evict_for(bytes) || evict_self_naming_chain(bytes, chunk);
}

// No leaf is left. Records above one that is pinned, kept or RESERVED, or above the new chunk, wait for it. Any other
// unpinned READY record is part of a chain that names itself as ancestor: the oldest with a slot of the size goes.
bool Chunks::evict_self_naming_chain(uint64_t bytes, const NewChunk& chunk) {
  std::vector<bool> above(info_.size(), false);
  auto walk_up = [&](uint32_t space, Key key) {
    while (key.names_chunk()) {
      const KeyEntry* e = index_.find(space, key);
      uint32_t up = e ? e->any() : kNone;
      if (up == kNone || above[up]) return;
      if (e->reserved != kNone) above[e->reserved] = true;
      above[up] = true;
      key = record(up).parent;
    }
  };
  auto each = [&](auto&& f) {
    index_.for_each([&](const KeyEntry& e) {
      for (uint32_t id : {e.ready, e.reserved})
        if (id != kNone) f(id);
    });
  };
  each([&](uint32_t id) {
    if (info_[id].pins || info_[id].kept) walk_up(record(id).space, record(id).parent);
  });
  walk_up(chunk.space, chunk.parent);
  std::optional<uint32_t> victim;
  each([&](uint32_t id) {
    const Record& r = record(id);
    bool may_go = r.state() == RecordState::kReady && !info_[id].pins && !info_[id].kept && !above[id];
    if (may_go && spaces_.shape_has(spaces_.shape_of(r.space), round_slot(bytes)) &&
        (!victim || r.last_used < record(*victim).last_used))
      victim = id;
  });
  if (victim) evict_one(*victim);
  return victim.has_value();
}

// ---- quotas

// The tenant's leaf that is worth least, of the lowest priority that it has; one that an administrator keeps only if
// there is no other.
bool Chunks::evict_of(uint32_t tenant) {
  cause_ = Gone::quota;
  std::optional<Choice> c = first_of(spaces_.left().of_tenant(tenant, spaces_.left_until_ms()));
  for (auto it = evictions_.begin(); it != evictions_.end() && !c; ++it)
    c = it->second.of_tenant(tenant, *policy_, header_.use_tick);
  if (!c) c = kept_.of_tenant(tenant, *policy_, header_.use_tick);
  if (c) evict_one(c->leaf.record);
  return c.has_value();
}

// Evicts no more than the new chunk needs: of a tenant that was above its quota before, evict_over_quota() evicts.
// Nothing goes for a chunk that could never fit.
bool Chunks::make_room_in_quota(const NewChunk& chunk) {
  uint32_t tenant = spaces_.tenant_of(chunk.space);
  Tenants& tenants = spaces_.tenants();
  if (tenants.fits(tenant, chunk.bytes)) return true;
  if (tenants.is_over(tenant) || !tenants.could_fit(tenant, chunk.bytes) || !chunk.makes_room()) return false;
  while (!tenants.fits(tenant, chunk.bytes))
    if (!evict_of(tenant)) return false;
  return true;
}

uint32_t Chunks::evict_over_quota(uint32_t max_chunks) {
  uint32_t gone = 0;
  for (uint32_t tenant = 0; tenant < spaces_.tenants().end(); ++tenant)
    while (gone < max_chunks && spaces_.tenants().is_over(tenant) && evict_of(tenant)) ++gone;
  return gone;
}

// ---- room

uint64_t Chunks::room_bytes() const {
  uint64_t room = slots_.free_bytes();
  for (uint64_t size : wanted_) room = std::min(room, slots_.room_for(size, room));
  return room;
}

// First for the sizes that stores had to make room for: what is free elsewhere is of no use to them.
uint32_t Chunks::evict(uint64_t target_room_bytes, uint32_t max_chunks) {
  cause_ = Gone::ahead;
  uint64_t until = counters_.evicted_chunks + max_chunks, before = counters_.evicted_chunks;
  while (counters_.evicted_chunks < until) {
    auto lacks = [&](uint64_t size) { return slots_.room_for(size, target_room_bytes) < target_room_bytes; };
    auto size = std::find_if(wanted_.begin(), wanted_.end(), lacks);
    if (size != wanted_.end()) {
      if (!evict_for(*size)) wanted_.erase(size);
      continue;
    }
    wanted_.clear();
    if (slots_.free_bytes() >= target_room_bytes) break;
    std::optional<Choice> best = least_with(std::nullopt);
    if (!best) break;
    evict_least(*best);
  }
  return static_cast<uint32_t>(counters_.evicted_chunks - before);
}

uint32_t Chunks::empty_left(size_t kept, uint32_t max_chunks, const std::optional<Id16>& tenant) {
  cause_ = Gone::weights;
  std::optional<uint32_t> number = tenant ? spaces_.tenants().find(*tenant) : std::nullopt;
  if (tenant && !number) return 0;
  uint32_t gone = 0;
  for (; gone < max_chunks; ++gone) {
    const LeftSpaces& all = spaces_.left();
    auto c = first_of(number ? all.of_tenant(*number, UINT64_MAX) : all.before_the_last(kept));
    if (!c) break;
    evict_one(c->leaf.record);
  }
  return gone;
}

std::vector<SpaceInfo> Chunks::spaces() {
  std::vector<SpaceInfo> out;
  for (uint32_t space : spaces_.live()) {
    const Namespace& ns = spaces_[space];
    SpaceInfo info{space, ns.digest, ns.base, ns.tenant, chunks_in(space), std::nullopt};
    if (spaces_.left().has(space)) info.left_ms = spaces_.left().left_at(space);
    out.push_back(info);
  }
  return out;
}

bool Chunks::can_evict() const {
  auto some = [](auto& one) { return one.second.size() != 0; };
  return std::any_of(evictions_.begin(), evictions_.end(), some);
}

// The leaves that are worth least now, each with what is above it as long as that is as old.
std::map<uint32_t, std::vector<Key>> Chunks::next_out(uint64_t bytes) const {
  constexpr size_t kSeen = 64;  // of each kind: enough for the order of those that go soon
  std::vector<Choice> leaves;
  for (auto& [priority, lists] : evictions_)
    lists.for_each_oldest(kSeen, [&, priority = priority](uint8_t kind, const Leaf& leaf) {
      if (spaces_.left().has(record(leaf.record).space)) return;  // nobody will want it
      leaves.push_back({policy_->worth(kind, leaf.used, header_.use_tick), leaf, kind, priority});
    });
  std::sort(leaves.begin(), leaves.end(), [](const Choice& a, const Choice& b) { return a.goes_before(b); });
  std::map<uint32_t, std::vector<Key>> out;
  for (const Choice& one : leaves) {
    for (uint32_t id = one.leaf.record; id != kNone;) {
      const Record& r = record(id);
      if (bytes_of(id) > bytes) return out;
      bytes -= bytes_of(id);
      out[r.space].push_back(r.key);
      const KeyEntry* above = r.parent.names_chunk() ? index_.find(r.space, r.parent) : nullptr;
      id = above ? above->ready : kNone;
      if (id != kNone && (info_[id].pins || info_[id].kept || record(id).last_used != r.last_used)) id = kNone;
    }
  }
  return out;
}

void Chunks::set_eviction(const std::string& policy) {
  std::unique_ptr<Policy> made = make_policy(policy);
  if (policy == policy_->name()) return;
  policy_ = std::move(made);
  next_.reset();
  for (uint32_t id = pages_.next_id(0); id < pages_.end(); id = pages_.next_id(id + 1)) {
    if (record(id).state() != RecordState::kReady) continue;
    unlist(id);
    info_[id].kind = policy_->stored(described(id), std::nullopt);
    offer(id);
  }
}

// ---- administration

// In slices, so that no other call waits long.
template <class F>
Cleared Chunks::take_out_where(uint64_t start, uint32_t budget, F&& wanted) {
  uint32_t taken = 0;
  auto from = static_cast<uint32_t>(std::min<uint64_t>(start, pages_.end()));
  for (uint32_t id = pages_.next_id(from); id < pages_.end(); id = pages_.next_id(id + 1)) {
    if (budget-- == 0) return {taken, id};
    const Record& r = record(id);
    if (r.state() != RecordState::kReady || !wanted(r)) continue;
    take_out(id, Gone::cleared);
    ++taken;
  }
  return {taken, -1};
}

Cleared Chunks::clear(int64_t space, uint64_t start, uint32_t budget) {
  if (space >= 0) spaces_.require(static_cast<uint32_t>(space));
  return take_out_where(start, budget, [&](const Record& r) { return space < 0 || r.space == space; });
}

Cleared Chunks::clear_old(uint64_t start, uint32_t budget) {
  return take_out_where(start, budget, [&](const Record& r) { return was_cleared(r); });
}

const KeyEntry* Chunks::find(uint32_t space, const Key& key) {
  const KeyEntry* e = index_.find(space, key);
  if (!e || e->ready == kNone || !was_cleared(record(e->ready))) return e;
  take_out(e->ready, Gone::cleared);
  return index_.find(space, key);
}

std::pair<std::vector<Ready>, int64_t> Chunks::ready(uint64_t start, uint32_t budget) const {
  std::vector<Ready> found;
  auto from = static_cast<uint32_t>(std::min<uint64_t>(start, pages_.end()));
  for (uint32_t id = pages_.next_id(from); id < pages_.end(); id = pages_.next_id(id + 1)) {
    if (budget-- == 0) return {std::move(found), id};
    const Record& r = record(id);
    if (r.state() == RecordState::kReady && !was_cleared(r)) found.push_back({r.space, r.key, r.parent});
  }
  return {std::move(found), -1};
}

Key Chunks::parent_of(uint32_t space, const Key& key) const {
  const KeyEntry* e = index_.find(space, key);
  return e != nullptr && e->ready != kNone ? record(e->ready).parent : Key{};
}

void Chunks::set_kept(uint32_t id, uint64_t until_ms) {
  unlist(id);
  Record& r = record(id);
  if (info_[id].kept) kept_until_.erase({r.kept_until_ms, id});
  r.kept_until_ms = until_ms;
  bool kept = until_ms != 0;
  if (info_[id].kept != kept) {
    for (uint32_t p = 0; p < r.part_count; ++p) slots_.keep(r.parts[p].slab, kept ? 1 : -1);
    kept_bytes_ += kept ? bytes_of(id) : -bytes_of(id);
  }
  info_[id].kept = kept;
  if (kept) kept_until_.emplace(until_ms, id);
}

void Chunks::keep(uint32_t id, uint64_t until_ms) {
  set_kept(id, until_ms);
  offer(id);
}

void Chunks::expire_kept(uint64_t now) {
  while (!kept_until_.empty() && kept_until_.begin()->first <= now) keep(kept_until_.begin()->second, 0);
}

uint64_t Chunks::oldest_used_ms() const {
  std::optional<uint64_t> oldest = kept_.oldest();
  for (auto& [priority, leaves] : evictions_)
    if (auto used = leaves.oldest(); used && (!oldest || *used < *oldest)) oldest = used;
  return oldest ? used_ms(*oldest) : 0;
}

}  // namespace kvdock
