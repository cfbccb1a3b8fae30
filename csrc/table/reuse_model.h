// How likely a chunk is to be used again, by the number and the age of its uses: the worth of a leaf.
//
// Chunks are of kinds, by the number of their uses. For each kind and age the model counts how many were used again and
// how many chunks lived through that age for how long, which gives a rate of reuse: an estimate of the hazard function.
// Rates with few samples borrow from the rates of all kinds together, and these from 1 / age, with which the policy is
// LRU. The worth of a leaf is its best rate of hits for its memory, over all times that one might keep it: Gittins,
// "Bandit processes and dynamic allocation indices" (1979). Ranking by hits for memory and time is from Beckmann,
// Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018). bench/LOG.md has what was
// tried.
//
// Of a chunk with a gap (reuse_policy.h) the prior rate is the geometric mean of that of all chunks and of a rate with
// which most come back after about the gap.
//
// Ages are in ticks, and in bins of half an octave.
#pragma once

#include <array>
#include <cstdint>

#include "table/policy.h"

namespace kvdock {

class ReuseModel {
 public:
  static constexpr int kBins = 64;
  // The gap that is as long as the pool has chunks.
  static constexpr int kSameGap = 4;
  using Counts = std::array<std::array<double, kBins>, kKinds>;

  ReuseModel();

  static int bin_of(uint64_t age);
  // A chunk was `age` ticks old when it was used again, or when the policy forgot it.
  void ended(uint8_t kind, uint64_t age, bool reused);
  // `alive`: how many chunks are of each kind and age now. `together`: how many are used in one request: they count as
  // one sample. `resident`: chunks in the pool. Earlier counts weigh less from now on.
  void learn(const Counts& alive, double together, uint64_t resident);

  double worth(uint8_t kind, uint64_t age) const;  // linear between the middles of bins
  // The least age from which worth() is linear up to `age`: the middle of a bin. 0 before the first middle, where
  // worth() is constant.
  uint64_t stretch_from(uint64_t age) const;

 private:
  using Rates = std::array<double, kBins>;
  void expect_gaps(uint64_t resident);
  void rank(const std::array<double, kBins>& reused, int kind);
  double width(int bin) const { return low_[bin + 1] - low_[bin]; }
  double middle(int bin) const { return (low_[bin] + low_[bin + 1]) / 2; }

  std::array<double, kBins + 1> low_;  // the lower ends of the bins
  std::array<double, kBins> bins_per_tick_;
  Counts ends_{}, hits_{}, worth_{};
  std::array<Rates, kGaps> of_gap_;  // what is expected of chunks with a gap before any were seen
  int gaps_of_ = 0;  // of_gap_ was made for a pool whose number of chunks has this many bits
};

}  // namespace kvdock
