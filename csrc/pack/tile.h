// Packs tiles of bf16 KV without loss, into a size that does not depend on their content: docs/understand/packing.md.
//
//   element = sign, exponent (8 bits), mantissa (7 bits)
//   packed tile: sign and mantissa of each element in one byte
//     | three bit planes of first codes: 0..6 name an exponent of the book, 7 marks the element
//     | a nibble for each mark, in their order: 0..14 name a further exponent of the book, 15 says far
//     | a spare byte for each far element, in their order: its exponent
//     | how many units of the part's pool have the nibbles of further marks, and the first of them
//
// Thread safety: all functions. Invariants: all paths give the same bytes. Nothing outside the tile and its units is
//   read or written, whatever their bytes are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pack/book.h"

namespace kvdock {

constexpr size_t kTileElements = 2048, kTileBytes = 2 * kTileElements;
constexpr size_t kCodePlaneBytes = kTileElements / 8;
constexpr size_t kCodesAt = kTileElements, kNibblesAt = kCodesAt + 3 * kCodePlaneBytes;
constexpr size_t kSpares = 5;
constexpr size_t kMostMarks = 496;  // of the reserve
// A unit of the pool has the nibbles of so many marks.
constexpr size_t kUnitMarks = 64, kUnitBytes = kUnitMarks / 2;
constexpr uint8_t kMostUnits = kTileElements / kUnitMarks, kRawTile = 255;

// The end of a packed tile.
struct Trailer {
  uint8_t spares[kSpares];
  uint8_t units;   // at most kMostUnits; kRawTile: the tile is not packed
  uint16_t first;  // of the units
};
static_assert(sizeof(Trailer) == 8);

// `marks`: how many elements of a tile may be marked without a unit; 16 more than a multiple of 32, at most kMostMarks,
// so that tiles are multiples of 16 bytes.
constexpr bool is_reserve(size_t marks) { return marks % 32 == 16 && marks <= kMostMarks; }
constexpr size_t packed_tile_bytes(size_t marks) { return kNibblesAt + marks / 2 + sizeof(Trailer); }

struct TilePath {
  const char* name;
  // Packs kTileBytes at `from`. Returns how many units the tile needs, and writes them at `more`, where there are
  // kMostUnits of them; the trailer says 0. kRawTile: too many exponents are far, and what is at `to` is of no use.
  uint8_t (*pack)(const char* from, const Book& book, size_t marks, char* to, char* more);
  // `exponents`: of the book, kBookBytes of them. `units`, at most kMostUnits, at `more`; the trailer's are ignored. A
  // mark beyond them, or a far element beyond the spares, gets exponent 0.
  void (*unpack)(const char* from, const uint8_t* exponents, size_t marks, const char* more, size_t units, char* to);
};

// Starts to read bytes that are packed or unpacked next, from memory: processors foresee little beyond a page. They may
// lie beyond the end of everything.
inline void foresee(const char* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// The fastest path that this processor has, or the one chosen by use_tile_path().
const TilePath& tile_path();
std::vector<std::string> tile_paths();  // fastest first; the last, "scalar", runs anywhere
bool use_tile_path(const std::string& name);

}  // namespace kvdock
