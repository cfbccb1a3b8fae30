// Packed parts on a GPU (docs/understand/packing.md): the shape as the kernels take it, and the memory that they share.
//
//   gather   learn books -> pack tiles -> store headers and the unused units of the pools: three kernels, in this order
//   scatter  unpack
//
// Small calls read or write the slots themselves. Of larger stores, the tiles and what is left of planes pass through
// staging, in pieces that may end within a part; headers and pools do not. Larger loads pass through staging by shares
// of parts: some planes of each part. A share ends with a stripe, so that it is hashed in whole stripes; the stripe
// that it has in common with the next share is staged twice. What is not in a share is read in the slot: its planes'
// books, in the header, and the marks that tiles have in the pool, at the part's end. Ownership: a Copier has one
// PackMemory; its copies take turns with it, since their kernels run on one stream.
#pragma once

#include <vector>

#include "cuda/memory.h"
#include "cuda/pack_args.h"
#include "pack/part.h"

namespace kvdock::cuda {

// The most that the packed parts of one batch may have together.
inline constexpr size_t kMostStripes = size_t(1) << 16, kMostHeaderBytes = size_t(1) << 20;

class DevicePacking {
 public:
  // Throws Refused{copy} for parts that are too large, Refused{cuda}.
  DevicePacking(Device& device, const PackedShape& shape, size_t blocks);

  const PackedShape& shape() const { return shape_; }
  size_t blocks() const { return blocks_; }                     // of each part
  uint32_t header_cells() const { return planes_[0].first_cell; }
  uint32_t pool_cell() const { return pool_cell_; }
  uint32_t cells() const { return cells_; }
  uint32_t tiles_unit() const { return planes_[0].slot_unit; }  // of the slot, where the planes begin
  uint32_t unit_of(uint32_t cell) const;  // where a cell of a plane begins in the slot, or the pool's first one does
  size_t tiles_bytes() const;                                   // of all planes
  size_t stripes_before(size_t plane) const;                    // that hold the planes before it; its number: all
  size_t staged_bytes(size_t first, size_t end) const;          // of planes [first, end) of a part
  // How many planes from `first` on, at most to `end`, take at most `room` bytes of staging; `first`: none does.
  size_t last_within(size_t first, size_t end, size_t room) const;
  uintptr_t planes() const { return on_device_.address(); }     // a TilePlane for each
  const std::vector<TilePlane>& host_planes() const { return planes_; }

 private:
  PackedShape shape_;
  size_t blocks_;
  std::vector<TilePlane> planes_;
  uint32_t pool_cell_ = 0, cells_ = 0;
  Buffer on_device_;
};

// Describes a part for a gather: its planes' cells, which the second kernel packs.
PackedPart describe_gather(const DevicePacking& packing, uintptr_t slot);
// Describes a part's share for a scatter: planes [first, end), the header with the first plane, the pool with the last.
PackedPart describe_share(const DevicePacking& packing, uintptr_t slot, size_t first, size_t end);

struct PackMemory {
  explicit PackMemory(Device& device);
  Buffer shares;   // kMostStripes StripeShares
  Buffer headers;  // kMostHeaderBytes
};

}  // namespace kvdock::cuda
