// Chunks that may be evicted, by shape and by tenant: a policy chooses among them.
//
// Ownership: derived.
// Invariant: a leaf is in the list of its shape and in that of its tenant, under the kind and last use that it has now.
#pragma once

#include <map>

#include "table/policy.h"

namespace kvdock {

class LeafLists {
 public:
  // `shape` groups records whose parts have the same sizes: evicting one makes room for another.
  void add(uint32_t shape, uint32_t tenant, uint8_t kind, const Leaf& leaf) {
    by_shape_[shape][kind].insert(leaf);
    by_tenant_[tenant][kind].insert(leaf);
    ++size_;
  }
  void remove(uint32_t shape, uint32_t tenant, uint8_t kind, const Leaf& leaf) {
    size_ -= by_shape_[shape][kind].erase(leaf);
    by_tenant_[tenant][kind].erase(leaf);
  }
  bool lists(uint32_t shape, uint32_t tenant, uint8_t kind, const Leaf& leaf) const {
    return has(by_shape_, shape, kind, leaf) && has(by_tenant_, tenant, kind, leaf);
  }
  size_t size() const { return size_; }

  std::optional<Choice> of_shape(uint32_t shape, const Policy& policy, uint64_t tick) const {
    auto at = by_shape_.find(shape);
    return at == by_shape_.end() ? std::nullopt : policy.least(at->second, tick);
  }
  std::optional<Choice> of_tenant(uint32_t tenant, const Policy& policy, uint64_t tick) const {
    auto at = by_tenant_.find(tenant);
    return at == by_tenant_.end() ? std::nullopt : policy.least(at->second, tick);
  }
  template <class F>
  void for_each_shape(F&& f) const {
    for (auto& [shape, leaves] : by_shape_) f(shape);
  }
  // The earliest last use of all.
  std::optional<uint64_t> oldest() const {
    std::optional<uint64_t> used;
    for (auto& [shape, leaves] : by_shape_)
      for (auto& kind : leaves)
        if (!kind.empty() && (!used || kind.begin()->used < *used)) used = kind.begin()->used;
    return used;
  }
  // f(kind, leaf) for the `most` least recently used leaves of each shape and kind.
  template <class F>
  void for_each_oldest(size_t most, F&& f) const {
    for (auto& [shape, leaves] : by_shape_)
      for (uint8_t kind = 0; kind < kKinds; ++kind) {
        size_t left = most;
        for (auto it = leaves[kind].begin(); it != leaves[kind].end() && left--; ++it) f(kind, *it);
      }
  }

 private:
  using Lists = std::map<uint32_t, Leaves>;
  static bool has(const Lists& lists, uint32_t owner, uint8_t kind, const Leaf& leaf) {
    auto at = lists.find(owner);
    return at != lists.end() && at->second[kind].count(leaf);
  }

  Lists by_shape_, by_tenant_;
  size_t size_ = 0;
};

}  // namespace kvdock
