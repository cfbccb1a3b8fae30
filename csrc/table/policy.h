// Which leaf is evicted first: the interface of eviction policies.
//
// A policy sorts chunks into kinds by their uses. The leaves of a kind are ordered by their last use; the policy
// chooses the leaf that is worth least. Eviction decides which chunks may be evicted at all.
//
// Ownership: derived. A server that adopts a pool starts with a new policy, and with the last uses that records hold.
// Time is in ticks: one for each chunk that lookups ask for.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvdock {

constexpr uint8_t kUses = 8, kGaps = 8;
constexpr uint8_t kKinds = kUses * kGaps;  // by the number of uses, and by how far apart they are (reuse_policy.h)
// The priority of chunks of weights that no engine runs any more: below all priorities of hints.
constexpr int8_t kLeft = INT8_MIN;

constexpr uint8_t kNoKind = 0xff;  // of a record that is not READY

struct Leaf {
  uint64_t used;  // tick
  uint32_t record;
  auto operator<=>(const Leaf&) const = default;
};
using Leaves = std::array<std::set<Leaf>, kKinds>;  // by kind, least recently used first

struct Choice {
  double worth;  // the least is evicted first
  Leaf leaf;
  uint8_t kind;
  int8_t priority = 0;  // of the leaf's list; Eviction sets it
  bool evict_before(const Choice& other) const {
    if (priority != other.priority) return priority < other.priority;
    return worth != other.worth ? worth < other.worth : leaf < other.leaf;
  }
};

// A chunk as a policy sees it. `name` is a hash of its key and namespace: a chunk that is stored again has the same
// name.
struct Chunk {
  uint32_t record;
  uint64_t name;
  uint8_t kind;
  uint64_t used;  // tick of its last use, before the present one
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const char* name() const = 0;
  // The policy sees only this share of all chunks, chosen by their keys (csrc/curve/). Ticks and `resident` still count
  // all of them.
  virtual void see_share(double share) = 0;

  // A lookup of `keys` keys has come. The uses of the chunks that it found follow. `resident`: chunks in the pool.
  virtual void asked(uint64_t tick, uint64_t resident, size_t keys) = 0;
  // Each of these returns the chunk's kind from now on. `inherited`: its parent's kind if it is the parent's only
  // child.
  virtual uint8_t stored(const Chunk& chunk, std::optional<uint8_t> inherited) = 0;
  virtual uint8_t used(const Chunk& chunk, uint64_t tick) = 0;
  // A store, or the same request, names the chunk again: this renews its last use, and counts as no use.
  virtual void touched(const Chunk& chunk, uint64_t tick) = 0;
  virtual void evicted(const Chunk& chunk, uint64_t tick) = 0;
  virtual void removed(const Chunk& chunk) = 0;  // not by eviction

  virtual bool declines() const { return false; }
  // The kind that the last of these chunks of a chain would have if they were stored now.
  virtual uint8_t expected(const std::vector<uint64_t>& names, std::optional<uint8_t> inherited,
                           uint64_t tick) const = 0;
  // They were not stored, since they would have been evicted first. `kind`: as expected() found.
  virtual void declined(const std::vector<uint64_t>& names, uint8_t kind, uint64_t tick) = 0;

  virtual double worth(uint8_t kind, uint64_t used, uint64_t tick) const = 0;
  virtual std::optional<Choice> least(const Leaves& leaves, uint64_t tick) const = 0;
};

// "lru"; "adaptive"; or "selective", which is adaptive and declines chunks that would be evicted first. Throws
// TableError bad_argument.
std::unique_ptr<Policy> make_policy(const std::string& name);

}  // namespace kvdock
