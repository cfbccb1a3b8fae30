// The share of the tokens of lookups that pools of other sizes would find: a live miss-ratio curve.
//
// Sampling is spatial: a chunk is sampled if a hash of its key lies below a threshold, so every use of it is seen or
// none. Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS" (FAST 2015); as there, the
// threshold falls when samples become too many, here also when they cost too much time. Each size of pool is a
// MiniPool under the pool's own policy. A pool without bound misses a chunk once: for it, names of chunks are
// remembered, with a threshold of their own, which falls as they become more.
//
// A sampled miss stands for 1 / share misses, while the tokens of all lookups are counted. So a chunk that every lookup
// asks for distorts nothing when it happens to be sampled, as it is never missing. The real pool's misses are known
// both for the sampled chunks and for all: their ratio corrects the estimates (a control variate).
//
// Ownership: on the heap. A server keeps its curve with the pool, from time to time, and the next server of the pool
// goes on with it (keep).
// Thread safety: none; the caller calls from one thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

#include "base/histogram.h"
#include "curve/distances.h"
#include "curve/mini_pool.h"

namespace kvdock {

constexpr std::array<double, 6> kPoolFactors{0.25, 0.5, 1, 2, 4, 8};
// A small pool needs more samples than the largest. Each pool sees this many times the largest pool's share of chunks,
// and no more than all of them.
constexpr std::array<double, 6> kMoreSeen{4, 4, 4, 2, 1, 1};
constexpr size_t kPools = kPoolFactors.size();
// Buckets of reuse distances: 1 MiB, and so on in steps of 4.
constexpr auto kDistances = [] {
  std::array<uint64_t, 13> bounds{};
  for (size_t i = 0; i < bounds.size(); ++i) bounds[i] = uint64_t{1} << (20 + 2 * i);
  return bounds;
}();
using DistanceCounts = Histogram<kDistances.size()>;

struct CurveOptions {
  uint64_t salt;        // random, so that no caller can choose keys that are sampled
  double most_share;    // the share of chunks that is sampled at first; it only falls
  size_t most_entries;  // of all simulated pools together; the limit of remembered names, too
  double most_work;     // of a lookup, on average; its unit is the storing of one chunk in a simulated pool
};

// Sums of one namespace, or of all. They are in tokens, because the chunks of namespaces differ in size.
struct CurveSums {
  uint64_t lookups = 0, samples = 0;  // sampled chunks
  uint64_t asked = 0, missed = 0;     // all tokens; missed by the real pool
  // Estimates by samples: the misses of the real pool, and those of the others.
  struct Missed {
    double here = 0, there = 0;
  };
  std::array<Missed, kPools> pools{};
  Missed ever{};

  void add(const CurveSums& other);
  void scale(double by);
  void keep(KeptWriter& out) const;
  void take_over(KeptReader& in);  // Throws TableError corrupt
  // The shares of the tokens that would be found. REQUIRES: asked != 0.
  double found_at(size_t pool) const { return found(pools[pool]); }
  double found_ever() const { return found(ever); }

 private:
  double found(const Missed& sampled) const;
};

class Curve {
 public:
  // Throws TableError bad_argument.
  Curve(const std::string& policy, uint64_t pool_bytes, const CurveOptions& options);
  // Goes on with what another one of the same policy, pool_bytes and salt has kept. Throws TableError corrupt,
  // bad_argument.
  Curve(const std::string& policy, uint64_t pool_bytes, const CurveOptions& options, std::string_view kept);
  std::string keep() const;

  // A namespace gets the number. Its sums start at zero; the sums of a namespace that had the number before are
  // forgotten.
  void set_space(uint32_t space, uint32_t chunk_tokens, uint64_t chunk_bytes);
  // A request asked for the `count` chunks, and the first `found` of them were found. The simulated pools see them one
  // after the other, in go_on(), or all at once in finish(), which every other call does first.
  void looked_up(uint32_t space, const uint8_t* keys, size_t count, size_t found);
  // Chunks were stored. Those that a lookup named are in the simulated pools already. Likewise.
  void stored(uint32_t space, const uint8_t* keys, size_t count);
  bool go_on();  // shows the latest call to one more pool; returns whether there are more
  void finish() {
    while (go_on()) {
    }
  }

  // Multiplies the present counts by `kept`. Throws TableError bad_argument.
  void age(double kept);

  double share() const { return seen_by(0); }  // the share of all chunks that is sampled now
  const CurveSums& all() const { return all_; }
  const CurveSums& of_space(uint32_t space) const;  // Throws TableError bad_argument
  size_t entries() const;
  size_t remembered() const { return remembered_.size(); }
  const DistanceCounts& distances() const { return distances_; }  // of samples
  std::vector<std::optional<double>> capacities() const;  // MiniPool::capacity of each simulated pool
  void check() const;  // Throws TableError corrupt

 private:
  struct Space {
    uint32_t chunk_tokens = 0;
    uint64_t chunk_bytes = 0;
    CurveSums sums;
  };

  void resize();
  void sample(uint32_t space, const uint8_t* keys, size_t count);
  double seen_by(size_t pool) const { return std::min(1.0, share_ * kMoreSeen[pool]); }
  bool is_below(uint64_t name, double share) const;
  std::optional<uint64_t> use(const Space& space, uint64_t name);
  void remember(Space& space, size_t found);
  void look(size_t pool);
  void adapt();  // to how much work lookups were
  size_t choose(double share, size_t found);
  void keep_few();  // no more samples than options_ allow
  void sample_fewer_for(size_t count);
  void sample_fewer(double by);
  void remember_fewer(double by);

  CurveOptions options_;
  uint64_t pool_bytes_, tick_ = 0;
  double share_, remembered_share_;  // of chunks: seen by the largest pool, and remembered
  double work_ = 0;            // of the last work_lookups_ lookups
  uint32_t work_lookups_ = 0;  // how many lookups work_ is the work of
  std::vector<MiniPool> pools_;
  Distances remembered_;
  DistanceCounts distances_{kDistances};
  std::vector<Space> spaces_;
  CurveSums all_;
  struct Sampled {
    uint64_t name;
    size_t at;  // in the call's keys
  };
  struct Unfinished {
    uint32_t space;
    bool is_lookup;
    size_t count, found;
    size_t pool;  // the next one that sees it
  };
  std::optional<Unfinished> unfinished_;  // the latest call
  std::vector<Sampled> sampled_;  // of the latest call
  std::vector<uint64_t> names_;   // names of those of sampled_ that one pool sees
};

}  // namespace kvdock
