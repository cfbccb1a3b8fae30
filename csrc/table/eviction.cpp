#include "table/eviction.h"

#include <algorithm>
#include <bit>

#include "base/pause.h"
#include "base/seeded_hash.h"

namespace kvdock {

Eviction::Eviction(const TableHeader& header, Namespaces& spaces, SlotAllocator& slots, Records& records,
                   Preferences& preferences)
    : header_(header), spaces_(spaces), slots_(slots), records_(records), preferences_(preferences) {}

// ---- candidates

bool Eviction::is_candidate(uint32_t id) const {
  const RecordInfo& in = records_.info(id);
  return in.pins == 0 && in.children == 0 && records_.at(id).state() == RecordState::kReady;
}

void Eviction::offer(uint32_t id) {
  RecordInfo& in = records_.info(id);
  if (in.listed || !is_candidate(id)) return;
  next_.reset();  // this record may be worth less
  const Record& r = records_.at(id);
  list_of(id).add(spaces_.shape_of(r.space), spaces_.tenant_of(r.space), in.kind, leaf_of(id));
  in.listed = true;
  if (!in.kept) list_in_space(id);
}

void Eviction::unlist(uint32_t id) {
  RecordInfo& in = records_.info(id);
  if (!in.listed) return;
  if (next_ && next_->choice.leaf.record == id) next_.reset();
  const Record& r = records_.at(id);
  LeafLists& list = list_of(id);
  list.remove(spaces_.shape_of(r.space), spaces_.tenant_of(r.space), in.kind, leaf_of(id));
  bool of_priority = in.priority != 0 && !in.kept;
  if (of_priority && list.size() == 0) lists_.erase(in.priority);
  if (!in.kept) unlist_in_space(id);
  in.listed = false;
}

void Eviction::list_in_space(uint32_t id) {
  uint32_t space = records_.at(id).space;
  if (space >= in_space_.size()) in_space_.resize(space + 1, kNone);
  uint32_t& first = in_space_[space];
  if (first == kNone) spaces_.left().set_has_leaves(space, true);
  else records_.info(first).previous = id;
  records_.info(id).next = first;
  first = id;
}

void Eviction::unlist_in_space(uint32_t id) {
  RecordInfo& in = records_.info(id);
  uint32_t space = records_.at(id).space;
  if (in.previous != kNone) records_.info(in.previous).next = in.next;
  else in_space_[space] = in.next;
  if (in.next != kNone) records_.info(in.next).previous = in.previous;
  in.previous = in.next = kNone;
  if (in_space_[space] == kNone) spaces_.left().set_has_leaves(space, false);
}

void Eviction::add_child(uint32_t space, const Key& parent) {
  if (uint32_t ready = records_.add_child(space, parent); ready != kNone) unlist(ready);
}

void Eviction::drop_child(uint32_t space, const Key& parent) {
  if (uint32_t ready = records_.drop_child(space, parent); ready != kNone) offer(ready);
}

// ---- uses

Chunk Eviction::described(uint32_t id) const {
  const Record& r = records_.at(id);
  return {id, seeded_hash(r.key.bytes, r.space), records_.info(id).kind, r.last_used};
}

void Eviction::stamp(uint32_t id, uint64_t tick) {
  unlist(id);
  RecordInfo& in = records_.info(id);
  if (in.priority < 0) preferences_.set_priority(id, 0, 0);  // an engine asks for it after all
  if (in.kind != kNoKind) policy_->touched(described(id), tick);
  Record& r = records_.at(id);
  r.last_used = tick;
  in.used_s = records_.now_s();
  for (uint32_t p = 0; p < r.part_count; ++p) slots_.touch(r.parts[p].slab, tick);
  offer(id);
}

void Eviction::use(uint32_t id, uint64_t tick, bool is_apart) {
  unlist(id);
  RecordInfo& in = records_.info(id);
  if (in.used_s != 0 && !is_apart) reuse_.hit_age.add(records_.now_s() - in.used_s);
  ++in.uses;
  in.kind = policy_->used(described(id), tick);
  stamp(id, tick);
}

// Also stamps the chunk's ancestors, so that no chunk was last used before a chunk that is stored under it.
void Eviction::stamp_path(uint32_t space, Key key, uint64_t tick) {
  while (key.names_chunk()) {
    const KeyEntry* e = records_.find(space, key);
    uint32_t id = e ? e->any() : kNone;
    if (id == kNone || records_.at(id).last_used == tick) return;
    stamp(id, tick);
    key = records_.at(id).parent;
  }
}

void Eviction::stored(uint32_t id) {
  const KeyEntry* parent = records_.parent_of(records_.at(id));
  std::optional<uint8_t> inherited;
  if (parent && parent->ready != kNone && parent->children == 1)
    inherited = records_.info(parent->ready).kind;
  records_.info(id).kind = policy_->stored(described(id), inherited);
}

void Eviction::adopted(uint32_t id) { records_.info(id).kind = policy_->stored(described(id), std::nullopt); }

// ---- the end of a record

void Eviction::unpinned(uint32_t id) {
  const Record& r = records_.at(id);
  if (r.state() == RecordState::kQuarantined) return records_.free(id);
  // A temporary chunk is removed with its last reader, unless a second request has hit it.
  if (r.state() == RecordState::kReady && r.temporary && r.temp_seen != 0 && r.temp_seen != kTempKept)
    return take_out(id, Gone::read);
  offer(id);
}

void Eviction::take_out(uint32_t id, Gone why) {
  const Record& r = records_.at(id);
  if (r.state() == RecordState::kReady) records_.note_gone(r, why);
  unlist(id);
  preferences_.clear(id);
  records_.forget_key(id);
  KVDOCK_PAUSE("evict.unlinked");
  retire(id);
}

// Afterwards the parent may have no child left, and so become a candidate.
void Eviction::retire(uint32_t id) {
  uint32_t space = records_.at(id).space;
  Key parent = records_.at(id).parent;
  unlist(id);
  RecordInfo& in = records_.info(id);
  if (in.kind != kNoKind) policy_->removed(described(id));
  in.kind = kNoKind;
  records_.quarantine(id);
  if (in.pins == 0) records_.free(id);
  drop_child(space, parent);
}

void Eviction::count_evicted(const RecordInfo& in) {
  ++evicted_.all;
  evicted_.by_operator += cause_ == Gone::evicted;
  if (in.used_s != 0) reuse_.eviction_age.add(records_.now_s() - in.used_s);
  if (in.born_s != 0) reuse_.eviction_uses.add(in.uses);
}

void Eviction::evict_one(uint32_t id) {
  const Record& r = records_.at(id);
  count_evicted(records_.info(id));
  Gone why = cause_;
  if (spaces_.left().has(r.space)) {  // the policy learns nothing from such an eviction
    if (cause_ != Gone::evicted && spaces_.evict_first(r.space)) why = Gone::weights;
  } else {
    policy_->evicted(described(id), header_.use_tick);
    unlist(id);
    records_.info(id).kind = kNoKind;
  }
  take_out(id, why);
  next_.reset();
}

// ---- the choice

// Evicts the choice of least() or least_with(). If its parent is now a candidate of the same priority, kind and last
// use, the parent is the next choice.
void Eviction::evict_least(const Choice& least) {
  const Record& r = records_.at(least.leaf.record);
  uint32_t space = r.space;
  uint64_t used = r.last_used;
  Key parent = r.parent;
  evict_one(least.leaf.record);
  const KeyEntry* above = parent.names_chunk() ? records_.find(space, parent) : nullptr;
  if (!above || above->ready == kNone) return;
  const RecordInfo& in = records_.info(above->ready);
  if (!in.listed || in.kept || in.priority != least.priority) return;
  if (in.kind != least.kind || records_.at(above->ready).last_used != used) return;
  double worth = policy_->worth(in.kind, used, header_.use_tick);
  next_ = {{worth, leaf_of(above->ready), in.kind, in.priority}, spaces_.shape_of(space), header_.use_tick};
}

std::optional<Choice> Eviction::least_in(int8_t priority, const LeafLists& leaves, uint32_t shape) const {
  if (next_ && next_->choice.priority == priority && next_->shape == shape && next_->tick == header_.use_tick)
    return next_->choice;
  auto c = leaves.of_shape(shape, *policy_, header_.use_tick);
  if (c) c->priority = priority;
  return c;
}

// Any candidate of the namespace: all chunks of a namespace that sessions have left are worth nothing.
std::optional<Choice> Eviction::first_of(const std::optional<LeftSpaces::Left>& left) const {
  if (!left) return std::nullopt;
  uint32_t id = in_space_[left->space];
  return Choice{static_cast<double>(left->at_ms), leaf_of(id), records_.info(id).kind, kLeft};
}

// Chunks of weights that no engine runs any more are evicted first; then the lowest priority that has a candidate.
std::optional<Choice> Eviction::least(uint32_t shape) const {
  if (auto c = first_of(spaces_.left().of_shape(shape, spaces_.left_until_ms()))) return c;
  for (auto& [priority, leaves] : lists_)
    if (auto c = least_in(priority, leaves, shape)) return c;
  return std::nullopt;
}

// As least(), but among all chunks, or among those of namespaces that have slots of `slot_bytes`.
std::optional<Choice> Eviction::least_with(std::optional<uint64_t> slot_bytes) const {
  std::optional<Choice> best;
  auto look = [&](const auto& lists, auto&& least_of) {
    lists.for_each_shape([&](uint32_t shape) {
      if (slot_bytes && !spaces_.shape_has(shape, *slot_bytes)) return;
      if (auto c = least_of(shape); c && (!best || c->evict_before(*best))) best = c;
    });
  };
  look(spaces_.left(), [&](uint32_t shape) {
    return first_of(spaces_.left().of_shape(shape, spaces_.left_until_ms()));
  });
  if (best) return best;
  for (auto it = lists_.begin(); it != lists_.end() && !best; ++it)
    look(it->second, [&](uint32_t shape) { return least_in(it->first, it->second, shape); });
  return best;
}

// ---- memory for a store

bool Eviction::evict_for_id(uint32_t space, uint32_t parts) {
  cause_ = Gone::room;
  auto victim = least(spaces_.shape_of(space));
  if (!victim) return false;
  bool is_of_size = records_.at(victim->leaf.record).part_count == parts;
  if (!is_of_size && victim->priority != kLeft) return false;  // no engine runs its weights: any size is evicted
  evict_least(*victim);
  return true;
}

bool Eviction::declines(uint32_t space, const Key& parent, std::span<const Key> keys, uint64_t bytes) {
  if (!policy_->declines() || slots_.free_bytes() >= room_.ahead_bytes + bytes * keys.size()) return false;
  std::optional<Choice> least = least_with(round_slot(bytes));
  if (!least || least->priority != 0) return false;
  std::optional<uint8_t> inherited;
  const KeyEntry* above = parent.names_chunk() ? records_.find(space, parent) : nullptr;
  if (above && above->ready != kNone) {
    const RecordInfo& in = records_.info(above->ready);
    if (in.kept || in.priority > 0) return false;  // somebody wants this prompt to stay
    if (above->children == 0) inherited = in.kind;
  }
  std::vector<uint64_t> names;
  for (const Key& key : keys) names.push_back(seeded_hash(key.bytes, space));
  uint64_t tick = header_.use_tick;
  uint8_t kind = policy_->expected(names, inherited, tick);
  if (kind < kUses || policy_->worth(kind, tick, tick) >= least->worth) return false;
  policy_->declined(names, kind, tick);
  records_.note_declined(space, keys);
  return true;
}

bool Eviction::evict_for_slot(uint64_t bytes, const NewChunk& chunk) {
  cause_ = Gone::room;
  room_.wanted.insert(round_slot(bytes));
  return evict_toward(bytes) || evict_self_naming_chain(bytes, chunk);
}

// Evicts the next chunk or window on the way to a slot of `bytes`; false when neither may be evicted. A window has
// chunks of all priorities: candidates of a priority below 0 are evicted before it, those above 0 after it.
bool Eviction::evict_toward(uint64_t bytes) {
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
    if (records_.at(id).state() == RecordState::kReady) evict_one(id);  // else it left with an earlier one
  return true;
}

// Called when no candidate is left. Ancestors of the new chunk, and of records that are pinned, kept or RESERVED, must
// stay. Any other unpinned READY record is part of a chain in which a chunk names itself as its ancestor. Evicts the
// oldest of these records that has a slot of the size.
bool Eviction::evict_self_naming_chain(uint64_t bytes, const NewChunk& chunk) {
  std::vector<bool> above(records_.end(), false);
  auto walk_up = [&](uint32_t space, Key key) {
    while (key.names_chunk()) {
      const KeyEntry* e = records_.find(space, key);
      uint32_t up = e ? e->any() : kNone;
      if (up == kNone || above[up]) return;
      if (e->reserved != kNone) above[e->reserved] = true;
      above[up] = true;
      key = records_.at(up).parent;
    }
  };
  auto each = [&](auto&& f) {
    records_.for_each_key([&](const KeyEntry& e) {
      for (uint32_t id : {e.ready, e.reserved})
        if (id != kNone) f(id, records_.info(id), records_.at(id));
    });
  };
  each([&](uint32_t, const RecordInfo& in, const Record& r) {
    if (in.pins || in.kept) walk_up(r.space, r.parent);
  });
  walk_up(chunk.space, chunk.parent);
  std::optional<uint32_t> victim;
  each([&](uint32_t id, const RecordInfo& in, const Record& r) {
    bool may_go = r.state() == RecordState::kReady && !in.pins && !in.kept && !above[id];
    if (may_go && spaces_.shape_has(spaces_.shape_of(r.space), round_slot(bytes)) &&
        (!victim || r.last_used < records_.at(*victim).last_used))
      victim = id;
  });
  if (victim) evict_one(*victim);
  return victim.has_value();
}

// ---- quotas

// Evicts one candidate of the tenant: of a namespace that sessions have left, if there is one; else the one worth
// least, of the lowest priority; and one that an administrator keeps only if there is no other.
bool Eviction::evict_of(uint32_t tenant) {
  cause_ = Gone::quota;
  std::optional<Choice> c = first_of(spaces_.left().of_tenant(tenant, spaces_.left_until_ms()));
  for (auto it = lists_.begin(); it != lists_.end() && !c; ++it)
    c = it->second.of_tenant(tenant, *policy_, header_.use_tick);
  if (!c) c = kept_.of_tenant(tenant, *policy_, header_.use_tick);
  if (c) evict_one(c->leaf.record);
  return c.has_value();
}

// Evicts no more than the new chunk needs. Evicts nothing for a tenant that is above its quota already, which is left
// to evict_over_quota(), and nothing for a chunk that could never fit.
bool Eviction::evict_for_quota(const NewChunk& chunk) {
  uint32_t tenant = spaces_.tenant_of(chunk.space);
  Tenants& tenants = spaces_.tenants();
  if (tenants.fits(tenant, chunk.bytes)) return true;
  if (tenants.is_over(tenant) || !tenants.could_fit(tenant, chunk.bytes) || !chunk.may_evict()) return false;
  while (!tenants.fits(tenant, chunk.bytes))
    if (!evict_of(tenant)) return false;
  return true;
}

bool Eviction::make_room(const NewChunk& chunk, uint32_t count, uint32_t max_chunks) {
  if (!chunk.may_evict()) return false;
  const Namespace& ns = spaces_[chunk.space];
  const uint32_t parts = ns.writers * static_cast<uint32_t>(std::popcount(chunk.groups));
  const uint64_t until = evicted_.all + max_chunks;
  bool has_more = false;
  auto evict_while = [&](auto&& lacks, auto&& evict) {  // until nothing is lacking, or nothing may be evicted
    for (uint64_t before = ~evicted_.all; !has_more && before != evicted_.all && lacks();) {
      before = evicted_.all;
      has_more = evicted_.all >= until;
      if (!has_more) evict();
    }
  };
  const uint32_t tenant = spaces_.tenant_of(chunk.space);
  const Tenants& tenants = spaces_.tenants();
  if (tenants.is_over(tenant)) return false;  // as evict_for_quota()
  while (count && !tenants.could_fit(tenant, chunk.bytes * count, count)) --count;
  evict_while([&] { return !tenants.fits(tenant, chunk.bytes * count, count); }, [&] { evict_of(tenant); });
  while (count && !has_more && !tenants.fits(tenant, chunk.bytes * count, count)) --count;
  if (!count) return has_more;  // nothing of others goes for what the quota refuses
  size_t ids = records_.free_ids(parts, count);
  evict_while([&] { return ids < count; }, [&] { ids += evict_for_id(chunk.space, parts); });
  std::map<uint64_t, uint64_t> wanted;  // bytes by slot size
  for (uint32_t g = 0; g < ns.group_count; ++g) {
    const uint64_t size = round_slot(ns.groups[g].slot_bytes());
    if (chunk.groups >> g & 1) wanted[size] += size * ns.writers * count;
  }
  for (auto [size, bytes] : wanted) {
    uint64_t before = slots_.free_bytes(), has = slots_.available_for(size, bytes);
    auto lacks = [&, size = size, bytes = bytes] {
      auto seems = [&] { return has + slots_.free_bytes() - before; };
      if (seems() >= bytes && slots_.free_bytes() != before) {  // it may have come in slots of other sizes
        has = slots_.available_for(size, bytes);
        before = slots_.free_bytes();
      }
      return seems() < bytes;
    };
    evict_while(lacks,
                [&, size = size] {
                  cause_ = Gone::room;
                  room_.wanted.insert(size);
                  evict_toward(size);
                });
  }
  return has_more;
}

uint32_t Eviction::evict_over_quota(uint32_t max_chunks) {
  uint32_t gone = 0;
  for (uint32_t tenant = 0; tenant < spaces_.tenants().end(); ++tenant)
    while (gone < max_chunks && spaces_.tenants().is_over(tenant) && evict_of(tenant)) ++gone;
  return gone;
}

// ---- in the background

uint64_t Eviction::available_bytes() const {
  uint64_t available = slots_.free_bytes();
  for (uint64_t size : room_.wanted) available = std::min(available, slots_.available_for(size, available));
  return available;
}

// Evicts first for the slot sizes that stores had to evict for, because free memory elsewhere is of no use to them.
uint32_t Eviction::evict(uint64_t target_bytes, uint32_t max_chunks, Gone cause) {
  cause_ = cause;
  if (cause == Gone::ahead) room_.ahead_bytes = target_bytes;
  uint64_t until = evicted_.all + max_chunks, before = evicted_.all;
  while (evicted_.all < until) {
    auto lacks = [&](uint64_t size) { return slots_.available_for(size, target_bytes) < target_bytes; };
    auto size = std::find_if(room_.wanted.begin(), room_.wanted.end(), lacks);
    if (size != room_.wanted.end()) {
      // available_for() looks at thousands of extents, so it is not asked again for each chunk.
      const uint64_t has = slots_.available_for(*size, target_bytes), before_bytes = slots_.free_bytes();
      bool can = true;
      while (can && evicted_.all < until && has + slots_.free_bytes() - before_bytes < target_bytes)
        can = evict_toward(*size);
      if (!can) room_.wanted.erase(size);
      continue;
    }
    room_.wanted.clear();
    if (slots_.free_bytes() >= target_bytes) break;
    std::optional<Choice> best = least_with(std::nullopt);
    if (!best) break;
    evict_least(*best);
  }
  return static_cast<uint32_t>(evicted_.all - before);
}

uint32_t Eviction::empty_left(size_t kept, uint32_t max_chunks, const std::optional<Id16>& tenant) {
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

void Eviction::empty_segment(uint32_t segment, uint32_t max_chunks) {
  cause_ = Gone::shrunk;
  for (uint32_t id : slots_.records_in(segment)) {
    if (max_chunks == 0) break;
    const RecordInfo& in = records_.info(id);
    if (records_.at(id).state() != RecordState::kReady || in.pins || in.kept) continue;
    evict_one(id);
    --max_chunks;
  }
}

bool Eviction::can_evict() const {
  auto some = [](auto& one) { return one.second.size() != 0; };
  return std::any_of(lists_.begin(), lists_.end(), some);
}

// ---- views

// The candidates that are worth least now, each with its ancestors as far as they are as old.
std::map<uint32_t, std::vector<Key>> Eviction::next_out(uint64_t bytes, size_t most) const {
  constexpr size_t kSeen = 64;  // of each kind: enough for the order of those that are evicted soon
  std::vector<Choice> leaves;
  for (auto& [priority, lists] : lists_)
    lists.for_each_oldest(kSeen, [&, priority = priority](uint8_t kind, const Leaf& leaf) {
      if (spaces_.left().has(records_.at(leaf.record).space)) return;  // no engine will look it up
      leaves.push_back({policy_->worth(kind, leaf.used, header_.use_tick), leaf, kind, priority});
    });
  std::sort(leaves.begin(), leaves.end(), [](const Choice& a, const Choice& b) { return a.evict_before(b); });
  std::map<uint32_t, std::vector<Key>> out;
  for (const Choice& one : leaves) {
    for (uint32_t id = one.leaf.record; id != kNone;) {
      const Record& r = records_.at(id);
      if (records_.bytes_of(id) > bytes || most-- == 0) return out;
      bytes -= records_.bytes_of(id);
      out[r.space].push_back(r.key);
      const KeyEntry* above = records_.parent_of(r);
      id = above ? above->ready : kNone;
      if (id == kNone) continue;
      const RecordInfo& in = records_.info(id);
      if (in.pins || in.kept || records_.at(id).last_used != r.last_used) id = kNone;
    }
  }
  return out;
}

uint64_t Eviction::oldest_used_ms() const {
  std::optional<uint64_t> oldest = kept_.oldest();
  for (auto& [priority, leaves] : lists_)
    if (auto used = leaves.oldest(); used && (!oldest || *used < *oldest)) oldest = used;
  return oldest ? records_.used_ms(*oldest) : 0;
}

void Eviction::set_policy(const std::string& name) {
  std::unique_ptr<Policy> made = make_policy(name);
  if (name == policy_->name()) return;
  policy_ = std::move(made);
  next_.reset();
  unseen_ = 0;
}

void Eviction::see_chunks(Work& work) {
  if (unseen_ == kNone) return;
  for (uint32_t id = records_.next(unseen_); id < records_.end(); id = records_.next(id + 1)) {
    unseen_ = id;
    if (work.is_over()) return;
    work.spend(kSeeChunk);
    if (records_.at(id).state() != RecordState::kReady) continue;
    unlist(id);
    adopted(id);
    offer(id);
  }
  unseen_ = kNone;
}

// ---- check

void Eviction::check() const {
  check_lists();
  check_spaces();
}

void Eviction::check_lists() const {
  size_t listed = 0;
  for (uint32_t id = records_.next(0); id < records_.end(); id = records_.next(id + 1)) {
    const Record& r = records_.at(id);
    if (r.state() == RecordState::kFree) continue;
    const RecordInfo& in = records_.info(id);
    require(in.listed == is_candidate(id), "the records that are listed are not the candidates", id);
    require((in.kind == kNoKind) == (r.state() != RecordState::kReady), "a kind is not that of a READY record", id);
    if (!in.listed) continue;
    auto usual = lists_.find(in.priority);
    require(in.kept || usual != lists_.end(), "a candidate's priority has no list", id);
    const LeafLists& list = in.kept ? kept_ : usual->second;
    uint32_t shape = spaces_.shape_of(r.space), tenant = spaces_.tenant_of(r.space);
    require(list.lists(shape, tenant, in.kind, leaf_of(id)), "a candidate is not listed", id);
    ++listed;
  }
  size_t in_lists = kept_.size();
  for (auto& [priority, leaves] : lists_) {
    require(priority == 0 || leaves.size() != 0, "a priority has an empty list", priority);
    in_lists += leaves.size();
  }
  require(listed == in_lists, "something is listed that is no candidate");
}

// Each namespace lists exactly its candidates, except those that an administrator keeps.
void Eviction::check_spaces() const {
  std::vector<uint32_t> wanted(kMaxNamespaces), found(kMaxNamespaces);
  for (uint32_t id = records_.next(0); id < records_.end(); id = records_.next(id + 1))
    if (records_.info(id).listed && !records_.info(id).kept) ++wanted[records_.at(id).space];
  std::vector<bool> has_leaves(kMaxNamespaces);
  for (uint32_t space = 0; space < in_space_.size(); ++space) {
    uint32_t previous = kNone;
    for (uint32_t id = in_space_[space]; id != kNone; previous = id, id = records_.info(id).next) {
      const RecordInfo& in = records_.info(id);
      require(in.listed && !in.kept && records_.at(id).space == space, "a namespace lists no candidate of its own", id);
      require(in.previous == previous, "a namespace's list of candidates is broken", id);
      require(++found[space] <= wanted[space], "a namespace lists a candidate twice", id);
    }
    has_leaves[space] = found[space] != 0;
  }
  require(found == wanted, "a namespace does not list all its candidates");
  spaces_.check(has_leaves);
}

}  // namespace kvdock
