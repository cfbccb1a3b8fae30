#include "curve/mini_pool.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

namespace {

constexpr size_t kChosenShare = 8;  // an eighth of the leaves is chosen at a time: fewer comparisons
constexpr double kAskedWork = 0.25, kFoundWork = 0.1;  // work in units of storing a chunk and evicting another

}  // namespace

MiniPool::MiniPool(const std::string& policy, double factor) : policy_(make_policy(policy)), factor_(factor) {}

void MiniPool::resize(uint64_t pool_bytes, double share) {
  share_ = share;
  policy_->see_share(share);
  capacity_bytes_ = static_cast<uint64_t>(factor_ * share * static_cast<double>(pool_bytes));
}

uint32_t MiniPool::look(const std::vector<uint64_t>& names, uint64_t tick, size_t keys, uint64_t chunk_bytes,
                        double* work) {
  policy_->asked(tick, static_cast<uint64_t>(static_cast<double>(size()) / share_), keys);
  *work += kAskedWork;
  uint32_t above = kNone, found = 0;
  for (; found < names.size(); ++found) {
    uint32_t id = names_.find(names[found]);
    if (id == kNone) break;
    Entry& e = entries_[id];
    e.kind = policy_->used({id, e.name, e.kind, e.used}, tick);
    e.used = tick;
    link(id, above);
    above = id;
  }
  *work += kFoundWork * found;
  for (size_t i = found; i < names.size(); ++i) {
    uint32_t id = names_.find(names[i]);
    *work += 1;
    if (id == kNone) {
      if (!insert(names[i], above, tick, chunk_bytes)) break;
      id = names_.find(names[i]);
    } else {
      touch(id, tick);
      link(id, above);
    }
    above = id;
  }
  return found;
}

void MiniPool::store(const std::vector<uint64_t>& names, uint64_t tick, uint64_t chunk_bytes) {
  uint32_t above = kNone;
  for (uint64_t name : names) {
    uint32_t id = names_.find(name);
    if (id != kNone) touch(id, tick);
    else if (!insert(name, above, tick, chunk_bytes)) return;
    above = names_.find(name);
  }
}

// A chunk that was used in the present tick is not evicted, so it may become a parent.
void MiniPool::touch(uint32_t id, uint64_t tick) {
  Entry& e = entries_[id];
  policy_->touched({id, e.name, e.kind, e.used}, tick);
  e.used = tick;
}

// False: the pool is full of chunks of the present tick.
bool MiniPool::insert(uint64_t name, uint32_t parent, uint64_t tick, uint64_t chunk_bytes) {
  auto is_full = [&] { return used_bytes_ + chunk_bytes > capacity_bytes_; };
  if (is_full() && policy_->declines() && is_declined(name, parent, tick)) return false;
  while (is_full())
    if (!evict_one(tick)) return false;
  uint32_t id = place(name, parent, tick, chunk_bytes);
  std::optional<uint8_t> inherited;
  if (parent != kNone && entries_[parent].children == 1) inherited = entries_[parent].kind;
  entries_[id].kind = policy_->stored({id, name, kNoKind, tick}, inherited);
  return true;
}

// As Eviction::declines().
bool MiniPool::is_declined(uint64_t name, uint32_t parent, uint64_t tick) {
  const Victim* least = next_victim(tick);
  if (!least) return false;
  std::optional<uint8_t> inherited;
  if (parent != kNone && entries_[parent].children == 0) inherited = entries_[parent].kind;
  uint8_t kind = policy_->expected({name}, inherited, tick);
  if (kind < kUses || policy_->worth(kind, tick, tick) >= least->worth) return false;
  policy_->declined({name}, kind, tick);
  return true;
}

