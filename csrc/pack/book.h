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

// The sample of a plane: granules that are spread over it, the same for all planes of a size.
constexpr size_t kGranuleBytes = 128, kTileGranules = 32;
constexpr size_t kSample = 64;
constexpr size_t sampled_granules(size_t tiles) {
  return tiles < kSample / kTileGranules ? tiles * kTileGranules : kSample;
}
// The number, in the plane, of the sample's i-th granule: multiples of the golden ratio, without what is before the
// point, are as evenly spread as any numbers, and in step with neither heads nor channels nor blocks.
constexpr size_t sampled_granule(size_t tiles, size_t i) {
  const size_t granules = tiles * kTileGranules;
  return granules <= kSample ? i : size_t(uint64_t(uint32_t(i) * 0x9e3779b9u) * granules >> 32);
}

// Counts the exponents of a sample.
class ExponentCounts {
 public:
  void add(const char* granule);
  // The commonest first, of equally common ones the smaller first. If the sample has fewer than the book, then those
  // that are missing below the commonest, from there downwards, then those above it, upwards.
  Book book() const;

 private:
  // Four, so that an increment does not wait for the one before it.
  uint32_t counts_[4][256] = {};
};

// The book of a plane that lies in one piece.
Book learn_book(const char* plane, size_t tiles);

}  // namespace kvdock
