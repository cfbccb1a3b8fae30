#include "table/namespaces.h"

#include <algorithm>

#include "base/pause.h"
#include "table/body_crc.h"

namespace kvdock {

std::optional<uint32_t> Namespaces::find(const Key& digest) const {
  auto at = by_digest_.find(digest);
  return at == by_digest_.end() ? std::nullopt : std::optional(at->second);
}

size_t Namespaces::in_use(const std::optional<Id16>& tenant, uint32_t leaving) const {
  const auto number = tenant ? tenants_.find(*tenant) : std::nullopt;
  size_t count = 0;
  for (uint32_t i : live())
    count += (!tenant || number == tenant_of_[i]) && !left_.has(i) && !(i == leaving && sessions_[i] == 1);
  return count;
}

uint32_t Namespaces::add(const NewNamespace& wanted) {
  const auto& [digest, base, tenant, chunk_tokens, block_tokens, writers, groups] = wanted;
  if (auto known = find(digest)) {
    if (!(entries_[*known].tenant == tenant))
      throw TableError("bad_argument", "the namespace is another tenant's", *known, "a digest that names its tenant");
    if (!(entries_[*known].base == base))
      throw TableError("bad_argument", "the namespace is of another manifest", *known, "a digest that names it");
    return *known;
  }
  if (block_tokens == 0 || chunk_tokens == 0 || chunk_tokens % block_tokens)
    throw TableError("bad_argument", "chunk_tokens is not a multiple of block_tokens", chunk_tokens, block_tokens);
  if (writers < 1 || writers > kMaxRanks)
    throw TableError("bad_argument", "writers out of range", writers, "1.." + std::to_string(kMaxRanks));
  if (groups.empty() || groups.size() > kMaxGroups)
    throw TableError("bad_argument", "number of groups out of range", int64_t(groups.size()),
                     "1.." + std::to_string(kMaxGroups));
  if (writers * groups.size() > kMaxParts)
    throw TableError("bad_argument", "a chunk has too many parts: writers times groups",
                     int64_t(writers * groups.size()), "at most " + std::to_string(kMaxParts));
  uint32_t space = 0;
  while (has(space)) ++space;
  if (space == kMaxNamespaces)
    throw TableError("table_full", "every namespace has sessions or chunks", kMaxNamespaces, "fewer manifests in use");
  Namespace& ns = entries_[space];
  for (size_t g = 0; g < groups.size(); ++g) {
    if (uint64_t bytes = groups[g].part_bytes; bytes == 0 || bytes > UINT32_MAX)
      throw TableError("bad_argument", "part_bytes out of range", int64_t(bytes), "1.." + std::to_string(UINT32_MAX));
    if (groups[g].packed_bytes >= groups[g].part_bytes)
      throw TableError("bad_argument", "packed parts are not smaller", int64_t(groups[g].packed_bytes),
                       "less than " + std::to_string(groups[g].part_bytes));
    if (groups[g].kind == GroupKind::kWindow && groups[g].window_tokens == 0)
      throw TableError("bad_argument", "a window group has no window", 0, "1 or more tokens");
    ns.groups[g] = groups[g];
  }
  ns.chunk_tokens = chunk_tokens;
  ns.block_tokens = block_tokens;
  ns.writers = writers;
  ns.group_count = static_cast<uint32_t>(groups.size());
  ns.digest = digest;
  ns.base = base;
  ns.left_ms = 0;
  ns.generation = ns.cleared_through = sealed(0, space + 1);
  ns.tenant = tenant;
  ns.crc = body_crc(ns);
  publish(ns.word, sealed(1));
  enter(space);
  return space;
}

// The entry's body may change once its word is 0.
void Namespaces::drop(uint32_t space) {
  left_.come_back(space);
  publish(entries_[space].word, 0);
  by_digest_.erase(entries_[space].digest);
  shape_of_[space] = kNone;
  tenants_.leave(tenant_of_[space]);
}

std::vector<uint32_t> Namespaces::live() const {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < shape_of_.size(); ++i)
    if (has(i)) out.push_back(i);
  return out;
}

// From the end of this function on, the entry is live.
void Namespaces::enter(uint32_t space) {
  if (space >= shape_of_.size()) {
    shape_of_.resize(space + 1, kNone);
    tenant_of_.resize(space + 1, kNone);
    sessions_.resize(space + 1);
  }
  by_digest_[entries_[space].digest] = space;
  shape_of_[space] = shape_number(entries_[space]);
  tenant_of_[space] = tenants_.enter(entries_[space].tenant);
}

