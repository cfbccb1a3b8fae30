// How much one call may do, so that no other call waits long: what is left over is done by the next one.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvdock {

class Work {
 public:
  explicit Work(uint64_t most) : left_(most) {}
  bool is_over() const { return left_ == 0; }
  void spend(uint64_t units) { left_ -= std::min(left_, units); }

 private:
  uint64_t left_;  // in units of about 10 ns
};

// What ends and changes cost, by measurement.
constexpr uint64_t kEndGrant = 8, kDropPin = 1, kAbortChunk = 32, kChangeState = 64, kEndPreference = 8, kSeeChunk = 5;

}  // namespace kvdock
