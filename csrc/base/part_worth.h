// Which parts the tier on disk evicts first: those that were not used for longest, as in LRU, but parts of some kinds
// age faster than others. A part's kind is how often it was used. How fast each kind ages is learned: of the parts that
// are about as old as those that are evicted, each kind should bring as many uses for the space that it takes. A kind
// that brings fewer ages faster.
//
// Ages are counted in parts that were asked for. Old observations fade. Thread safety: none.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvdock {

class PartWorth {
 public:
  static constexpr unsigned kMostUses = 3;  // parts that were used more often are of the same kind

  // The age, as that of a part of a kind that ages as fast as the clock.
  double age_of(unsigned uses, uint64_t age) const { return double(age) * speed_[uses]; }

  // Parts beyond this age are evicted.
  double bar() const { return bar_; }
  void set_bar(double age) { bar_ = age; }

  // A part was used that the tier has, or has evicted. `uses`, `age`: before this use.
  void used(unsigned uses, uint64_t age) {
    if (is_near_bar(uses, age)) ++hits_[uses];
  }

  // So many parts of this kind and age, those evicted included, were there for so long.
  void passed(unsigned uses, uint64_t age, double parts, double time) {
    if (is_near_bar(uses, age)) times_[uses] += parts * time;
  }

  // Sets how fast the kinds age, from what was seen since.
  void learn() {
    double hits = 0, times = 0;
    for (unsigned kind = 0; kind < kKinds; ++kind) hits += hits_[kind], times += times_[kind];
    if (times <= 0) return;
    for (unsigned kind = 0; kind < kKinds; ++kind) {
      const double expected = hits / times * times_[kind];
      const double share = (expected + kGuess) / (hits_[kind] + kGuess);
      speed_[kind] = std::clamp(speed_[kind] * std::pow(share, kStep), 1 / kMostSpeed, kMostSpeed);
      hits_[kind] *= kFade, times_[kind] *= kFade;
    }
  }

 private:
  static constexpr unsigned kKinds = kMostUses + 1;
  static constexpr double kNear = 0.5, kFar = 1.5;  // the ages from which it learns, as shares of the bar
  static constexpr double kGuess = 50;  // uses; until a kind has more of them, it is taken to be like the others
  static constexpr double kStep = 0.05, kFade = 0.97, kMostSpeed = 4;

  bool is_near_bar(unsigned uses, uint64_t age) const {
    const double found = age_of(uses, age);
    return found >= kNear * bar_ && found < kFar * bar_;
  }

  double bar_ = std::numeric_limits<double>::infinity();
  std::array<double, kKinds> speed_{1, 1, 1, 1}, hits_{}, times_{};
};

}  // namespace kvdock
