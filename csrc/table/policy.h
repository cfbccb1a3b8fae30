// Which leaf goes first: what an eviction policy is told, and what it decides.
//
// A policy sorts chunks into kinds by what it has seen of them. The leaves of a kind are ordered by their last use; the
// policy says which of all is worth least. Whether a chunk may go at all is not its business (Chunks).
//
// Ownership: derived. A server that adopts a pool begins anew, with the last uses that records hold.
// Time is in ticks: one for each chunk that lookups ask for.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

namespace kvdock {

constexpr uint8_t kKinds = 8;
// Below all that engines can wish: the priority of what is left of weights that nobody runs any more.
constexpr int8_t kLeft = INT8_MIN;

constexpr uint8_t kNoKind = 0xff;  // of a record that is not READY

struct Leaf {
  uint64_t used;  // tick
  uint32_t record;
  auto operator<=>(const Leaf&) const = default;
};
using Leaves = std::array<std::set<Leaf>, kKinds>;  // by kind, least recently used first

struct Choice {
  double worth;  // the least goes first
  Leaf leaf;
  uint8_t kind;
  int8_t priority = 0;  // of the leaf's list, which Chunks knows
  bool goes_before(const Choice& other) const {
    if (priority != other.priority) return priority < other.priority;
    return worth != other.worth ? worth < other.worth : leaf < other.leaf;
  }
};

// What a policy hears of a chunk. `name` is a hash of its key and namespace, and stays when the chunk is gone.
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
  // It hears of such a share of all chunks only, chosen by their keys (csrc/curve/). Ticks and `resident` count all
  // nevertheless.
  virtual void see_share(double share) = 0;

  // A lookup with so many `keys` has come. The uses of the chunks that it found follow. `resident`: chunks in the pool.
  virtual void asked(uint64_t tick, uint64_t resident, size_t keys) = 0;
  // Each returns the chunk's kind from now on. `line`: the kind of its parent if it is the parent's only child.
  virtual uint8_t stored(const Chunk& chunk, std::optional<uint8_t> line) = 0;
  virtual uint8_t used(const Chunk& chunk, uint64_t tick) = 0;
  // The same request has touched it again: it is as young as that, and was not used once more.
  virtual void touched(const Chunk& chunk, uint64_t tick) = 0;
  virtual void evicted(const Chunk& chunk, uint64_t tick) = 0;
  virtual void removed(const Chunk& chunk) = 0;  // for another reason

  virtual double worth(uint8_t kind, uint64_t used, uint64_t tick) const = 0;
  virtual std::optional<Choice> least(const Leaves& leaves, uint64_t tick) const = 0;
};

// "adaptive" or "lru". TableError bad_argument.
std::unique_ptr<Policy> make_policy(const std::string& name);

}  // namespace kvdock
