// Packs tiles of bf16 KV without loss, into a size that does not depend on their content: docs/understand/packing.md.
//
//   element = sign, exponent (8 bits), mantissa (7 bits)
//   packed tile: sign and mantissa of each element in one byte
//     | three bit planes of first codes: 0..6 name an exponent of the book, 7 marks the element
//     | a nibble for each mark, in their order: 0..14 name a further exponent of the book, 15 says far
//     | a spare byte for each far element, in their order: its exponent
//     | the spill number: 0, or 1 + the number of the spill entry that holds the end of a tile that did not fit
//
// Thread safety: all functions. Invariants: all paths give the same bytes. Nothing outside the tile is read or written,
//   whatever its bytes are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvdock {

constexpr size_t kTileElements = 2048, kTileBytes = 2 * kTileElements;
constexpr size_t kBookExponents = 22, kBookBytes = 24, kFirstCodes = 7;
constexpr size_t kSpares = 6;
constexpr size_t kTrailerBytes = kSpares + sizeof(uint16_t);
constexpr size_t kCodePlaneBytes = kTileElements / 8;
constexpr size_t kCodesAt = kTileElements, kNibblesAt = kCodesAt + 3 * kCodePlaneBytes;
constexpr size_t kMostMarks = 496;

// `marks`: how many elements of a tile may be marked; 16 more than a multiple of 32, at most kMostMarks, so that tiles
// are multiples of 16 bytes.
constexpr bool is_reserve(size_t marks) { return marks % 32 == 16 && marks <= kMostMarks; }
constexpr size_t packed_tile_bytes(size_t marks) { return kNibblesAt + marks / 2 + kTrailerBytes; }

// The exponents that codes name, and the code of each exponent.
struct Book {
  static constexpr uint8_t kFar = 255;
  uint8_t exponents[kBookBytes];  // the last two are zeros
  uint8_t ranks[256];                     // the exponent's place in `exponents`, or kFar
};

// Throws Refused{copy} unless the exponents differ.
Book make_book(std::span<const uint8_t, kBookExponents> exponents);
// The book for elements with these counts of exponents: the commonest first, of equally common ones the smaller first.
Book learn_book(std::span<const uint64_t, 256> counts);
// Adds the exponents of one tile.
void count_exponents(const char* tile, std::span<uint64_t, 256> counts);

struct TilePath {
  const char* name;
  // Packs kTileBytes at `from`. False: the tile does not fit, and what is at `to` is of no use. The spill number is 0.
  bool (*pack)(const char* from, const Book& book, size_t marks, char* to);
  // `exponents`: of the book, kBookBytes of them. Whatever the spill number is. A mark beyond the reserve, or a far
  // element beyond the spares, gets exponent 0.
  void (*unpack)(const char* from, const uint8_t* exponents, size_t marks, char* to);
};

// The fastest path that this processor has, or the one chosen by use_tile_path().
const TilePath& tile_path();
std::vector<std::string> tile_paths();  // fastest first; the last, "scalar", runs anywhere
bool use_tile_path(const std::string& name);

}  // namespace kvdock
