#include "curve/distances.h"

#include "base/errors.h"

namespace kvdock {

namespace {

size_t lowest_bit(size_t n) { return n & (~n + 1); }

}  // namespace

std::optional<uint64_t> Distances::use(uint64_t name, uint64_t bytes) {
  std::optional<uint64_t> since;
  if (uint32_t place = places_.find(name); place != Names::kAbsent) {
    since = total_ - before(place);
    set(place, 0);
  }
  if (next_ == bytes_.size()) {
    if (since) places_.drop(name);  // its place is empty
    close_up();
  }
  set(next_, bytes);
  places_.put(name, static_cast<uint32_t>(next_++));
  return since;
}

void Distances::drop(uint64_t name) {
  uint32_t place = places_.find(name);
  if (place == Names::kAbsent) return;
  set(place, 0);
  places_.drop(name);
}

uint64_t Distances::before(size_t place) const {
  uint64_t sum = 0;
  for (size_t i = place; i > 0; i -= lowest_bit(i)) sum += tree_[i];
  return sum;
}

void Distances::set(size_t place, uint64_t bytes) {
  uint64_t more = bytes - bytes_[place];  // modulo 2^64, as all sums are
  bytes_[place] = bytes;
  total_ += more;
  for (size_t i = place + 1; i < tree_.size(); i += lowest_bit(i)) tree_[i] += more;
}

void Distances::close_up() {
  struct Named {
    uint64_t name = 0, bytes = 0;
  };
  std::vector<Named> at(bytes_.size());
  places_.for_each([&](uint64_t name, uint32_t place) { at[place] = {name, bytes_[place]}; });
  size_t room = kLeast;
  while (room < 2 * places_.size()) room *= 2;
  bytes_.assign(room, 0);
  tree_.assign(room + 1, 0);
  next_ = 0;
  for (const Named& one : at) {
    if (one.bytes == 0) continue;
    places_.put(one.name, static_cast<uint32_t>(next_));
    bytes_[next_++] = one.bytes;
  }
  for (size_t i = 1; i <= room; ++i) {
    tree_[i] += bytes_[i - 1];
    if (size_t above = i + lowest_bit(i); above <= room) tree_[above] += tree_[i];
  }
}

void Distances::check() const {
  uint64_t sum = 0;
  size_t named = 0;
  for (size_t place = 0; place < bytes_.size(); ++place) {
    require(before(place) == sum, "a sum of the bytes behind a use is wrong", place);
    sum += bytes_[place];
    named += bytes_[place] != 0;
  }
  require(sum == total_ && named == places_.size(), "the places of uses are not those of the chunks");
  places_.for_each([&](uint64_t, uint32_t place) {
    require(bytes_.at(place) != 0, "a chunk has a place without bytes", place);
  });
}

}  // namespace kvdock
