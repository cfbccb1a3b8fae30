// The kernels that copy by block id between paged KV and slots or staging, and compute part checksums on the way
// (docs/understand/lifetime_protocol.md#checksum).
//
// A warp copies one stripe at a time: each lane loads 16 bytes, eight loads in flight. The address of a granule
// (kGranule units that lie in one run) is computed by one lane and shared by shuffles. Each warp takes neighbouring
// stripes, so it adds once to the sums of each part that it touches. The layout is data (strides, run lengths, block
// ids); the only variants are the direction, the width of a granule, and whether all planes are alike.
//
// Invariant: bytes are stored from the registers that were hashed; a skipped block is read and hashed, never written.
#include "copy/direction.h"
#include "cuda/kernel_args.h"
#include "cuda/kernel_parts.h"
#include "cuda/pack_kernels.h"

namespace kvdock::cuda {

// Named: nvcc puts a hash of the folder into names without linkage, and the code would differ from build to build.
inline namespace inside {

// Address of a unit of a part in the engine's memory; 0 in a block that must not be written.
template <bool kAlike, Direction kDirection>
__device__ __forceinline__ uint64_t locate(const CopyArgs& args, const PartArgs& part, uint32_t unit) {
  uint32_t plane_index, inside;
  if (kAlike) {
    plane_index = divide(unit, part.by_plane);
    inside = unit - plane_index * part.plane_units;
  } else {
    uint32_t low = 0, high = args.num_planes;  // the last plane that begins at or before the unit
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (args.planes[middle].before_units * part.blocks <= unit) low = middle;
      else high = middle;
    }
    plane_index = low;
    inside = unit - args.planes[low].before_units * part.blocks;
  }
  return locate_in_plane(args.planes[plane_index], args.ids + part.first_id, inside,
                         kDirection == Direction::scatter ? part.skip_blocks : 0);
}

__device__ __forceinline__ uint32_t find_part(const CopyArgs& args, uint32_t stripe) {
  uint32_t low = args.first_part, high = args.last_part + 1;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (args.parts[middle].first_stripe <= stripe) low = middle;
    else high = middle;
  }
  return low;
}

// Adds a warp's sum of stripes of one part, which lane 0 holds, to the part's sums.
__device__ __forceinline__ void deliver(const CopyArgs& args, uint32_t part, uint64_t sum, int lane) {
  if (lane != 0) return;
  sum = fold_once(fold_once(sum));
  atomicAdd(args.sums + 2 * part, sum & 0xffffffffull);
  atomicAdd(args.sums + 2 * part + 1, sum >> 32);
}

// The last thread block of a batch's last launch writes the sums to host memory, without using a copy engine.
__device__ __forceinline__ void report(const CopyArgs& args) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(args.finished_blocks, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (uint32_t i = threadIdx.x; i < 2 * args.num_parts; i += kBlockThreads) args.report[i] = __ldcg(args.sums + i);
}

// Addresses of this lane's units of a stripe in the engine's memory; null: past the part's end, or skipped.
template <bool kAlike, int kGranule, Direction kDirection>
__device__ __forceinline__ void locate_rows(const CopyArgs& args, const PartArgs& part, uint32_t first_unit, int lane,
                                            uint4* (&paged)[kRows]) {
  constexpr int kHeld = kRows / kGranule;  // granules whose address a lane computes: lane g % 32 has granule g
  constexpr int kHolders = 32 / kGranule;  // granules in a row
  uint64_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t unit = first_unit + (i * 32 + lane) * kGranule;
    held[i] = unit < part.units ? locate<kAlike, kDirection>(args, part, unit) : 0;
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint64_t mine = held[row / kGranule];
    const uint64_t start = kGranule == 1 ? mine : __shfl_sync(kAll, mine, (row * kHolders + lane / kGranule) & 31);
    paged[row] = start == 0 ? nullptr : reinterpret_cast<uint4*>(start) + lane % kGranule;
  }
}

