// A part whose tiles are packed: docs/understand/packing.md.
//
//   slot = header | for each plane its tiles, and what is left of it | spill entries
//   header = "KVP1", number of planes, number of spill entries in use | a book for each plane, padded to 64 bytes
//
// A tile that does not fit its size lies in its place as it is, as far as it goes, and ends in a spill entry. Where
// tiles and their sizes are depends on the shape alone.
//
// Thread safety: calls are independent. Invariant: whatever a slot's bytes are, nothing outside it is read, and nothing
//   outside the part written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pack/tile.h"

namespace kvdock {

// What a plane of a part is packed into.
struct PlaneShape {
  size_t raw_bytes;    // of the plane in the part, a multiple of 16
  size_t marks;        // is_reserve()
  size_t raw_at = 0;   // in the part
  size_t at = 0;       // of its first tile in the slot

  size_t tiles() const { return raw_bytes / kTileBytes; }
  size_t tile_bytes() const { return packed_tile_bytes(marks); }
  // A tile that spills has so many bytes in its place.
  size_t kept_bytes() const { return tile_bytes() - 16; }
  size_t rest_bytes() const { return raw_bytes % kTileBytes; }
  size_t packed_bytes() const { return tiles() * tile_bytes() + rest_bytes(); }
};

class PackedShape {
 public:
  // `spills`: how many tiles of a part may spill, at most kMostSpills. Throws Refused{copy}.
  PackedShape(std::vector<PlaneShape> planes, size_t spills);
  static constexpr size_t kMostSpills = 65535;

  const std::vector<PlaneShape>& planes() const { return planes_; }
  size_t spills() const { return spills_; }
  size_t header_bytes() const { return header_bytes_; }
  size_t spill_at(size_t entry) const { return spills_at_ + entry * spill_bytes_; }
  size_t raw_bytes() const { return raw_bytes_; }
  size_t packed_bytes() const { return spill_at(spills_); }

 private:
  std::vector<PlaneShape> planes_;
  size_t spills_, header_bytes_, spills_at_, spill_bytes_ = 0, raw_bytes_ = 0;
};

// Packs a part in canonical order into a slot of packed_bytes(). `books`: one for each plane. Returns how many tiles
// spilled, or -1 if they are too many: the part is to be stored as it is. Throws Refused{copy} for too few books.
long pack_part(const PackedShape& shape, std::span<const Book> books, const char* part, char* slot);
// False: the slot holds no packed part of this shape. What is in `part` then is of no use.
bool unpack_part(const PackedShape& shape, const char* slot, char* part);

}  // namespace kvdock
