// What lookups begin to find and what they cease to find, in order, for engines that tell routers about it.
//
// Ownership: derived, and forgotten with the process; the latest kKept changes are known.
// Thread safety: none; the table's mutex guards it.
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
  bool complete = true;         // false: some are not known any more, and none is given
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

  // Of `space`, from number `from` on, `at_most` of them.
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
