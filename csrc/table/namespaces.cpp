#include "table/namespaces.h"

#include <algorithm>

#include "table/body_crc.h"

namespace kvdock {

uint32_t Namespaces::add(const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens, uint32_t writers,
                         const std::vector<Group>& groups) {
  for (uint32_t i = 0; i < count(); ++i)
    if (entries_[i].digest == digest) return i;
  if (block_tokens == 0 || chunk_tokens == 0 || chunk_tokens % block_tokens)
    throw TableError("bad_argument", "chunk_tokens is not a multiple of block_tokens", chunk_tokens, block_tokens);
  if (writers < 1 || writers > kMaxRanks)
    throw TableError("bad_argument", "writers out of range", writers, "1.." + std::to_string(kMaxRanks));
  if (groups.empty() || groups.size() > kMaxGroups)
    throw TableError("bad_argument", "number of groups out of range", int64_t(groups.size()),
                     "1.." + std::to_string(kMaxGroups));
  if (count() == kMaxNamespaces) throw TableError("table_full", "no namespace left", kMaxNamespaces);
  Namespace& ns = entries_[count()];
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].part_bytes == 0) throw TableError("bad_argument", "part_bytes is 0", 0, "1 or more");
    if (groups[g].kind == GroupKind::kWindow && groups[g].window_tokens == 0)
      throw TableError("bad_argument", "a window group has no window", 0, "1 or more tokens");
    ns.groups[g] = groups[g];
  }
  ns.chunk_tokens = chunk_tokens;
  ns.block_tokens = block_tokens;
  ns.writers = writers;
  ns.group_count = static_cast<uint32_t>(groups.size());
  ns.digest = digest;
  ns.crc = body_crc(ns);
  publish(ns.word, sealed(1));
  add_shape(ns);
  return count() - 1;
}

void Namespaces::add_shape(const Namespace& ns) {
  std::vector<uint64_t> shape;
  for (uint32_t g = 0; g < ns.group_count; ++g) shape.push_back(round_slot(ns.groups[g].part_bytes));
  std::sort(shape.begin(), shape.end());
  shape.erase(std::unique(shape.begin(), shape.end()), shape.end());
  auto known = std::find(shapes_.begin(), shapes_.end(), shape);
  shape_of_.push_back(static_cast<uint32_t>(known - shapes_.begin()));
  if (known == shapes_.end()) shapes_.push_back(shape);
}

bool Namespaces::shape_has(uint32_t shape, uint64_t slot_bytes) const {
  return std::binary_search(shapes_[shape].begin(), shapes_[shape].end(), slot_bytes);
}

void Namespaces::judge() {
  for (uint32_t i = 0; i < kMaxNamespaces; ++i) {
    const Namespace& ns = entries_[i];
    if (ns.word == 0) continue;
    if (ns.word != sealed(1) || ns.crc != body_crc(ns) || i != count()) refuse_adoption("a namespace is damaged", i);
    if (ns.group_count < 1 || ns.group_count > kMaxGroups || ns.writers < 1 || ns.writers > kMaxRanks)
      refuse_adoption("a namespace has impossible groups or writers", i);
    if (ns.block_tokens == 0 || ns.chunk_tokens == 0 || ns.chunk_tokens % ns.block_tokens)
      refuse_adoption("a namespace has impossible chunks", i);
    for (uint32_t g = 0; g < ns.group_count; ++g)
      if (ns.groups[g].part_bytes == 0 || ns.groups[g].kind > GroupKind::kWindow)
        refuse_adoption("a namespace has an impossible group", i);
    add_shape(ns);
  }
}

}  // namespace kvdock
