#include "curve/distances.h"

#include "base/errors.h"

namespace kvdock {

namespace {

uint64_t sum(const std::vector<uint64_t>& of, size_t from, size_t to) {
  uint64_t bytes = 0;
  for (size_t i = from; i < to; ++i) bytes += of[i];
  return bytes;
}

}  // namespace

std::optional<uint64_t> Distances::use(uint64_t name, uint64_t bytes) {
  std::optional<uint64_t> since;
  if (uint32_t place = places_.find(name); place != Names::kAbsent) {
    go_near(place);
    since = total_ - near_before_;
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
  size_t block = place / kWide, span = block / kWide;
  return sum(spans_, 0, span) + sum(blocks_, span * kWide, block) + sum(bytes_, block * kWide, place);
}

void Distances::go_near(size_t place) {
  bool follows = place >= near_ && place - near_ < kWide;
  near_before_ = follows ? near_before_ + sum(bytes_, near_, place) : before(place);
  near_ = place;
}

void Distances::set(size_t place, uint64_t bytes) {
  uint64_t more = bytes - bytes_[place];  // modulo 2^64, as all sums are
  bytes_[place] = bytes;
  blocks_[place / kWide] += more;
  spans_[place / kWide / kWide] += more;
  total_ += more;
  if (place < near_) near_before_ += more;
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
  blocks_.assign(room / kWide, 0);
  spans_.assign(room / kWide / kWide, 0);
  total_ = near_before_ = next_ = near_ = 0;
  for (const Named& one : at) {
    if (one.bytes == 0) continue;
    places_.put(one.name, static_cast<uint32_t>(next_));
    set(next_++, one.bytes);
  }
}

void Distances::keep(KeptWriter& out) const {
  std::vector<uint64_t> names(bytes_.size());
  places_.for_each([&](uint64_t name, uint32_t place) { names[place] = name; });
  out.put(static_cast<uint32_t>(size()));
  for (size_t place = 0; place < bytes_.size(); ++place) {
    if (bytes_[place] == 0) continue;
    out.put(names[place]);
    out.put(bytes_[place]);
  }
}

void Distances::take_over(KeptReader& in) {
  uint32_t count = in.count(2 * sizeof(uint64_t));
  for (uint32_t i = 0; i < count; ++i) {
    auto name = in.number<uint64_t>(UINT64_MAX);
    auto bytes = in.number<uint64_t>(UINT64_MAX / count);
    require(bytes != 0 && !use(name, bytes), "a chunk is remembered twice, or without bytes", i);
  }
}

void Distances::check() const {
  uint64_t bytes = 0;
  size_t named = 0;
  for (size_t place = 0; place < bytes_.size(); ++place) {
    require(before(place) == bytes, "a sum of the bytes before a use is wrong", place);
    require(place != near_ || near_before_ == bytes, "the bytes before the last place asked about are wrong", place);
    bytes += bytes_[place];
    named += bytes_[place] != 0;
  }
  require(bytes == total_ && named == places_.size(), "the places of uses are not those of the chunks");
  places_.for_each([&](uint64_t, uint32_t place) {
    require(bytes_.at(place) != 0, "a chunk has a place without bytes", place);
  });
}

}  // namespace kvdock
