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
  double worth(uint8_t, uint64_t used, uint64_t) const override { return static_cast<double>(used); }
  std::optional<Choice> least(const Leaves& leaves, uint64_t) const override {
    if (leaves[0].empty()) return std::nullopt;
    const Leaf& leaf = *leaves[0].begin();
    return Choice{static_cast<double>(leaf.used), leaf, 0};
  }
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == "adaptive") return std::make_unique<ReusePolicy>();
  if (name == "lru") return std::make_unique<Lru>();
  throw TableError("bad_argument", "no such eviction policy", name, "adaptive or lru");
}

}  // namespace kvdock
