// What the copy kernels and the packing kernels share: arithmetic of the checksum, and addresses in paged blocks.
#pragma once

#include "cuda/kernel_args.h"

namespace kvdock::cuda {

constexpr int kRows = 8;  // rows of 32 units in a stripe
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint32_t divide(uint32_t n, Divisor by) {
  return by.multiplier == 0 ? n : __umulhi(n, by.multiplier) >> by.shift;
}

// (high:low) mod p, not fully reduced: below 2^61 + 2^32.
__device__ __forceinline__ uint64_t fold(uint64_t low, uint64_t high) {
  return (low & kChecksumPrime) + ((low >> 61) | (high << 3));
}

__device__ __forceinline__ uint64_t fold_once(uint64_t x) { return (x & kChecksumPrime) + (x >> 61); }

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int step = 16; step != 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// Address of a unit of a plane of a part, counted from the plane's first in the part; 0 in the first `skip` blocks.
__device__ __forceinline__ uint64_t locate_in_plane(const PlaneArgs& plane, const int32_t* ids, uint32_t inside,
                                                    uint32_t skip) {
  const uint32_t block = divide(inside, plane.by_block);
  if (block < skip) return 0;
  const uint32_t in_block = inside - block * plane.block_units;
  const uint32_t run = divide(in_block, plane.by_run);
  const uint32_t in_run = in_block - run * plane.run_units;
  const uint64_t id = uint64_t(uint32_t(__ldg(ids + block)));
  return plane.base + id * plane.block_stride + run * plane.run_stride + uint64_t(in_run) * kUnitBytes;
}

// One stripe's share of the part's sum, below 2^63, valid in lane 0. `a`, `b`: its NH sums, in all lanes.
__device__ __forceinline__ uint64_t stripe_share(uint64_t a, uint64_t b, const uint64_t* key, int lane) {
  uint64_t sum = 0;
  if (lane < 4) {
    const uint32_t half = lane == 0   ? uint32_t(a)
                          : lane == 1 ? uint32_t(a >> 32)
                          : lane == 2 ? uint32_t(b)
                                      : uint32_t(b >> 32);
    const uint64_t k = __ldg(key + lane);
    sum = fold_once(fold(k * half, __umul64hi(k, half)));
  }
  sum += __shfl_down_sync(kAll, sum, 2);
  return sum + __shfl_down_sync(kAll, sum, 1);
}

}  // namespace kvdock::cuda
