// A PagedLayout whose blocks are in a GPU's memory, with its description for the kernels.
#pragma once

#include <memory>
#include <optional>

#include "copy/copy.h"
#include "cuda/device.h"
#include "cuda/memory.h"
#include "cuda/packing.h"

namespace kvdock::cuda {

// How the parts of a layout are packed: PackedShape has the words.
struct Packed {
  size_t marks, units;
};

struct DeviceLayout {
  // Waits for the GPU. Throws Refused{cuda} when a plane is not in the device's memory, Refused{copy} when a block is
  // too long or the CPU has no checksum keys for parts of `most_blocks` blocks.
  DeviceLayout(Device& device, const PagedLayout& layout, size_t most_blocks, const std::optional<Packed>& pack);

  PagedLayout layout;
  size_t part_blocks;  // how many blocks the longest part of a copy may have
  bool alike, wide;    // alike: all planes have the same runs; wide: every run is a multiple of 128 bytes
  Buffer planes;       // a PlaneArgs for each plane
  std::unique_ptr<const DevicePacking> packing;  // null: parts are stored as they are. Else all have part_blocks blocks
};

}  // namespace kvdock::cuda
