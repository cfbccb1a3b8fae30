// The policy by recency alone, and the choice of a policy by its name.
#include "table/policy.h"

#include "table/calls.h"
#include "table/reuse_policy.h"

namespace kvdock {

namespace {

// The least recently used leaf is evicted first.
class Lru : public Policy {
 public:
  const char* name() const override { return "lru"; }
  void see_share(double) override {}
  void asked(uint64_t, uint64_t, size_t) override {}
  uint8_t stored(const Chunk&, std::optional<uint8_t>) override { return 0; }
  uint8_t used(const Chunk&, uint64_t) override { return 0; }
  void touched(const Chunk&, uint64_t) override {}
  void evicted(const Chunk&, uint64_t) override {}
  void removed(const Chunk&) override {}
  uint8_t expected(const std::vector<uint64_t>&, std::optional<uint8_t>, uint64_t) const override { return 0; }
  void declined(const std::vector<uint64_t>&, uint8_t, uint64_t) override {}
  double worth(uint8_t, uint64_t used, uint64_t) const override { return static_cast<double>(used); }
  // Chunks that another policy has sorted keep their kinds for a while.
  std::optional<Choice> least(const Leaves& leaves, uint64_t) const override {
    std::optional<Choice> best;
    for (uint8_t kind = 0; kind < kKinds; ++kind) {
      if (leaves[kind].empty()) continue;
      const Leaf& leaf = *leaves[kind].begin();
      Choice one{static_cast<double>(leaf.used), leaf, kind};
      if (!best || one.evict_before(*best)) best = one;
    }
    return best;
  }
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == "adaptive" || name == "selective") return std::make_unique<ReusePolicy>(name == "selective");
  if (name == "lru") return std::make_unique<Lru>();
  throw TableError("bad_argument", "no such eviction policy", name, "adaptive, selective or lru");
}

}  // namespace kvdock
