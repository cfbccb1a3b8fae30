#include "pack/book.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/errors.h"
#include "pack/tile.h"

namespace kvdock {

Book make_book(std::span<const uint8_t, kBookExponents> exponents) {
  Book book{};
  std::memset(book.ranks, Book::kFar, sizeof book.ranks);
  for (size_t i = 0; i < kBookExponents; ++i) {
    uint8_t& rank = book.ranks[exponents[i]];
    if (rank != Book::kFar) refuse(Refusal::copy, "exponents of a book", int(exponents[i]), "each of them once");
    rank = uint8_t(i);
    book.exponents[i] = exponents[i];
  }
  return book;
}

void ExponentCounts::add(const char* granule) {
  for (size_t i = 0; i < kGranuleBytes; i += sizeof(uint64_t)) {
    uint64_t four;
    std::memcpy(&four, granule + i, sizeof four);
    for (size_t j = 0; j < 4; ++j) ++counts_[j][four >> (16 * j + 7) & 0xff];
  }
}

Book ExponentCounts::book() const {
  uint64_t keys[256];
  for (size_t i = 0; i < 256; ++i)
    keys[i] = uint64_t(counts_[0][i] + counts_[1][i] + counts_[2][i] + counts_[3][i]) << 8 | (255 - i);
  std::partial_sort(keys, keys + kBookExponents, keys + 256, std::greater<>());
  uint8_t exponents[kBookExponents];
  for (size_t i = 0; i < kBookExponents; ++i) exponents[i] = uint8_t(255 - (keys[i] & 0xff));
  return make_book(exponents);
}

Book learn_book(const char* plane, size_t tiles) {
  ExponentCounts counts;
  for (size_t tile = 0, granules = sampled_granules(tiles); tile < tiles; ++tile)
    for (size_t i = 0; i < granules; ++i)
      counts.add(plane + tile * kTileBytes + sampled_granule(tile, i) * kGranuleBytes);
  return counts.book();
}

}  // namespace kvdock
