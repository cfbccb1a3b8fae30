// Evicts the leaf that is worth least for its memory (reuse_model.h). It learns from the uses that it sees: if the
// number of uses predicts nothing, it evicts as LRU does.
//
// A chunk's kind has the number of its uses and, from the second on, its gap: how many ticks lie between them, in
// octaves of the number of chunks in the pool. So of chunks that were used as often, those stay that are due sooner: an
// agent comes back after half a minute, another one after five. A chunk that is its parent's only child begins with the
// parent's kind, with at most kInherited uses: a conversation that was continued is likely to be continued again, after
// as long. The policy remembers evicted chunks, so it sees reuse after eviction: it keeps a third of the names, three
// times as long as it could keep all, and gaps for longer (past_uses.h).
//
// If the policy `declines`, a store gets no memory while its chunks would be evicted before all others: else sessions
// that do not fit together would evict each other, and none would find anything.
//
// Invariant: samples_ has each sampled chunk and ghost once, and they know their place.
#pragma once

#include <deque>
#include <vector>

#include "base/spread_map.h"
#include "table/past_uses.h"
#include "table/reuse_model.h"

namespace kvdock {

class ReusePolicy : public Policy {
 public:
  explicit ReusePolicy(bool declines) : declines_(declines) {}
  const char* name() const override { return declines_ ? "selective" : "adaptive"; }
  bool declines() const override { return declines_; }
  void see_share(double share) override { share_ = share; }
  void asked(uint64_t tick, uint64_t resident, size_t keys) override;
  uint8_t stored(const Chunk& chunk, std::optional<uint8_t> inherited) override;
  uint8_t used(const Chunk& chunk, uint64_t tick) override;
  void touched(const Chunk& chunk, uint64_t tick) override;
  void evicted(const Chunk& chunk, uint64_t tick) override;
  void removed(const Chunk& chunk) override;
  uint8_t expected(const std::vector<uint64_t>& names, std::optional<uint8_t> inherited, uint64_t tick) const override;
  void declined(const std::vector<uint64_t>& names, uint8_t kind, uint64_t tick) override;
  double worth(uint8_t kind, uint64_t used, uint64_t tick) const override;
  std::optional<Choice> least(const Leaves& leaves, uint64_t tick) const override;

 private:
  struct Sample {
    uint64_t name, used;
    uint32_t record;  // kNone: a ghost's
    uint8_t kind;
  };
  struct Ghost {
    uint64_t used;
    uint8_t kind;
    uint32_t sample;
  };

  static bool has_ghost(uint64_t name) { return name % kGhostOneIn == 0; }  // once it was evicted
  bool is_sampled(uint64_t name) const { return name / kGhostOneIn % one_in_ == 0; }
  uint32_t& sample_of(uint32_t record);
  uint32_t& place_of(const Sample& sample);
  void add_sample(const Chunk& chunk, uint8_t kind);
  void drop_sample(uint32_t place);
  uint64_t age_of_use(uint64_t used, uint64_t tick) const;
  uint8_t again(uint8_t kind, uint64_t used, uint64_t tick, bool sampled);
  uint8_t with_gap(uint8_t kind, uint64_t age) const;
  std::optional<uint8_t> past_gap(uint64_t name, uint64_t tick) const;
  bool is_apart(uint64_t age) const;
  uint64_t seen_chunks() const { return static_cast<uint64_t>(share_ * static_cast<double>(resident_)); }
  void close_oldest_ghost(uint64_t tick);
  void sample_fewer();
  void learn(uint64_t tick);

  static constexpr uint64_t kGhostOneIn = 3;
  static constexpr uint8_t kInherited = 2;
  static uint8_t from_parent(std::optional<uint8_t> inherited);
  static constexpr size_t kMostSamples = 4096;

  const bool declines_;
  ReuseModel model_;
  uint64_t resident_ = 0, next_learn_ = 0, one_in_ = 1;
  uint64_t one_in_of_all_ = 1;  // what one_in_ would be if the policy saw all chunks
  double share_ = 1;
  double keys_ = 0;  // keys per lookup: the mean of the latest lookups
  std::vector<Sample> samples_;
  std::vector<uint32_t> sample_of_;  // by record
  SpreadMap<Ghost> ghosts_;                                    // by name
  std::deque<std::pair<uint64_t, uint64_t>> ghosts_in_order_;  // name and last use
  PastUses past_;  // of chunks that were evicted or declined
};

}  // namespace kvdock
