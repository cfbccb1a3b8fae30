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
  uint32_t counts[256];
  for (size_t i = 0; i < 256; ++i) counts[i] = counts_[0][i] + counts_[1][i] + counts_[2][i] + counts_[3][i];
  uint64_t keys[256];
  size_t seen = 0;
  for (size_t i = 0; i < 256; ++i)
    if (counts[i] != 0) keys[seen++] = uint64_t(counts[i]) << 8 | (255 - i);
  const size_t learnt = std::min(seen, kBookExponents);
  std::partial_sort(keys, keys + learnt, keys + seen, std::greater<>());
  uint8_t exponents[kBookExponents];
  bool is_in[256] = {};
  size_t size = 0;
  const auto put = [&](size_t exponent) {
    if (size == kBookExponents || is_in[exponent]) return;
    is_in[exponent] = true;
    exponents[size++] = uint8_t(exponent);
  };
  for (size_t i = 0; i < learnt; ++i) put(255 - (keys[i] & 0xff));
  const size_t commonest = learnt != 0 ? exponents[0] : 0;
  for (size_t i = commonest; i-- > 0;) put(i);
  for (size_t i = commonest; i < 256; ++i) put(i);
  return make_book(exponents);
}

Book learn_book(const char* plane, size_t tiles) {
  constexpr size_t kAhead = 8;
  const size_t granules = sampled_granules(tiles);
  const auto granule = [&](size_t i) { return plane + sampled_granule(tiles, i) * kGranuleBytes; };
  ExponentCounts counts;
  for (size_t i = 0; i < granules + kAhead; ++i) {
    if (i < granules) foresee(granule(i), kGranuleBytes);
    if (i >= kAhead) counts.add(granule(i - kAhead));
  }
  return counts.book();
}

}  // namespace kvdock
