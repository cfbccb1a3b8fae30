// Evicts the leaf that is worth least for its memory (reuse_model.h). It learns from the uses that it sees: if the
// number of uses predicts nothing, it evicts as LRU does.
//
// A chunk's kind is the number of its uses, up to the last kind. A chunk that is its parent's only child begins with
// the parent's kind, up to kInherited: a conversation that was continued is likely to be continued again. The policy
// remembers evicted chunks, so it sees reuse after eviction: it keeps a third of the names, three times as long as it
// could keep all.
//
// Invariant: samples_ has each sampled chunk and ghost once, and they know their place.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/seeded_hash.h"
#include "table/reuse_model.h"

namespace kvdock {

class ReusePolicy : public Policy {
 public:
  const char* name() const override { return "adaptive"; }
  void see_share(double share) override { share_ = share; }
  void asked(uint64_t tick, uint64_t resident, size_t keys) override;
  uint8_t stored(const Chunk& chunk, std::optional<uint8_t> inherited) override;
  uint8_t used(const Chunk& chunk, uint64_t tick) override;
  void touched(const Chunk& chunk, uint64_t tick) override;
  void evicted(const Chunk& chunk, uint64_t tick) override;
  void removed(const Chunk& chunk) override;
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
  void close_oldest_ghost(uint64_t tick);
  void sample_fewer();
  void learn(uint64_t tick);

  static constexpr uint64_t kGhostOneIn = 3;
  static constexpr uint8_t kInherited = 2;
  static constexpr size_t kMostSamples = 4096;

  ReuseModel model_;
  uint64_t resident_ = 0, next_learn_ = 0, one_in_ = 1;
  uint64_t one_in_of_all_ = 1;  // what one_in_ would be if the policy saw all chunks
  double share_ = 1;
  double keys_ = 0;  // keys per lookup: the mean of the latest lookups
  std::vector<Sample> samples_;
  std::vector<uint32_t> sample_of_;  // by record
  std::unordered_map<uint64_t, Ghost, SeededHash> ghosts_;    // by name
  std::deque<std::pair<uint64_t, uint64_t>> ghosts_in_order_;  // name and last use
};

}  // namespace kvdock
