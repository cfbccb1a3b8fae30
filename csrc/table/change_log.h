// The keys that lookups began or ceased to find, in order, for engines that announce them to routers.
//
// Ownership: on the heap; it ends with the process.
// Invariant: the latest kKept changes are known.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "table/layout.h"

namespace kvdock {

struct Change {
  Key key;
  uint32_t space;
  bool is_there;
};

// Keys, each with whether lookups find it, oldest first; the number to ask from next time; and whether all changes
// since the number asked for are known: if not, the list is empty.
using Changes = std::tuple<std::vector<std::pair<Key, bool>>, uint64_t, bool>;
using AllChanges = std::tuple<std::vector<Change>, uint64_t, bool>;

class ChangeLog {
 public:
  static constexpr uint64_t kKept = 1 << 16;

  ChangeLog() { kept_.reserve(kKept); }  // room for all: no call pays for growth

  void note(uint32_t space, const Key& key, bool is_there) {
    if (kept_.size() < kKept)
      kept_.push_back({key, space, is_there});
    else
      kept_[next_ % kKept] = {key, space, is_there};
    ++next_;
  }

  // Call it before the numbers of these namespaces go to others, whose sessions must not see these changes. `spaces`:
  // by number, up to the highest.
  void forget(const std::vector<bool>& spaces) {
    for (Change& change : kept_)
      if (change.space != kNone && spaces[change.space]) change.space = kNone;
  }

  // At most `at_most` changes of `space`, from number `from` on.
  Changes since(uint32_t space, uint64_t from, size_t at_most) const {
    bool complete = next_ - kept_.size() <= from && from <= next_;
    uint64_t next = complete ? from : next_;
    std::vector<std::pair<Key, bool>> changes;
    for (; next < next_ && changes.size() < at_most; ++next) {
      const Change& change = kept_[next % kKept];
      if (change.space == space) changes.emplace_back(change.key, change.is_there);
    }
    return {std::move(changes), next, complete};
  }

  // As above, but for all namespaces, without forgotten changes.
  AllChanges since(uint64_t from, size_t at_most) const {
    bool complete = next_ - kept_.size() <= from && from <= next_;
    uint64_t next = complete ? from : next_;
    std::vector<Change> changes;
    for (; next < next_ && changes.size() < at_most; ++next)
      if (const Change& change = kept_[next % kKept]; change.space != kNone) changes.push_back(change);
    return {std::move(changes), next, complete};
  }

 private:
  uint64_t next_ = 0;
  std::vector<Change> kept_;
};

}  // namespace kvdock
