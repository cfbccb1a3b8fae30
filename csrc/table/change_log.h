// The keys that lookups have begun or ceased to find, in order, for engines that announce them to routers.
//
// Ownership: it is lost with the process.
// Thread safety: none of its own; the table's mutex guards every call.
// Invariant: the latest kKept changes are known.
#pragma once

#include <cstdint>
#include <vector>

#include "table/layout.h"

namespace kvdock {

struct Change {
  Key key;
  uint32_t space;
  bool is_there;
};

struct Changes {
  std::vector<Change> changes;  // oldest first
  uint64_t next = 0;            // what to ask from next time
  bool complete = true;         // false: some are not known any more, and `changes` is empty
};

class ChangeLog {
 public:
  static constexpr uint64_t kKept = 1 << 16;

  void note(uint32_t space, const Key& key, bool is_there) {
    if (kept_.size() < kKept)
      kept_.push_back({key, space, is_there});
    else
      kept_[next_ % kKept] = {key, space, is_there};
    ++next_;
  }

  // At most `at_most` changes of `space`, from number `from` on.
  Changes since(uint32_t space, uint64_t from, size_t at_most) const {
    Changes out;
    out.complete = next_ - kept_.size() <= from && from <= next_;
    out.next = out.complete ? from : next_;
    for (; out.next < next_ && out.changes.size() < at_most; ++out.next) {
      const Change& change = kept_[out.next % kKept];
      if (change.space == space) out.changes.push_back(change);
    }
    return out;
  }

 private:
  uint64_t next_ = 0;
  std::vector<Change> kept_;
};

}  // namespace kvdock
