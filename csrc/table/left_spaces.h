// Namespaces that all sessions have left, of weights that no engine runs: their chunks are evicted first.
//
// Ownership: derived. Namespaces reports which namespaces were left, Eviction which of these have candidates (leaves).
//   Invariant: a namespace is in all_, by_shape_ and by_tenant_ exactly if it was left and has candidates.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

class LeftSpaces {
 public:
  struct Left {
    uint64_t at_ms;  // on the server clock
    uint32_t space;
    auto operator<=>(const Left&) const = default;
  };

  void leave(uint32_t space, uint32_t shape, uint32_t tenant, uint64_t at_ms) {
    come_back(space);
    Entry& e = entry(space);
    e.is_left = true;
    e.shape = shape, e.tenant = tenant, e.at_ms = at_ms;
    if (e.has_leaves) add(space);
  }
  // A session uses it, or it was dropped.
  void come_back(uint32_t space) {
    Entry& e = entry(space);
    if (e.is_left && e.has_leaves) remove(space);
    e.is_left = false;
  }
  void set_has_leaves(uint32_t space, bool has) {
    Entry& e = entry(space);
    if (e.has_leaves == has) return;
    if (e.is_left && e.has_leaves) remove(space);
    e.has_leaves = has;
    if (e.is_left && e.has_leaves) add(space);
  }

  bool has(uint32_t space) const { return space < entries_.size() && entries_[space].is_left; }
  uint64_t left_at(uint32_t space) const { return entries_[space].at_ms; }
  // Of those with candidates: the one that was left first, if that was at `until_ms` or before.
  std::optional<Left> of_shape(uint32_t shape, uint64_t until_ms) const { return first(by_shape_, shape, until_ms); }
  std::optional<Left> of_tenant(uint32_t tenant, uint64_t until_ms) const {
    return first(by_tenant_, tenant, until_ms);
  }
  // The one that was left first, whenever that was, of all but the `kept` that were left last.
  std::optional<Left> before_the_last(size_t kept) const {
    return all_.size() > kept ? std::optional(*all_.begin()) : std::nullopt;
  }
  template <class F>
  void for_each_shape(F&& f) const {
    for (auto& [shape, order] : by_shape_) f(shape);
  }

  void check(const std::vector<bool>& left, const std::vector<bool>& has_leaves) const {
    size_t count = 0;
    for (uint32_t space = 0; space < left.size(); ++space) {
      Entry e = space < entries_.size() ? entries_[space] : Entry{};
      require(e.is_left == left[space], "a namespace that was left is not known to be, or the other way about", space);
      require(e.has_leaves == has_leaves[space], "what may go of a namespace is not known", space);
      if (!e.is_left || !e.has_leaves) continue;
      ++count;
      require(all_.count({e.at_ms, space}) && by_shape_.at(e.shape).count({e.at_ms, space}) &&
              by_tenant_.at(e.tenant).count({e.at_ms, space}), "a namespace that was left is not in order", space);
    }
    require(count == all_.size(), "a namespace is in order that was not left", int64_t(all_.size()));
  }

 private:
  using Order = std::set<Left>;
  struct Entry {
    bool is_left = false, has_leaves = false;
    uint32_t shape = 0, tenant = 0;
    uint64_t at_ms = 0;
  };

  Entry& entry(uint32_t space) {
    if (space >= entries_.size()) entries_.resize(space + 1);
    return entries_[space];
  }
  void add(uint32_t space) {
    const Entry& e = entries_[space];
    for (Order* order : {&all_, &by_shape_[e.shape], &by_tenant_[e.tenant]}) order->insert({e.at_ms, space});
  }
  void remove(uint32_t space) {
    const Entry& e = entries_[space];
    all_.erase({e.at_ms, space});
    for (auto [orders, owner] : {std::pair{&by_shape_, e.shape}, std::pair{&by_tenant_, e.tenant}}) {
      auto at = orders->find(owner);
      at->second.erase({e.at_ms, space});
      if (at->second.empty()) orders->erase(at);
    }
  }
  static std::optional<Left> first(const std::map<uint32_t, Order>& orders, uint32_t owner, uint64_t until_ms) {
    auto at = orders.find(owner);
    if (at == orders.end() || at->second.begin()->at_ms > until_ms) return std::nullopt;
    return *at->second.begin();
  }

  std::vector<Entry> entries_;  // by namespace
  Order all_;
  std::map<uint32_t, Order> by_shape_, by_tenant_;  // without empty ones
};

}  // namespace kvdock
