// A part whose tiles are packed: docs/understand/packing.md.
//
//   slot = header | for each plane its tiles, and what is left of it | spill: a pool of units
//   header = "KVP1", number of planes, number of units in use | a book for each plane, padded to 64 bytes
//
// What does not fit a tile's size is in units of the spill. Where tiles are depends on the shape alone. A plane's book
// is learnt from a sample of the plane, so nothing but the part decides its bytes, except that threads may take units
// in any order.
//
// Thread safety: calls are independent. Several threads may put, or unpack, different tiles of one part. Invariant:
//   whatever a slot's bytes are, nothing outside it is read, and nothing outside the part written.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pack/book.h"
#include "pack/tile.h"

namespace kvdock {

// Where a plane of a part is packed.
struct PlaneShape {
  size_t raw_bytes;  // of the plane in the part, a multiple of 16
  size_t raw_at;     // in the part
  size_t at;         // of its first tile in the slot

  size_t tiles() const { return raw_bytes / kTileBytes; }
  size_t rest_bytes() const { return raw_bytes % kTileBytes; }
};

class PackedShape {
 public:
  // What suits the KV of the models measured (bench/LOG.md). Engines that share parts must have the same numbers.
  static constexpr size_t kMarks = 176;
  static constexpr size_t units_for(size_t tiles) { return std::clamp<size_t>(tiles, 40, kMostUnits); }
  static constexpr size_t kMostUnits = 65535;

  // `planes`: the bytes of each in the part. `marks`: is_reserve(). `units`: of the spill, at most kMostUnits. Throws
  // Refused{copy}.
  PackedShape(std::span<const size_t> planes, size_t marks, size_t units);

  const std::vector<PlaneShape>& planes() const { return planes_; }
  size_t marks() const { return marks_; }
  size_t units() const { return units_; }
  size_t tile_bytes() const { return packed_tile_bytes(marks_); }
  // A tile that is not packed has so many bytes in its place, and the others in raw_units().
  size_t kept_bytes() const { return tile_bytes() - 16; }
  size_t raw_units() const { return (kTileBytes - kept_bytes() + kUnitBytes - 1) / kUnitBytes; }
  size_t header_bytes() const { return header_bytes_; }
  size_t tile_at(size_t plane, size_t tile) const { return planes_[plane].at + tile * tile_bytes(); }
  size_t rest_at(size_t plane) const { return tile_at(plane, planes_[plane].tiles()); }
  size_t unit_at(size_t unit) const { return units_at_ + unit * kUnitBytes; }
  size_t raw_bytes() const { return raw_bytes_; }
  size_t packed_bytes() const { return unit_at(units_); }

 private:
  std::vector<PlaneShape> planes_;
  size_t marks_, units_, header_bytes_, units_at_, raw_bytes_ = 0;
};

// Packs a part into a slot of packed_bytes(), tile by tile, from wherever the tiles are.
class PackedWriter {
 public:
  // Clears the header: until finish() the slot is no packed part.
  PackedWriter(const PackedShape& shape, char* slot);
  void put_book(size_t plane, const Book& book);
  // False: there are not enough units, so the part is to be stored as it is.
  bool put_tile(size_t plane, size_t tile, const Book& book, const char* from);
  void put_rest(size_t plane, const char* from);
  // Once, after all tiles and books. Returns how many units are in use; -1: more than there are.
  long finish();

 private:
  const PackedShape& shape_;
  char* const slot_;
  std::atomic<size_t> used_{0};
};

// Whether the slot has a header of such a part. Ask before unpack_tile().
bool is_packed_part(const PackedShape& shape, const char* slot);
// False: the tile's units are beyond the shape, and nothing was written.
bool unpack_tile(const PackedShape& shape, const char* slot, size_t plane, size_t tile, char* to);

// A part in canonical order, in one piece. Learns the books. Returns how many units are in use; -1: more than there
// are, and the part is to be stored as it is.
long pack_part(const PackedShape& shape, const char* part, char* slot);
// The same with other books: one for each plane, or it throws Refused{copy}.
long pack_part(const PackedShape& shape, std::span<const Book> books, const char* part, char* slot);
// False: the slot holds no packed part of this shape. What is in `part` then is of no use.
bool unpack_part(const PackedShape& shape, const char* slot, char* part);

}  // namespace kvdock
