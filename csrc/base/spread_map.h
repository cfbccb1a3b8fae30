// A map from names to values that becomes large while calls wait. It is spread over many small maps, so that the call
// at which one of them grows moves a few values, and not all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "base/seeded_hash.h"

namespace kvdock {

// Names are hashes of a kind that no caller can choose.
template <class Value>
class SpreadMap {
 public:
  // nullptr: there is none. Good until the name is erased.
  const Value* find(uint64_t name) const {
    const auto& map = maps_[place(name)];
    auto at = map.find(name);
    return at == map.end() ? nullptr : &at->second;
  }
  Value* find(uint64_t name) { return const_cast<Value*>(std::as_const(*this).find(name)); }
  void put(uint64_t name, const Value& value) { maps_[place(name)][name] = value; }
  void erase(uint64_t name) { maps_[place(name)].erase(name); }

 private:
  static constexpr int kBits = 6;
  static size_t place(uint64_t name) { return name >> (64 - kBits); }

  std::array<std::unordered_map<uint64_t, Value, SeededHash>, 1 << kBits> maps_;
};

}  // namespace kvdock