// One stripe from paged blocks to flat memory, or back. Loads come before stores: the compiler cannot know that they do
// not overlap.
template <Direction kDirection>
__device__ __forceinline__ void move_rows(uint4* flat, uint4* const (&paged)[kRows], uint4 (&value)[kRows]) {
  if (kDirection == Direction::gather) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      value[row] = paged[row] != nullptr ? __ldcs(paged[row]) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (paged[row] != nullptr) __stcs(kDirection == Direction::gather ? flat + row * 32 : paged[row], value[row]);
}

template <bool kAlike, int kGranule, Direction kDirection>
__device__ __forceinline__ void copy_stripes(const CopyArgs& args) {
  __shared__ uint4 keys[2 * kStripeUnits];
  for (uint32_t i = threadIdx.x; i < 2 * kStripeUnits; i += kBlockThreads)
    keys[i] = __ldg(reinterpret_cast<const uint4*>(args.nh_keys) + i);
  __syncthreads();

  constexpr uint32_t kWarps = kBlockThreads / 32;
  const int lane = threadIdx.x & 31;
  const uint32_t warps = gridDim.x * kWarps, warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint64_t total = args.last_stripe - args.first_stripe;
  uint32_t stripe = args.first_stripe + uint32_t(total * warp / warps);
  const uint32_t end = args.first_stripe + uint32_t(total * (warp + 1) / warps);
  if (stripe == end) return;

  uint32_t index = find_part(args, stripe);
  PartArgs part = args.parts[index];
  uint64_t collected = 0;
  for (; stripe < end; ++stripe) {
    if (stripe - part.first_stripe >= part.stripes) {
      deliver(args, index, collected, lane);
      collected = 0;
      do part = args.parts[++index];
      while (part.stripes == 0);  // parts without blocks hold no stripe
    }
    const uint32_t own = stripe - part.first_stripe + part.begin, first_unit = own * kStripeUnits;
    const uint64_t base = args.stage != 0 ? args.stage : part.slot;
    const uint32_t from_base = args.stage != 0 ? stripe - args.first_stripe : own;
    uint4* flat = reinterpret_cast<uint4*>(base + uint64_t(from_base) * (kStripeUnits * kUnitBytes)) + lane;
    uint4 value[kRows];
    if (kDirection == Direction::scatter) {  // before the addresses are computed, which these loads do not need
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        value[row] = first_unit + row * 32 + lane < part.units ? __ldcs(flat + row * 32) : make_uint4(0, 0, 0, 0);
    }
    uint4* paged[kRows];
    locate_rows<kAlike, kGranule, kDirection>(args, part, first_unit, lane, paged);
    move_rows<kDirection>(flat, paged, value);
    uint64_t a = 0, b = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint4 v = value[row], k = keys[row * 32 + lane], l = keys[kStripeUnits + row * 32 + lane];
      a += uint64_t(v.x + k.x) * (v.y + k.y) + uint64_t(v.z + k.z) * (v.w + k.w);
      b += uint64_t(v.x + l.x) * (v.y + l.y) + uint64_t(v.z + l.z) * (v.w + l.w);
    }
    collected = fold_once(collected + stripe_share(warp_sum(a), warp_sum(b), args.level2 + 4 * uint64_t(own), lane));
  }
  deliver(args, index, collected, lane);
}

}  // namespace inside

#define KVDOCK_KERNEL(name, alike, granule, direction)                                                         \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) name(const __grid_constant__ CopyArgs args) { \
    copy_stripes<alike, granule, direction>(args);                                                             \
    if (args.report != nullptr) report(args);                                                                  \
  }

KVDOCK_KERNEL(kvdock_scatter, true, 8, Direction::scatter)
KVDOCK_KERNEL(kvdock_gather, true, 8, Direction::gather)
KVDOCK_KERNEL(kvdock_scatter_narrow, true, 1, Direction::scatter)
KVDOCK_KERNEL(kvdock_gather_narrow, true, 1, Direction::gather)
KVDOCK_KERNEL(kvdock_scatter_mixed, false, 8, Direction::scatter)
KVDOCK_KERNEL(kvdock_gather_mixed, false, 8, Direction::gather)
KVDOCK_KERNEL(kvdock_scatter_mixed_narrow, false, 1, Direction::scatter)
KVDOCK_KERNEL(kvdock_gather_mixed_narrow, false, 1, Direction::gather)

}  // namespace kvdock::cuda
