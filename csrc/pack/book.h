// The book of a plane: the exponents that its codes name, learnt from a sample of the plane
// (docs/understand/packing.md#books).
//
// Thread safety: calls are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvdock {

constexpr size_t kBookExponents = 22, kBookBytes = 24, kFirstCodes = 7;

// The exponents that codes name, and the code of each exponent.
struct Book {
  static constexpr uint8_t kFar = 255;
  uint8_t exponents[kBookBytes];  // the last two are zeros
  uint8_t ranks[256];             // the exponent's place in `exponents`, or kFar
};

// Throws Refused{copy} unless the exponents differ.
Book make_book(std::span<const uint8_t, kBookExponents> exponents);

// The sample: a few granules of each tile of a plane.
constexpr size_t kGranuleBytes = 128, kTileGranules = 32;
// How many granules of each tile of a plane of so many tiles are looked at.
constexpr size_t sampled_granules(size_t tiles) {
  constexpr size_t kEnough = 64;  // of a plane
  const size_t each = (kEnough + tiles - 1) / (tiles ? tiles : 1);
  return each < 2 ? 2 : each > kTileGranules ? kTileGranules : each;
}
// Which granule of a tile the sample's i-th of this tile is, i < sampled_granules().
constexpr size_t sampled_granule(size_t tile, size_t i) { return (5 * tile + 13 * i) % kTileGranules; }

// Counts the exponents of a sample.
class ExponentCounts {
 public:
  void add(const char* granule);
  // The commonest first, of equally common ones the smaller first.
  Book book() const;

 private:
  // Four, so that an increment does not wait for the one before it.
  uint32_t counts_[4][256] = {};
};

// The book of a plane that lies in one piece.
Book learn_book(const char* plane, size_t tiles);

}  // namespace kvdock