// REQUIRES: there is room, and no entry of the name.
uint32_t MiniPool::place(uint64_t name, uint32_t parent, uint64_t used, uint64_t chunk_bytes) {
  uint32_t id = static_cast<uint32_t>(entries_.size());
  if (free_.empty()) {
    entries_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  entries_[id] = {name, used, chunk_bytes, kNone, 0, kNone, 0};
  names_.put(name, id);
  used_bytes_ += chunk_bytes;
  add_leaf(id);
  link(id, parent);
  return id;
}

// Does nothing if the chunk has a parent already, or is an ancestor of `parent`: engines may name chains that cross.
void MiniPool::link(uint32_t id, uint32_t parent) {
  if (parent == kNone || parent == id || entries_[id].parent != kNone) return;
  if (entries_[id].children != 0)
    for (uint32_t up = parent; up != kNone; up = entries_[up].parent)
      if (up == id) return;
  entries_[id].parent = parent;
  if (entries_[parent].children++ == 0) drop_leaf(parent);
}

void MiniPool::add_leaf(uint32_t id) {
  entries_[id].leaf_at = static_cast<uint32_t>(leaves_.size());
  leaves_.push_back(id);
}

void MiniPool::drop_leaf(uint32_t id) {
  uint32_t at = entries_[id].leaf_at;
  entries_[leaves_.back()].leaf_at = at;
  leaves_[at] = leaves_.back();
  leaves_.pop_back();
  entries_[id].leaf_at = kNone;
}

void MiniPool::forget(uint32_t id) {
  names_.drop(entries_[id].name);
  used_bytes_ -= entries_[id].bytes;
  free_.push_back(id);
}

// ---- eviction

MiniPool::Victim MiniPool::victim(uint32_t id, uint64_t tick) const {
  const Entry& e = entries_[id];
  return {policy_->worth(e.kind, e.used, tick), e.used, e.name, id};
}

bool MiniPool::is_as_chosen(const Victim& one) const {
  const Entry& e = entries_[one.entry];
  return e.name == one.name && e.used == one.used && e.leaf_at != kNone;
}

// Evicts no chunk that the present request uses, as such chunks are pinned in a real pool.
const MiniPool::Victim* MiniPool::next_victim(uint64_t tick) {
  do {
    while (!victims_.empty() && !is_as_chosen(victims_.back())) victims_.pop_back();
    if (victims_.empty()) choose(tick);
    if (victims_.empty()) return nullptr;
  } while (!is_as_chosen(victims_.back()));
  return &victims_.back();
}

bool MiniPool::evict_one(uint64_t tick) {
  const Victim* least = next_victim(tick);
  if (!least) return false;
  uint32_t id = least->entry;
  victims_.pop_back();
  Entry e = entries_[id];
  policy_->evicted({id, e.name, e.kind, e.used}, tick);
  drop_leaf(id);
  forget(id);
  entries_[id].name = ~e.name;  // so no victim that was chosen before matches this entry any more
  if (e.parent == kNone || --entries_[e.parent].children != 0) return true;
  add_leaf(e.parent);
  if (entries_[e.parent].used == tick) return true;
  Victim above = victim(e.parent, tick);
  auto before = [](const Victim& a, const Victim& b) { return b.evict_before(a); };
  if (!victims_.empty() && victims_.front().evict_before(above)) return true;
  if (victims_.empty() && leaves_.size() > 1) return true;
  victims_.insert(std::upper_bound(victims_.begin(), victims_.end(), above, before), above);
  return true;
}

void MiniPool::choose(uint64_t tick) {
  for (uint32_t id : leaves_)
    if (entries_[id].used != tick) victims_.push_back(victim(id, tick));
  auto before = [](const Victim& a, const Victim& b) { return a.evict_before(b); };
  size_t most = std::max<size_t>(1, victims_.size() / kChosenShare);
  if (victims_.size() > most) {
    std::nth_element(victims_.begin(), victims_.begin() + static_cast<std::ptrdiff_t>(most), victims_.end(), before);
    victims_.resize(most);
  }
  std::sort(victims_.begin(), victims_.end(), [&](const Victim& a, const Victim& b) { return before(b, a); });
}

// ---- fewer samples

void MiniPool::thin(const std::function<bool(uint64_t)>& stays) {
  victims_.clear();
  std::vector<uint32_t> kept;
  std::vector<bool> goes(entries_.size(), false);
  names_.for_each([&](uint64_t name, uint32_t id) {
    if (stays(name)) kept.push_back(id);
    else goes[id] = true;
  });
  leaves_.clear();
  for (uint32_t id : kept) {
    uint32_t& parent = entries_[id].parent;
    while (parent != kNone && goes[parent]) parent = entries_[parent].parent;
    entries_[id].children = 0;
  }
  for (uint32_t id = 0; id < goes.size(); ++id) {
    if (!goes[id]) continue;
    const Entry& e = entries_[id];
    policy_->removed({id, e.name, e.kind, e.used});
    forget(id);
    entries_[id].name = ~e.name;
  }
  for (uint32_t id : kept)
    if (entries_[id].parent != kNone) ++entries_[entries_[id].parent].children;
  for (uint32_t id : kept) {
    entries_[id].leaf_at = kNone;
    if (entries_[id].children == 0) add_leaf(id);
  }
}

// ---- kept for the next server

void MiniPool::keep(KeptWriter& out) const {
  std::vector<uint32_t> number(entries_.size(), kNone), chain;
  uint32_t numbered = 0;
  out.put(static_cast<uint32_t>(size()));
  std::vector<bool> is_free(entries_.size());
  for (uint32_t id : free_) is_free[id] = true;
  for (uint32_t id = 0; id < entries_.size(); ++id) {
    if (is_free[id]) continue;
    for (uint32_t up = id; up != kNone && number[up] == kNone; up = entries_[up].parent) chain.push_back(up);
    for (; !chain.empty(); chain.pop_back()) {  // a parent comes before its children
      const Entry& e = entries_[chain.back()];
      number[chain.back()] = numbered++;
      out.put(e.name);
      out.put(e.used);
      out.put(e.bytes);
      out.put(e.parent == kNone ? kNone : number[e.parent]);
    }
  }
}

void MiniPool::take_over(KeptReader& in, uint64_t tick) {
  uint32_t count = in.count(kKeptEntryBytes);
  for (uint32_t i = 0; i < count; ++i) {
    auto name = in.number<uint64_t>(UINT64_MAX);
    auto used = in.number<uint64_t>(tick);
    auto bytes = in.number<uint64_t>(UINT64_MAX / count);  // their sum may be above the capacity after thin()
    auto parent = in.number<uint32_t>(kNone);
    bool is_sound = bytes != 0 && names_.find(name) == kNone && (parent == kNone || parent < i);
    require(is_sound, "a simulated pool that was kept is inconsistent", i);
    uint32_t id = place(name, parent, used, bytes);
    entries_[id].kind = policy_->stored({id, name, kNoKind, used}, std::nullopt);
  }
}

void MiniPool::check() const {
  std::vector<uint32_t> children(entries_.size(), 0);
  uint64_t bytes = 0, leaves = 0;
  names_.for_each([&](uint64_t, uint32_t id) {
    if (entries_[id].parent != kNone) ++children[entries_[id].parent];
    bytes += entries_[id].bytes;
  });
  bool good = bytes == used_bytes_ && names_.size() + free_.size() == entries_.size();
  names_.for_each([&](uint64_t name, uint32_t id) {
    const Entry& e = entries_[id];
    bool is_leaf = e.leaf_at < leaves_.size() && leaves_[e.leaf_at] == id;
    good = good && e.name == name && e.children == children[id] && is_leaf == (children[id] == 0);
    leaves += is_leaf;
  });
  if (!good || leaves != leaves_.size())
    throw TableError("corrupt", "a simulated pool is inconsistent", static_cast<int64_t>(names_.size()));
}

}  // namespace kvdock
