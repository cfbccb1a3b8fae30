// When chunks that the pool does not have were last used, and their kinds: of one in kOneIn names, for kTimes as many
// chunks as the pool has, and at most kMost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>

#include "base/spread_map.h"

namespace kvdock {

class PastUses {
 public:
  struct Use {
    uint64_t tick;
    uint8_t kind;
  };

  std::optional<Use> find(uint64_t name) const {
    const Use* found = is_seen(name) ? uses_.find(name) : nullptr;
    return found ? std::optional(*found) : std::nullopt;
  }
  // `chunks`: how many chunks the pool has.
  void put(uint64_t name, const Use& use, uint64_t chunks) {
    if (!is_seen(name)) return;
    uses_.put(name, use);
    in_order_.emplace_back(name, use.tick);
    while (in_order_.size() > std::min(kMost, chunks * kTimes / kOneIn)) {
      auto [oldest, tick] = in_order_.front();
      in_order_.pop_front();
      if (const Use* found = uses_.find(oldest); found && found->tick == tick) uses_.erase(oldest);
    }
  }
  void drop(uint64_t name) {
    if (is_seen(name)) uses_.erase(name);
  }

 private:
  static constexpr uint64_t kOneIn = 8, kTimes = 64, kMost = 1 << 18;
  static bool is_seen(uint64_t name) { return (name >> 32) % kOneIn == 0; }

  SpreadMap<Use> uses_;                                 // by name
  std::deque<std::pair<uint64_t, uint64_t>> in_order_;  // name and tick
};

}  // namespace kvdock
