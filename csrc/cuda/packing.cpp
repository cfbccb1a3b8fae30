#include "cuda/packing.h"

#include <algorithm>

#include "base/errors.h"
#include "copy/checksum.h"

namespace kvdock::cuda {

namespace {

static_assert(kTileUnits * kUnitBytes == kTileBytes && kMarked + kTileElements < kMarkedBytes);
static_assert(kMostTileUnits * kUnitBytes == packed_tile_bytes(kMostMarks));

constexpr uint32_t units(size_t bytes) { return uint32_t(bytes / kUnitBytes); }
constexpr uint32_t cells_of(size_t bytes) { return uint32_t((bytes + kTileBytes - 1) / kTileBytes); }

std::vector<TilePlane> describe_planes(const PackedShape& shape) {
  std::vector<TilePlane> all;
  uint32_t cell = cells_of(shape.header_bytes());
  for (const PlaneShape& plane : shape.planes()) {
    all.push_back({cell, uint32_t(plane.tiles()), units(plane.at), units(plane.rest_bytes())});
    cell += uint32_t(plane.tiles()) + (plane.rest_bytes() != 0);
  }
  return all;
}

const PackedShape& checked(const PackedShape& shape) {
  if (stripes_of(shape.packed_bytes()) > kMostStripes)
    refuse(Refusal::copy, "bytes of a packed part", shape.packed_bytes(), "at most 256 MiB");
  if (shape.header_bytes() > kMostHeaderBytes)
    refuse(Refusal::copy, "planes of a packed part", shape.planes().size(), "at most 43690");
  return shape;
}

}  // namespace

DevicePacking::DevicePacking(Device& device, const PackedShape& shape, size_t blocks)
    : shape_(checked(shape)),
      blocks_(blocks),
      planes_(describe_planes(shape)),
      on_device_(device, planes_.size() * sizeof(TilePlane), MemoryKind::device) {
  const TilePlane& last = planes_.back();
  pool_cell_ = last.first_cell + last.tiles + (last.rest_units != 0);
  cells_ = pool_cell_ + cells_of(shape.packed_bytes() - shape.unit_at(0));
  upload_now(device, on_device_.address(), planes_.data(), planes_.size() * sizeof(TilePlane));
}

uint32_t DevicePacking::unit_of(uint32_t cell) const {
  if (cell >= pool_cell_) return units(shape_.unit_at(0));
  const auto behind = std::upper_bound(planes_.begin(), planes_.end(), cell,
                                       [](uint32_t at, const TilePlane& plane) { return at < plane.first_cell; });
  const TilePlane& plane = *(behind - 1);
  return plane.slot_unit + (cell - plane.first_cell) * units(shape_.tile_bytes());
}

size_t DevicePacking::tiles_bytes() const { return size_t(unit_of(pool_cell_) - tiles_unit()) * kUnitBytes; }

size_t DevicePacking::stripes_before(size_t plane) const {
  return stripes_of(plane == planes_.size() ? shape_.packed_bytes() : size_t(planes_[plane].slot_unit) * kUnitBytes);
}

size_t DevicePacking::staged_bytes(size_t first, size_t end) const {
  const size_t begin = first == 0 ? 0 : planes_[first].slot_unit / kStripeUnits;
  return (stripes_before(end) - begin) * kChecksumStripeBytes;
}

size_t DevicePacking::last_within(size_t first, size_t end, size_t room) const {
  while (end > first && staged_bytes(first, end) > room) --end;
  return end;
}

namespace {

PackedPart described(const DevicePacking& packing, uintptr_t slot) {
  PackedPart part{};
  part.slot = slot;
  part.planes = packing.planes();
  part.pool_cell = packing.pool_cell();
  part.pool_unit = units(packing.shape().unit_at(0));
  part.pool = uint32_t(packing.shape().units());
  part.units = part.tail_unit = part.end_unit = units(packing.shape().packed_bytes());
  part.blocks = uint32_t(packing.blocks());
  return part;
}

}  // namespace

PackedPart describe_gather(const DevicePacking& packing, uintptr_t slot) {
  PackedPart part = described(packing, slot);
  part.stage_unit = packing.tiles_unit();
  part.begin = packing.header_cells();
  part.cells = packing.pool_cell() - part.begin;
  return part;
}

PackedPart describe_share(const DevicePacking& packing, uintptr_t slot, size_t first, size_t end) {
  PackedPart part = described(packing, slot);
  const std::vector<TilePlane>& planes = packing.host_planes();
  const bool is_last = end == planes.size();
  if (first > 0) {
    part.begin = planes[first].first_cell;
    part.stage_unit = planes[first].slot_unit / kStripeUnits * kStripeUnits;
    part.hash_unit = uint32_t(std::min(packing.stripes_before(first) * kStripeUnits, size_t(part.units)));
  }
  if (!is_last) {
    part.end_unit = uint32_t(std::min(packing.stripes_before(end) * kStripeUnits, size_t(part.units)));
    part.tail_unit = std::min(std::max(planes[end].slot_unit, part.hash_unit), part.end_unit);
  }
  part.cells = (is_last ? packing.cells() : planes[end].first_cell) - part.begin + (part.tail_unit < part.end_unit);
  return part;
}

PackMemory::PackMemory(Device& device)
    : shares(device, kMostStripes * sizeof(StripeShare), MemoryKind::device),
      headers(device, kMostHeaderBytes, MemoryKind::device) {
  const ContextGuard cu(device);
  const OwnedStream stream = make_stream(device);
  check(cu->cuMemsetD8Async(shares.address(), 0, shares.bytes(), stream.get()), "clearing memory for packing");
  check(cu->cuStreamSynchronize(stream.get()), "clearing memory for packing");
}

}  // namespace kvdock::cuda
