// What engines wish for chunks, and how far the wishes go. They are preferences: they order what may go, and keep
// nothing from going when nothing else is left.
#include <algorithm>

#include "table/table.h"

namespace kvdock {

namespace {

constexpr double kRetainedShare = 0.25;  // of the pool: the rest stays for chunks that nobody wishes to retain

}  // namespace

uint64_t Chunks::wished_until(uint32_t id) const {
  auto it = wished_until_.find(id);
  return it == wished_until_.end() ? 0 : it->second;
}

void Chunks::set_wish(uint32_t id, int8_t priority, uint64_t until_ms) {
  unlist(id);
  next_.reset();
  Info& in = info_[id];
  if (in.priority > 0) retained_bytes_ -= bytes_of(id);
  if (auto it = wished_until_.find(id); it != wished_until_.end()) {
    wishes_end_.erase({it->second, id});
    wished_until_.erase(it);
  }
  in.priority = priority;
  if (priority > 0) retained_bytes_ += bytes_of(id);
  if (priority == 0 || until_ms == 0) return;
  wished_until_.emplace(id, until_ms);
  wishes_end_.emplace(until_ms, id);
}

bool Chunks::may_retain(uint32_t id) const {
  double room = kRetainedShare * static_cast<double>(header_.limit_bytes);
  return static_cast<double>(retained_bytes_ + bytes_of(id)) <= room;
}

// A chunk keeps all before it from going. As none is retained longer, or more, than the one before it, what is counted
// is all that a wish keeps.
Chunks::Retained Chunks::retain(uint32_t id, int8_t priority, uint64_t until_ms) {
  if (info_[id].priority <= 0 && !may_retain(id)) return Retained::no_room;
  const Record& r = record(id);
  if (r.parent.names_chunk()) {
    const KeyEntry* e = index_.find(r.space, r.parent);
    if (!e || e->any() == kNone || info_[e->any()].priority <= 0) return Retained::no_parent;
    priority = std::min(priority, info_[e->any()].priority);
    until_ms = std::min(until_ms, wished_until(e->any()));
  }
  if (info_[id].priority > 0) {
    priority = std::max(priority, info_[id].priority);
    until_ms = std::max(until_ms, wished_until(id));
  }
  set_wish(id, priority, until_ms);
  offer(id);
  return Retained::yes;
}

void Chunks::lower(uint32_t id, int8_t priority, uint64_t until_ms) {
  set_wish(id, priority, until_ms);
  offer(id);
}

void Chunks::expire_wishes(uint64_t now) {
  while (!wishes_end_.empty() && wishes_end_.begin()->first <= now) lower(wishes_end_.begin()->second, 0, 0);
}

RetainResult Table::retain(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms) {
  chunks_.namespaces().require(space);
  if (priority < 1 || priority > kMostPriority)
    throw TableError("bad_argument", "a priority of retained chunks is out of range", priority,
                     "1.." + std::to_string(kMostPriority));
  if (until_ms == 0) throw TableError("bad_argument", "chunks are retained until some time", 0, "milliseconds");
  RetainResult out;
  for (const Key& key : keys) {
    const KeyEntry* e = chunks_.find(space, key);
    if (!e || e->any() == kNone) break;
    Chunks::Retained done = chunks_.retain(e->any(), static_cast<int8_t>(priority), until_ms);
    out.chunks += done == Chunks::Retained::yes;
    out.refused += done == Chunks::Retained::no_room;
  }
  counters_.refused_retains += out.refused;
  return out;
}

LowerResult Table::lower(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms,
                         const Key& following) {
  chunks_.namespaces().require(space);
  if (priority < kConversationEnded || priority > 0)
    throw TableError("bad_argument", "a lowered priority is out of range", priority,
                     std::to_string(kConversationEnded) + "..0");
  const KeyEntry* below = following.names_chunk() ? chunks_.find(space, following) : nullptr;
  uint32_t own_children = below && below->any() != kNone;  // those that belong to this chain
  LowerResult out;
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    const KeyEntry* e = chunks_.find(space, *key);
    if (e && e->children > own_children) {
      out.shared = true;
      break;
    }
    own_children = e && e->any() != kNone;
    if (!own_children) continue;
    chunks_.lower(e->any(), static_cast<int8_t>(priority), until_ms);
    ++out.chunks;
  }
  return out;
}

}  // namespace kvdock
