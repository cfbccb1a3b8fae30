// Packed parts on a GPU (docs/understand/packing.md): the shape as the kernels take it, and the memory that they share.
//
//   gather   learn books -> pack tiles -> store headers and the unused units of the pools: three kernels, in this order
//   scatter  unpack
//
// Stores write the slots themselves. Larger loads pass through staging, whole parts at a time: a tile may have marks in
// the pool, at its part's end, and has its book in the header. Ownership: a Copier has one PackMemory; its copies take
// turns with it, since their kernels run on one stream.
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
  size_t stripes() const;
  size_t staged_bytes() const;                                  // of a part in staging
  uintptr_t planes() const { return on_device_.address(); }     // a TilePlane for each

 private:
  PackedShape shape_;
  size_t blocks_;
  std::vector<TilePlane> planes_;
  uint32_t pool_cell_ = 0, cells_ = 0;
  Buffer on_device_;
};

// Describes a part: for a gather its planes' cells, which the second kernel packs; for a scatter all cells.
PackedPart describe_packed(const DevicePacking& packing, uintptr_t slot, bool gathers);

struct PackMemory {
  explicit PackMemory(Device& device);
  Buffer shares;   // kMostStripes StripeShares
  Buffer headers;  // kMostHeaderBytes
};

}  // namespace kvdock::cuda
