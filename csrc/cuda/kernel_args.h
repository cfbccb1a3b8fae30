// The arguments of the copy kernels: plain data, with the same layout in the host's compiler and in nvcc.
//
// A call's parts, or shares of them, form one row of stripes (the last stripe of a part is padded). A launch copies
// stripes [first_stripe, last_stripe) of that row. Sizes inside a part are in units of 16 bytes, the width of one load.
#pragma once

#include <cstdint>

#include "base/limits.h"

namespace kvdock::cuda {

inline constexpr uint32_t kUnitBytes = 16;
inline constexpr uint32_t kStripeUnits = kChecksumStripeBytes / kUnitBytes;
inline constexpr uint32_t kBlockThreads = 512;

inline constexpr size_t kMostPartBytes = (size_t(1) << 31) * kUnitBytes;  // a Divisor divides units below 2^31

// n / divisor for n < 2^31 by one multiplication: rounded-up reciprocal with 31 + ceil(log2 divisor) bits
// (Granlund and Montgomery, 1994). multiplier 0 means divisor 1.
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;
};

inline Divisor divisor(uint32_t value) {
  uint32_t log = 0;
  while ((uint64_t(1) << log) < value) ++log;
  if (log == 0) return {0, 0};
  const uint64_t power = uint64_t(1) << (31 + log);
  return {uint32_t((power + value - 1) / value), log - 1};
}

struct PlaneArgs {
  uint64_t base;
  uint64_t block_stride;
  uint64_t run_stride;
  uint32_t before_units;  // the units of one block in the planes before this one
  uint32_t block_units;
  uint32_t run_units;
  Divisor by_block, by_run;
  uint32_t unused;
};

struct PartArgs {
  uint64_t slot;
  uint32_t first_stripe;  // the share's first stripe in the row of all parts
  uint32_t stripes;       // of this share, which begins at the part's stripe `begin`
  uint32_t begin;
  uint32_t units;
  uint32_t first_id;
  uint32_t blocks;
  uint32_t skip_blocks;
  uint32_t plane_units;  // of this part in one plane, when all planes are alike
  Divisor by_plane;
};

struct CopyArgs {
  const PlaneArgs* planes;
  const PartArgs* parts;
  const int32_t* ids;
  unsigned long long* sums;       // two for each part: the sums of the low 32 bits and of the high 29 bits
  const uint32_t* nh_keys;        // k, then k': each as long as a stripe
  const uint64_t* level2;         // four for each stripe
  unsigned int* finished_blocks;  // zero at first; counts the thread blocks of the reporting launch that have ended
  unsigned long long* report;     // host memory for the sums, written by the last launch; null in the others
  uint64_t stage;                 // the address of first_stripe in staging; 0: direct, in the slots themselves
  uint32_t num_planes;
  uint32_t first_stripe, last_stripe;
  uint32_t first_part, last_part;  // the parts of those stripes, the last one included
  uint32_t num_parts;
};

static_assert(sizeof(PlaneArgs) == 56 && sizeof(PartArgs) == 48 && sizeof(CopyArgs) == 96);

}  // namespace kvdock::cuda
