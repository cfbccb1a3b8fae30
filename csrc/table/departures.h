// Why and when lookups ceased to find chunks, or stores of them were declined: the explanation of a miss.
//
// Ownership: on the heap; it ends with the process.
// Invariant: the latest kKept departures are known, each by its key.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/seeded_hash.h"
#include "table/layout.h"

namespace kvdock {

// Why a chunk left the pool. It was evicted: room: a store needed its slot; ahead: too little was free; quota: its
// tenant used too much; shrunk: its segment was given back; weights: no engine runs its weights any more; evicted: an
// operator asked for free bytes. Or it was removed: cleared, deleted: by an operator; mismatched: a reader found other
// bytes; read: a temporary chunk, with its last reader; unread: it was loaded from a lower tier for a request that has
// ended. Or it did not come into the pool again: store_declined: it would have been the first to be evicted.
enum class Gone : uint8_t {
  room, ahead, quota, shrunk, cleared, deleted, mismatched, unread, read, weights, evicted, store_declined
};
constexpr const char* kGoneNames[] = {
    "room", "ahead",   "quota",   "shrunk",        "cleared", "deleted", "mismatched", "unread",
    "read", "weights", "evicted", "store_declined"};

struct Departure {
  Key key;
  uint32_t space;
  Gone why;
  uint64_t at_ms, used_ms;  // on the server clock; when a request last named it, 0 if that is not known
};

class Departures {
 public:
  static constexpr uint32_t kKept = 1 << 16;

  Departures() {  // room for all: no call pays for growth
    kept_.reserve(kKept);
    latest_.reserve(kKept);
  }

  // The server clock, and the use tick at that time.
  void set_now(uint64_t now_ms, uint64_t use_tick) {
    now_ms_ = std::max(now_ms_, now_ms);
    if (!uses_.empty() && now_ms_ < uses_.back().ms + kUseMs) return;
    uses_.push_back({use_tick, now_ms_});
    if (uses_.size() > kUses) uses_.pop_front();
  }

  void note(uint32_t space, const Key& key, Gone why, uint64_t used_ms) {
    Kept departure{{key, space, why, now_ms_, used_ms}, use_of(space)};
    auto at = static_cast<uint32_t>(next_ % kKept);
    if (kept_.size() < kKept) {
      kept_.push_back(departure);
    } else {
      drop(at);
      kept_[at] = departure;
    }
    latest_[hash(space, key)] = at;
    ++next_;
  }

  // The latest departure of that key, if it is known.
  std::optional<Departure> find(uint32_t space, const Key& key) const {
    auto it = latest_.find(hash(space, key));
    if (it == latest_.end()) return std::nullopt;
    const Kept& found = kept_[it->second];
    if (found.space != space || found.use != use_of(space) || !(found.key == key)) return std::nullopt;
    return found;
  }

  // Call it before the numbers of these namespaces go to others. `spaces`: by number, up to the highest.
  void forget(const std::vector<bool>& spaces) {
    if (use_of_.size() < spaces.size()) use_of_.resize(spaces.size());
    for (uint32_t space = 0; space < spaces.size(); ++space) use_of_[space] += spaces[space];
  }

  uint64_t now_ms() const { return now_ms_; }

  // The time of a use tick; 0 if the tick is older than those that are known.
  uint64_t used_at(uint64_t tick) const {
    auto is_before = [](const Use& use, uint64_t t) { return use.tick < t; };
    auto it = std::lower_bound(uses_.begin(), uses_.end(), tick, is_before);
    return it == uses_.end() ? now_ms_ : it == uses_.begin() && it->tick > tick ? 0 : it->ms;
  }

 private:
  struct Kept : Departure {
    uint32_t use;  // of the namespace's number
  };
  struct Use {
    uint64_t tick, ms;
  };
  static constexpr uint64_t kUseMs = 1000;
  static constexpr size_t kUses = 1 << 14;  // at kUseMs apart, about four and a half hours

  static uint64_t hash(uint32_t space, const Key& key) { return seeded_hash(key.bytes, space); }

  uint32_t use_of(uint32_t space) const { return space < use_of_.size() ? use_of_[space] : 0; }

  void drop(uint32_t at) {
    auto it = latest_.find(hash(kept_[at].space, kept_[at].key));
    if (it != latest_.end() && it->second == at) latest_.erase(it);
  }

  uint64_t now_ms_ = 0, next_ = 0;
  std::vector<Kept> kept_;
  std::vector<uint32_t> use_of_;  // by number of a namespace: for how many namespaces it was used before
  std::unordered_map<uint64_t, uint32_t> latest_;  // by hash: an index into kept_
  std::deque<Use> uses_;
};

}  // namespace kvdock
