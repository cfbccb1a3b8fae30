// The policies that look at recency, and the choice among all.
#include "table/policy.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <unordered_map>

#include "table/calls.h"
#include "table/reuse_policy.h"

namespace kvdock {

namespace {

// The least recently used goes first.
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
  void set_aside(const Chunk&) override {}
  double worth(uint8_t, uint64_t used, uint64_t) const override { return static_cast<double>(used); }
  std::optional<Choice> least(const Leaves& leaves, uint64_t) const override {
    if (leaves[0].empty()) return std::nullopt;
    const Leaf& leaf = *leaves[0].begin();
    return Choice{static_cast<double>(leaf.used), leaf, 0};
  }
};

// Chunks used once apart from those used again, and how much room the former get learnt from what had to go too early:
// Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), with leaves in place of blocks.
class Arc : public Policy {
 public:
  const char* name() const override { return "arc"; }
  void see_share(double share) override { share_ = share; }
  void asked(uint64_t, uint64_t resident, size_t) override {
    room_ = static_cast<uint64_t>(std::llround(share_ * static_cast<double>(resident)));
  }

  uint8_t stored(const Chunk& chunk, std::optional<uint8_t>) override {
    uint8_t kind = aside_.take(chunk).value_or(kOnce);
    if (auto ghost = ghosts_.find(chunk.name); ghost != ghosts_.end()) {
      uint8_t was = ghost->second.kind;
      double mine = static_cast<double>(gone_[was].size()), others = static_cast<double>(gone_[1 - was].size());
      double step = std::max(1.0, others / std::max(1.0, mine));
      once_room_ = was == kOnce ? std::min(static_cast<double>(room_), once_room_ + step)
                                : std::max(0.0, once_room_ - step);
      forget(ghost);
      kind = kAgain;
    }
    ++count_[kind];
    return kind;
  }
  uint8_t used(const Chunk& chunk, uint64_t) override {
    --count_[chunk.kind];
    ++count_[kAgain];
    return kAgain;
  }
  void touched(const Chunk&, uint64_t) override {}
  void evicted(const Chunk& chunk, uint64_t) override {
    --count_[chunk.kind];
    if (auto known = ghosts_.find(chunk.name); known != ghosts_.end()) forget(known);
    auto& gone = gone_[chunk.kind];
    ghosts_[chunk.name] = {chunk.kind, gone.insert(gone.end(), chunk.name)};
    while (count_[kOnce] + gone_[kOnce].size() > room_ && !gone_[kOnce].empty()) forget_oldest(kOnce);
    while (gone_[kOnce].size() + gone_[kAgain].size() > room_ && !gone_[kAgain].empty()) forget_oldest(kAgain);
  }
  void removed(const Chunk& chunk) override { --count_[chunk.kind]; }
  void set_aside(const Chunk& chunk) override {
    removed(chunk);
    aside_.put(chunk, room_);
  }

  double worth(uint8_t, uint64_t used, uint64_t) const override { return static_cast<double>(used); }
  bool lets_go_first(uint8_t kind) const override {
    return kind == (count_[kOnce] > 0 && static_cast<double>(count_[kOnce]) > once_room_ ? kOnce : kAgain);
  }
  std::optional<Choice> least(const Leaves& leaves, uint64_t tick) const override {
    uint8_t from = lets_go_first(kOnce) ? kOnce : kAgain;
    if (leaves[from].empty()) from = 1 - from;
    if (leaves[from].empty()) return std::nullopt;
    const Leaf& leaf = *leaves[from].begin();
    return Choice{worth(from, leaf.used, tick), leaf, from};
  }

 private:
  static constexpr uint8_t kOnce = 0, kAgain = 1;
  struct Ghost {
    uint8_t kind;
    std::list<uint64_t>::iterator at;
  };
  using Ghosts = std::unordered_map<uint64_t, Ghost>;

  void forget(Ghosts::iterator ghost) {
    gone_[ghost->second.kind].erase(ghost->second.at);
    ghosts_.erase(ghost);
  }
  void forget_oldest(uint8_t kind) { forget(ghosts_.find(gone_[kind].front())); }

  uint64_t room_ = 0;
  double share_ = 1, once_room_ = 0;
  uint64_t count_[2] = {};
  std::list<uint64_t> gone_[2];  // names, the first that went first
  Ghosts ghosts_;
  Aside aside_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name) {
  if (name == "adaptive") return std::make_unique<ReusePolicy>();
  if (name == "arc") return std::make_unique<Arc>();
  if (name == "lru") return std::make_unique<Lru>();
  throw TableError("bad_argument", "no such eviction policy", name, "adaptive, arc or lru");
}

}  // namespace kvdock
