#include "cuda/device_layout.h"

#include <algorithm>

#include "base/errors.h"
#include "copy/checksum.h"
#include "cuda/kernel_args.h"

namespace kvdock::cuda {

namespace {

constexpr size_t kWideBytes = 128;  // a granule: see kernels.cu

bool all_alike(const std::vector<Plane>& planes) {
  return std::all_of(planes.begin(), planes.end(), [&](const Plane& plane) {
    return plane.run_bytes == planes[0].run_bytes && plane.run_count == planes[0].run_count;
  });
}

bool all_wide(const std::vector<Plane>& planes) {
  return std::all_of(planes.begin(), planes.end(),
                     [](const Plane& plane) { return plane.run_bytes % kWideBytes == 0; });
}

size_t extent_bytes(const PagedLayout& layout, const Plane& plane) {
  return (layout.num_blocks() - 1) * plane.block_stride + (plane.run_count - 1) * plane.run_stride + plane.run_bytes;
}

std::vector<PlaneArgs> describe_planes(const PagedLayout& layout) {
  std::vector<PlaneArgs> all;
  for (size_t i = 0; i < layout.planes().size(); ++i) {
    const Plane& plane = layout.planes()[i];
    PlaneArgs args{};
    args.base = plane.base;
    args.block_stride = plane.block_stride;
    args.run_stride = plane.run_stride;
    args.before_units = uint32_t(layout.bytes_before(i) / kUnitBytes);
    args.block_units = uint32_t(plane.block_bytes() / kUnitBytes);
    args.run_units = uint32_t(plane.run_bytes / kUnitBytes);
    args.by_block = divisor(args.block_units);
    args.by_run = divisor(args.run_units);
    all.push_back(args);
  }
  return all;
}

}  // namespace

DeviceLayout::DeviceLayout(Device& device, const PagedLayout& paged, size_t most_blocks,
                           const std::optional<Packed>& pack)
    : layout(paged),
      part_blocks(most_blocks),
      alike(all_alike(paged.planes())),
      wide(all_wide(paged.planes())),
      planes(device, paged.planes().size() * sizeof(PlaneArgs), MemoryKind::device) {
  if (paged.block_bytes() >= kMostPartBytes)
    refuse(Refusal::copy, "block bytes", paged.block_bytes(), "less than 32 GiB");
  for (const Plane& plane : paged.planes()) require_on_device(device, plane.base, extent_bytes(paged, plane));
  device.grow_keys(stripes_of(std::min(most_blocks * paged.block_bytes(), kMostPartBytes)));
  const auto described = describe_planes(paged);
  upload_now(device, planes.address(), described.data(), planes.bytes());
  if (!pack) return;
  std::vector<size_t> bytes;
  for (const Plane& plane : paged.planes()) bytes.push_back(plane.block_bytes() * most_blocks);
  const PackedShape shape(bytes, pack->marks, pack->units);
  device.grow_keys(stripes_of(shape.packed_bytes()));
  packing = std::make_unique<DevicePacking>(device, shape, most_blocks);
}

}  // namespace kvdock::cuda
