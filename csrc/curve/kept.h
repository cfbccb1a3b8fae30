// What a curve keeps for the next server of its pool: numbers, one after the other, in this machine's byte order.
//
// The reader trusts nothing: whoever takes a number out says what it may be.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/errors.h"

namespace kvdock {

class KeptWriter {
 public:
  template <class T>
  void put(T number) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  void reserve(size_t bytes) { bytes_.reserve(bytes); }  // so many come
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class KeptReader {
 public:
  explicit KeptReader(std::string_view bytes) : left_(bytes) {}

  // Each of these functions throws TableError corrupt if too few bytes are left. This one throws it also if the number
  // is above `most`.
  template <class T>
  T number(T most) {
    T found = next<T>();
    require(found <= most, "a number that a curve has kept is out of range", at());
    return found;
  }
  // A sum of estimates: finite and not negative.
  double sum() {
    double found = next<double>();
    require(std::isfinite(found) && found >= 0, "a sum that a curve has kept is out of range", at());
    return found;
  }
  double share() {
    double found = next<double>();
    require(found > 0 && found <= 1, "a share that a curve has kept is out of range", at());
    return found;
  }
  // How many items of `bytes_each`, at least, follow.
  uint32_t count(size_t bytes_each) {
    auto found = next<uint32_t>();
    require(found <= left_.size() / bytes_each, "a kept curve is shorter than it says", at());
    return found;
  }
  void end() const { require(left_.empty(), "a kept curve is longer than it says", at()); }

 private:
  template <class T>
  T next() {
    require(left_.size() >= sizeof(T), "a kept curve is shorter than it says", at());
    T found;
    std::memcpy(&found, left_.data(), sizeof found);
    left_.remove_prefix(sizeof found);
    return found;
  }
  int64_t at() const { return static_cast<int64_t>(left_.size()); }  // from the end

  std::string_view left_;
};

}  // namespace kvdock
