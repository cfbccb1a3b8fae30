#include "table/reuse_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvdock {

namespace {

// The weights of the priors, in requests: a request's chunks lived through a bin, or were hit.
constexpr double kCommonPrior = 683, kKindPrior = 171, kFactorPrior = 10.7, kScalePrior = 2.1;
// Of chunks with a gap: the share that is used again, and the deviation of the logarithm of when.
constexpr double kReturns = 0.9, kGapSpread = 1;
constexpr double kNear = 32;           // ticks; the prior rate of reuse is 1 / (age + kNear)
constexpr double kKept = 511.0 / 512;  // the share of each count that remains after learn()

}  // namespace

ReuseModel::ReuseModel() {
  for (int k = 0; k <= kBins; ++k) low_[k] = k == 0 ? 0 : std::ldexp(k % 2 ? 1.5 : 1.0, k / 2);
  for (int k = 0; k < kBins; ++k) bins_per_tick_[k] = 1 / width(k);
  learn({}, 1, 1);
}

int ReuseModel::bin_of(uint64_t age) {
  if (age < 2) return 0;
  int octave = 63 - std::countl_zero(age);
  return std::min<int>(kBins - 1, 2 * octave + static_cast<int>(age >> (octave - 1) & 1));
}

void ReuseModel::ended(uint8_t kind, uint64_t age, bool reused) {
  int bin = bin_of(age);
  ends_[kind][bin] += 1;
  if (reused) hits_[kind][bin] += 1;
}

void ReuseModel::expect_gaps(uint64_t resident) {
  int bits = std::bit_width(resident | 1);
  if (bits == gaps_of_) return;
  gaps_of_ = bits;
  for (int gap = 1; gap < kGaps; ++gap) {
    double center = (bits - 0.5 + gap - kSameGap) * std::log(2.0);
    auto waits = [&](double age) {  // the share that has not come back at that age
      return age <= 0 ? 1 : 1 - kReturns / 2 * std::erfc((center - std::log(age)) / (kGapSpread * std::sqrt(2.0)));
    };
    for (int k = 0; k < kBins; ++k) {
      double back = 1 - waits(low_[k + 1]) / waits(low_[k]);
      of_gap_[gap][k] = back / (1 - back / 2) / width(k);
    }
  }
}

void ReuseModel::learn(const Counts& alive, double together, uint64_t resident) {
  Counts lived;  // by kind and bin, how long chunks lived in it, in chunk-ticks
  std::array<double, kBins> all_hits{}, all_lived{}, base, common;
  for (int kind = 0; kind < kKinds; ++kind) {
    double older = 0;
    for (int k = kBins - 1; k >= 0; --k) {
      double here = ends_[kind][k] + alive[kind][k];
      lived[kind][k] = width(k) * (older + here / 2);
      older += here;
      all_hits[k] += hits_[kind][k];
      all_lived[k] += lived[kind][k];
    }
  }
  double seen = kScalePrior * together, expected = seen;
  for (int k = 0; k < kBins; ++k) {
    base[k] = 1 / (middle(k) + kNear);
    double prior = kCommonPrior * together * width(k);
    common[k] = (all_hits[k] + prior * base[k]) / (all_lived[k] + prior);
    seen += all_hits[k];
    expected += all_lived[k] * base[k];
  }
  double scale = seen / expected;
  expect_gaps(resident);
  std::array<Rates, kGaps> prior_of{common};
  for (int gap = 1; gap < kGaps; ++gap)
    for (int k = 0; k < kBins; ++k) prior_of[gap][k] = std::sqrt(of_gap_[gap][k] * common[k]);
  for (int kind = 0; kind < kKinds; ++kind) {
    bool is_seen = std::any_of(lived[kind].begin(), lived[kind].end(), [](double here) { return here > 0; });
    if (!is_seen && kind % kUses != 0) {
      worth_[kind] = worth_[kind - 1];
      continue;
    }
    double own = kFactorPrior * together, usual = own;
    for (int k = 0; k < kBins; ++k) {
      own += hits_[kind][k];
      usual += lived[kind][k] * (kind < kUses ? scale * base[k] : prior_of[kind / kUses][k]);
    }
    std::array<double, kBins> reused;  // of chunks that reach a bin, the share that is used in it
    for (int k = 0; k < kBins; ++k) {
      double prior = kKindPrior * together * width(k);
      double rate = (hits_[kind][k] + prior * prior_of[kind / kUses][k] * own / usual) / (lived[kind][k] + prior);
      reused[k] = rate * width(k) / (1 + rate * width(k));
    }
    rank(reused, kind);
  }
  for (Counts* counts : {&ends_, &hits_})
    for (auto& row : *counts)
      for (double& count : row) count *= kKept;
}

// worth_ of a bin is the best rate of hits for memory over all times to keep a chunk from that bin on. Goes from the
// last bin back. `after` holds the later bins, joined to stretches with falling rates: as long as the next stretch has
// a higher rate than the bin has so far, keeping the chunk through it too is better.
void ReuseModel::rank(const std::array<double, kBins>& reused, int kind) {
  struct Stretch {
    double gain, cost, left;  // of a chunk that reaches it
  };
  std::array<Stretch, kBins> after;
  int count = 0;
  for (int k = kBins - 1; k >= 0; --k) {
    Stretch best{reused[k], width(k) * (1 - reused[k] / 2), 1 - reused[k]};
    while (count > 0 && after[count - 1].gain * best.cost > best.gain * after[count - 1].cost) {
      const Stretch& next = after[--count];
      best = {best.gain + best.left * next.gain, best.cost + best.left * next.cost, best.left * next.left};
    }
    worth_[kind][k] = best.gain / best.cost;
    after[count++] = best;
  }
}

double ReuseModel::worth(uint8_t kind, uint64_t age) const {
  int bin = bin_of(age);
  double at = bin - 0.5 + (static_cast<double>(age) - low_[bin]) * bins_per_tick_[bin];  // from the middle of the first
  if (at <= 0) return worth_[kind][0];
  if (at >= kBins - 1) return worth_[kind][kBins - 1];
  int before = static_cast<int>(at);
  return worth_[kind][before] + (at - before) * (worth_[kind][before + 1] - worth_[kind][before]);
}

uint64_t ReuseModel::stretch_from(uint64_t age) const {
  int bin = bin_of(age);
  if (static_cast<double>(age) < middle(bin)) --bin;
  return bin < 0 ? 0 : static_cast<uint64_t>(std::ceil(middle(bin)));
}

}  // namespace kvdock