void Namespaces::count_session(uint32_t space) {
  ++usage(space).sessions;
  ++sessions_[space];
}

void Namespaces::enter_session(uint32_t space) {
  count_session(space);
  entries_[space].left_ms = 0;
  left_.come_back(space);
}

void Namespaces::leave_session(uint32_t space, Leaves how) {
  --usage(space).sessions;
  --sessions_[space];
  uint64_t& left_ms = entries_[space].left_ms;
  if (how == Leaves::moved || has_weights(space) || left_ms != 0) left_ms = std::max<uint64_t>(1, now_ms_);
  if (is_left(space)) left_.leave(space, shape_of_[space], tenant_of_[space], left_ms);
}

// The earlier server may have been killed between a session's end and the store of left_ms.
void Namespaces::restart(uint64_t clock_ms) {
  set_now(clock_ms);
  for (uint32_t space : live()) {
    uint64_t& left_ms = entries_[space].left_ms;
    if (sessions_[space] > 0) {
      left_ms = 0;
    } else if (left_ms != 0 || has_weights(space)) {
      if (left_ms == 0 || left_ms > now_ms_) left_ms = std::max<uint64_t>(1, now_ms_);
      left_.leave(space, shape_of_[space], tenant_of_[space], left_ms);
    }
  }
}

void Namespaces::check(const std::vector<bool>& has_leaves) const {
  std::vector<bool> left(kMaxNamespaces);
  kvdock::require(by_digest_.size() == live().size(), "a namespace is not found by its digest", 0);
  for (uint32_t space : live()) {
    kvdock::require(find(entries_[space].digest) == space, "a namespace is not found by its digest", space);
    left[space] = is_left(space);
  }
  left_.check(left, has_leaves);
}

uint32_t Namespaces::shape_number(const Namespace& ns) {
  std::vector<uint64_t> shape;
  for (uint32_t g = 0; g < ns.group_count; ++g)
    for (uint64_t bytes : {ns.groups[g].slot_bytes(), ns.groups[g].part_bytes}) shape.push_back(round_slot(bytes));
  std::sort(shape.begin(), shape.end());
  shape.erase(std::unique(shape.begin(), shape.end()), shape.end());
  auto number = static_cast<uint32_t>(std::find(shapes_.begin(), shapes_.end(), shape) - shapes_.begin());
  if (number == shapes_.size()) {
    number = 0;
    while (std::find(shape_of_.begin(), shape_of_.end(), number) != shape_of_.end()) ++number;
    if (number == shapes_.size()) shapes_.emplace_back();
    shapes_[number] = std::move(shape);
  }
  return number;
}

bool Namespaces::shape_has(uint32_t shape, uint64_t slot_bytes) const {
  return std::binary_search(shapes_[shape].begin(), shapes_[shape].end(), slot_bytes);
}

// Two stores. A server that is killed between them has cleared the records, but reported the generation to no client.
void Namespaces::raise(uint32_t space, uint64_t generation, uint64_t cleared_through) {
  Namespace& ns = entries_[space];
  publish(ns.cleared_through, sealed(cleared_through, space + 1));
  KVDOCK_PAUSE("clear.half");
  publish(ns.generation, sealed(generation, space + 1));
  KVDOCK_PAUSE("clear.raised");
}

void Namespaces::judge() {
  for (uint32_t i = 0; i < kMaxNamespaces; ++i) {
    const Namespace& ns = entries_[i];
    if (ns.word == 0) continue;
    if (ns.word != sealed(1) || ns.crc != body_crc(ns)) refuse_adoption("a namespace is damaged", i);
    if (ns.group_count < 1 || ns.group_count > kMaxGroups || ns.writers < 1 || ns.writers > kMaxRanks)
      refuse_adoption("a namespace has impossible groups or writers", i);
    if (ns.writers * ns.group_count > kMaxParts) refuse_adoption("a namespace has too many parts", i);
    if (ns.block_tokens == 0 || ns.chunk_tokens == 0 || ns.chunk_tokens % ns.block_tokens)
      refuse_adoption("a namespace has impossible chunks", i);
    if (!whole(ns.generation, i + 1) || !whole(ns.cleared_through, i + 1))
      refuse_adoption("a namespace's generation is damaged", i);
    for (uint32_t g = 0; g < ns.group_count; ++g)
      if (ns.groups[g].packed_bytes >= ns.groups[g].part_bytes || ns.groups[g].kind > GroupKind::kWindow)
        refuse_adoption("a namespace has an impossible group", i);
    if (find(ns.digest)) refuse_adoption("two namespaces have one digest", i);
    enter(i);
  }
}

}  // namespace kvdock
