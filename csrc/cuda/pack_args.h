// The arguments of the packing kernels: plain data, with the same layout in the host's compiler and in nvcc.
//
// A packed part is a row of cells in the order of its slot (docs/understand/packing.md): of the header, of each plane
// its tiles and what is left of it, of the pool. A launch works on cells [first_cell, last_cell) of the row of all
// parts. A cell has at most 4096 bytes. Sizes are in units of 16 bytes.
#pragma once

#include <cstdint>

#include "cuda/kernel_args.h"

namespace kvdock::cuda {

inline constexpr uint32_t kTileUnits = 256;        // of a tile that is not packed
inline constexpr uint32_t kMostTileUnits = 192;    // of a packed one
inline constexpr uint32_t kBookStart = 16;         // of the first book, in a header
inline constexpr uint32_t kPartMagic = 0x3150564b;  // "KVP1"

// A plane of a part of some length.
struct TilePlane {
  uint32_t first_cell;  // in the part
  uint32_t tiles;
  uint32_t slot_unit;  // of its first tile
  uint32_t rest_units;
};

struct PackedPart {
  uint64_t slot;
  uint64_t planes;      // the device address of its TilePlanes
  uint32_t first_cell;  // of the share, in the row of all parts
  uint32_t cells;       // of the share, which begins at the part's cell `begin`
  uint32_t begin;
  uint32_t pool_cell, pool_unit, pool;  // where the pool begins, and how many units of 32 bytes it has
  uint32_t units;                       // of 16 bytes, of the slot
  uint32_t first_stripe;                // of the part, among those of the batch
  uint32_t first_id;
  uint32_t blocks;
  uint32_t skip_blocks;
  // Of a share, in units of the slot: it is staged from the stripe that holds its first unit; it is hashed from the end
  // of what the share before hashed; its last cell, unless that is empty, is the rest of a stripe, of which the next
  // share stores the blocks; and all that ends.
  uint32_t stage_unit, hash_unit, tail_unit, end_unit;
  uint32_t unused;
};

// What several warps have of a stripe. All zero outside of a batch.
struct StripeShare {
  unsigned long long a, b;
  uint32_t units;
  uint32_t unused;
};

struct PackArgs {
  const PlaneArgs* planes;
  const PackedPart* parts;
  const int32_t* ids;
  unsigned long long* sums;       // three for each part: as in CopyArgs, and its state
  const uint32_t* nh_keys;        // as in CopyArgs, with what follows
  const uint64_t* level2;
  unsigned int* finished_blocks;
  unsigned long long* report;
  StripeShare* shares;     // one for each stripe of the batch
  unsigned char* headers;  // gather: the headers of all parts, until they are stored
  uint64_t stage;          // where the share of slot first_part is in staging; 0: slots are read in their place
  uint64_t stage_bytes;    // from one share to the next in staging
  uint32_t num_planes;
  uint32_t first_cell, last_cell;
  uint32_t first_part, last_part;  // the parts of those cells, the last one included
  uint32_t num_parts;
  uint32_t tile_units, marks;
  uint32_t header_units;
  uint32_t unused;
};
// A part's state after a gather: how many units of the pool it needs. After a scatter: not zero if the slot holds
// no packed part of this shape.

static_assert(sizeof(TilePlane) == 16 && sizeof(PackedPart) == 80 && sizeof(StripeShare) == 24);
static_assert(sizeof(PackArgs) == 136);

inline constexpr uint32_t kMarked = 8, kMarkedBytes = 2176;  // a byte for each mark of a tile, and some more
// Of the packing kernels. Shared memory: a thread block's tables and checksum keys, and what each warp works on.
inline constexpr uint32_t kMostPackThreads = 768, kMostUnpackThreads = 512;  // with more, registers spill
inline constexpr uint32_t kPackSharedBytes = kMostPackThreads / 32 * 1024 + 4 * kChecksumStripeBytes + 3 * 1024;
inline constexpr uint32_t kPackWarpBytes = kMostTileUnits * kUnitBytes + kMarkedBytes;

}  // namespace kvdock::cuda
