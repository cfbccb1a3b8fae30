// The kernels that pack in the gather and unpack in the scatter: docs/understand/packing.md.
//
// A warp works on one cell at a time, for most of them a tile: the same 4096 bytes, with the same addresses, as a stripe
// of the copy kernels. Lane l has elements 8 (32 r + l) to 8 (32 r + l) + 7 of row r: a byte of each bit plane. Packed
// tiles pass through shared memory, where lanes share bytes; from there, or to there, they move 16 bytes at a time.
//
// Stripes do not end where cells do. A warp keeps its sums of the stripe that it is in; of a stripe that it has not as a
// whole it adds them to the stripe's StripeShare, and whoever completes the stripe there computes level two.
//
// Invariants: bytes are stored from the values that were hashed, and hashed where they were loaded. Whatever a slot's
// bytes are, nothing outside of the slot is read, and nothing outside of the part's blocks written.
#pragma once

#include "copy/direction.h"
#include "cuda/kernel_parts.cuh"
#include "cuda/pack_args.h"
#include "pack/book.h"

namespace kvdock::cuda {

namespace {

constexpr uint32_t kCodes = 2048, kCodeBytes = 256, kNibbles = kCodes + 3 * kCodeBytes;
constexpr uint32_t kFarCode = 15, kMostFar = 6;

struct WarpScratch {
  unsigned char tile[kMostTileUnits * kUnitBytes];
  unsigned char marked[kMarkedBytes];  // the exponents of marked elements, in their order
  uint32_t table[256];                 // by exponent: its code's bits at 0, 8 and 16, its nibble at 28. Or counts
};
static_assert(sizeof(WarpScratch) == kWarpScratch);

extern __shared__ uint4 g_shared[];

__device__ __forceinline__ const uint4* shared_keys() { return g_shared; }

__device__ __forceinline__ WarpScratch& scratch() {
  return reinterpret_cast<WarpScratch*>(g_shared + 2 * kStripeUnits)[threadIdx.x / 32];
}

__device__ __forceinline__ void load_keys(const PackArgs& args) {
  for (uint32_t i = threadIdx.x; i < 2 * kStripeUnits; i += kBlockThreads)
    g_shared[i] = __ldg(reinterpret_cast<const uint4*>(args.nh_keys) + i);
  __syncthreads();
}

__device__ __forceinline__ uint32_t lanes_before(int lane) { return (1u << lane) - 1; }

// ------------------------------------------------------------------ the checksum

// Adds a stripe to the sum `collected` in lane 0, unless other warps have units of the stripe and are not done.
__device__ __noinline__ uint64_t with_stripe(StripeShare* share, const uint64_t* key, uint64_t a, uint64_t b,
                                             uint32_t units, uint64_t collected) {
  const int lane = threadIdx.x & 31;
  a = warp_sum(a), b = warp_sum(b);
  int whole = units == kStripeUnits;
  if (!whole) {
    if (lane == 0) {
      atomicAdd(&share->a, (unsigned long long)(a));
      atomicAdd(&share->b, (unsigned long long)(b));
      __threadfence();
      whole = atomicAdd(&share->units, units) + units == kStripeUnits;
      if (whole) {
        __threadfence();
        a = atomicExch(&share->a, 0ull);
        b = atomicExch(&share->b, 0ull);
        atomicExch(&share->units, 0u);
      }
    }
    whole = __shfl_sync(kAll, whole, 0);
    a = __shfl_sync(kAll, a, 0);
    b = __shfl_sync(kAll, b, 0);
  }
  return whole ? fold_once(collected + stripe_share(a, b, key, lane)) : collected;
}

// A warp's sums over neighbouring units of a part.
class StripeSums {
 public:
  __device__ __forceinline__ StripeSums(const PackArgs& args, int lane) : args_(args), lane_(lane) {}

  // Begins a run of `count` units at `unit`, at most a stripe's worth. Each of them goes to add() of one lane.
  __device__ __forceinline__ void begin(uint32_t part, const PackedPart& of, uint32_t unit, uint32_t count) {
    if (part != part_ || unit / kStripeUnits != stripe_) flush();
    if (part != part_) deliver();
    part_ = part;
    first_stripe_ = of.first_stripe;
    stripe_ = unit / kStripeUnits;
    const uint32_t left = kStripeUnits - unit % kStripeUnits;
    units_ += count < left ? count : left;
    next_units_ = count < left ? 0 : count - left;
  }
  __device__ __forceinline__ void add(uint32_t unit, uint4 v) {
    const uint32_t at = unit % kStripeUnits;
    const uint4 k = shared_keys()[at], l = shared_keys()[kStripeUnits + at];
    const uint64_t a = uint64_t(v.x + k.x) * (v.y + k.y) + uint64_t(v.z + k.z) * (v.w + k.w);
    const uint64_t b = uint64_t(v.x + l.x) * (v.y + l.y) + uint64_t(v.z + l.z) * (v.w + l.w);
    if (unit / kStripeUnits == stripe_) a_ += a, b_ += b;
    else next_a_ += a, next_b_ += b;
  }
  __device__ __forceinline__ void end() {
    if (next_units_ == 0) return;
    flush();
    ++stripe_;
    a_ = next_a_, b_ = next_b_, units_ = next_units_;
    next_a_ = next_b_ = next_units_ = 0;
  }
  // The zeros after a part's last unit.
  __device__ __forceinline__ void pad(uint32_t part, const PackedPart& of) {
    const uint32_t at = of.units % kStripeUnits;
    if (at == 0) return;
    begin(part, of, of.units, kStripeUnits - at);
    for (uint32_t i = at + lane_; i < kStripeUnits; i += 32) add(of.units - at + i, make_uint4(0, 0, 0, 0));
    end();
  }
  __device__ __forceinline__ void finish() {
    flush();
    deliver();
  }

 private:
  __device__ __forceinline__ void flush() {
    if (units_ == 0) return;
    collected_ = with_stripe(args_.shares + first_stripe_ + stripe_, args_.level2 + 4 * uint64_t(stripe_), a_, b_, units_,
                             collected_);
    a_ = b_ = units_ = 0;
  }
  __device__ __forceinline__ void deliver() {
    if (lane_ == 0 && collected_ != 0) {
      const uint64_t sum = fold_once(fold_once(collected_));
      atomicAdd(args_.sums + 3 * part_, sum & 0xffffffffull);
      atomicAdd(args_.sums + 3 * part_ + 1, sum >> 32);
    }
    collected_ = 0;
  }

  const PackArgs& args_;
  const int lane_;
  uint32_t part_ = UINT32_MAX, first_stripe_ = 0, stripe_ = 0;
  uint64_t a_ = 0, b_ = 0, next_a_ = 0, next_b_ = 0;  // of `stripe_`, and of the next one
  uint32_t units_ = 0, next_units_ = 0;
  uint64_t collected_ = 0;  // level two of the part's stripes; in lane 0
};

__device__ __forceinline__ void report_packed(const PackArgs& args) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(args.finished_blocks, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (uint32_t i = threadIdx.x; i < 3 * args.num_parts; i += kBlockThreads) args.report[i] = __ldcg(args.sums + i);
}

// ------------------------------------------------------------------ marks

// Where the marks of each row begin in the tile's order, for this lane; returns how many the tile has.
__device__ __forceinline__ uint32_t rank_marks(const uint32_t (&marks)[kRows], uint32_t (&first)[kRows], int lane) {
  // Three rows' counts in a register: a row has at most 256.
  uint32_t own[3], sum[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    own[i] = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (3 * i + j < kRows) own[i] |= uint32_t(__popc(marks[3 * i + j])) << 10 * j;
    sum[i] = own[i];
  }
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t below = __shfl_up_sync(kAll, sum[i], step);
      if (lane >= step) sum[i] += below;
    }
  }
  uint32_t before = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t total = __shfl_sync(kAll, sum[i], 31), mine = sum[i] - own[i];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      if (3 * i + j >= kRows) continue;
      first[3 * i + j] = before + (mine >> 10 * j & 1023);
      before += total >> 10 * j & 1023;
    }
  }
  return before;
}

// Calls put(mark, spare) for each far mark of the reserve; far_of(word) says which of 8 marks are far, as 8 bits.
// Returns how many there are.
template <class FarOf, class Put>
__device__ __forceinline__ uint32_t for_far(uint32_t words, int lane, FarOf far_of, Put put) {
  const uint32_t far[2] = {lane < words ? far_of(lane) : 0, lane + 32 < words ? far_of(lane + 32) : 0};
  if (!__any_sync(kAll, (far[0] | far[1]) != 0)) return 0;
  uint32_t before = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t sum = __popc(far[i]);
    const uint32_t own = sum;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t below = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += below;
    }
    uint32_t at = before + sum - own;
    for (uint32_t left = far[i]; left != 0; left &= left - 1, ++at) put(8 * (lane + 32 * i) + __ffs(left) - 1, at);
    before += __shfl_sync(kAll, sum, 31);
  }
  return before;
}

// ------------------------------------------------------------------ packing a tile

// Fills scratch().table from a book of a header.
__device__ __forceinline__ void make_table(WarpScratch& s, const unsigned char* book, int lane) {
  __syncwarp();
  for (int i = lane; i < 256; i += 32) s.table[i] = kFarCode << 28 | 0x010101u;
  __syncwarp();
  if (lane < int(kBookEntries)) {
    const uint32_t code = lane < 7 ? lane : 7, nibble = lane < 7 ? 0 : lane - 7;
    s.table[book[lane]] = nibble << 28 | (code & 1) | (code >> 1 & 1) << 8 | (code >> 2) << 16;
  }
  __syncwarp();
}

__device__ __forceinline__ uint32_t exponent_at(uint4 v, int j) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  return words[j / 2] >> (j % 2 != 0 ? 23 : 7) & 0xff;
}

__device__ __forceinline__ uint32_t rests_of(uint32_t pair) { return (pair & 0x007f007f) | (pair >> 8 & 0x00800080); }

// Packs a tile into s.tile. False: it does not fit.
__device__ __forceinline__ bool pack_tile(WarpScratch& s, const uint4 (&value)[kRows], uint32_t reserve, int lane) {
  uint32_t marks[kRows], first[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint4 v = value[row];
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= s.table[exponent_at(v, j)] << j;
    const uint32_t low = __byte_perm(rests_of(v.x), rests_of(v.y), 0x6420);
    const uint32_t high = __byte_perm(rests_of(v.z), rests_of(v.w), 0x6420);
    const int at = row * 32 + lane;
    reinterpret_cast<uint2*>(s.tile)[at] = make_uint2(low, high);
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) s.tile[kCodes + plane * kCodeBytes + at] = bits >> 8 * plane;
    marks[row] = bits & bits >> 8 & bits >> 16 & 0xff;
  }
  const uint32_t count = rank_marks(marks, first, lane);
  if (count > reserve) return false;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    uint32_t at = first[row];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (marks[row] >> j & 1) s.marked[at++] = exponent_at(value[row], j);
  }
  uint2* const trailer = reinterpret_cast<uint2*>(s.tile + kNibbles + reserve / 2);
  if (lane == 0) *trailer = make_uint2(0, 0);
  __syncwarp();
  const uint32_t words = reserve / 8;
  const auto nibbles_of = [&](uint32_t word) {
    uint32_t nibbles = 0;
    const uint32_t begin = 8 * word, left = count > begin ? count - begin : 0;
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
      if (j < left) nibbles |= (s.table[s.marked[begin + j]] >> 28) << 4 * j;
    reinterpret_cast<uint32_t*>(s.tile + kNibbles)[word] = nibbles;
    uint32_t far = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) far |= uint32_t((nibbles >> 4 * j & 15) == kFarCode) << j;
    return far;
  };
  const uint32_t far = for_far(words, lane, nibbles_of, [&](uint32_t mark, uint32_t spare) {
    if (spare < kMostFar) reinterpret_cast<unsigned char*>(trailer)[spare] = s.marked[mark];
  });
  __syncwarp();
  return far <= kMostFar;
}

// ------------------------------------------------------------------ unpacking a tile

// What codes and nibbles name.
struct Exponents {
  uint32_t first[2];  // seven, and a zero
  __device__ __forceinline__ void load(WarpScratch& s, const unsigned char* book, int lane) {
    const uint2* const words = reinterpret_cast<const uint2*>(book);
    const uint2 a = words[0], b = words[1], c = words[2];
    first[0] = a.x;
    first[1] = a.y & 0x00ffffff;
    const uint32_t further[4] = {__byte_perm(a.y, b.x, 0x6543), __byte_perm(b.x, b.y, 0x6543),
                                 __byte_perm(b.y, c.x, 0x6543), __byte_perm(c.x, c.y, 0x6543) & 0x00ffffff};
    __syncwarp();
    if (lane < 4) s.table[lane] = further[lane];
    __syncwarp();
  }
};

// Bit j of a byte to nibble j.
__device__ __forceinline__ uint32_t to_nibbles(uint32_t byte) {
  uint32_t x = (byte | byte << 12) & 0x000f000f;
  x = (x | x << 6) & 0x03030303;
  return (x | x << 3) & 0x11111111;
}

__device__ __forceinline__ uint32_t elements_of(uint32_t rests, uint32_t exponents, uint32_t pair) {
  const uint32_t r = __byte_perm(rests, 0, pair), e = __byte_perm(exponents, 0, pair);
  return (r << 8 & 0x80008000) | (r & 0x007f007f) | e << 7;
}

// Unpacks s.tile. Marks beyond the reserve, and far elements beyond the spares, get exponent 0.
__device__ __forceinline__ void unpack_tile(WarpScratch& s, const Exponents& book, uint32_t reserve, int lane,
                                            uint4 (&value)[kRows]) {
  const unsigned char* const further = reinterpret_cast<const unsigned char*>(s.table);
  const uint32_t words = reserve / 8;
  const auto read_nibbles = [&](uint32_t word) {
    const uint32_t nibbles = reinterpret_cast<const uint32_t*>(s.tile + kNibbles)[word];
    uint32_t exponents[2] = {0, 0}, far = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t nibble = nibbles >> 4 * j & 15;
      exponents[j / 4] |= uint32_t(further[nibble]) << 8 * (j % 4);
      far |= uint32_t(nibble == kFarCode) << j;
    }
    reinterpret_cast<uint2*>(s.marked)[word] = make_uint2(exponents[0], exponents[1]);
    return far;
  };
  const unsigned char* const spares = s.tile + kNibbles + reserve / 2;
  for_far(words, lane, read_nibbles, [&](uint32_t mark, uint32_t spare) {
    if (spare < kMostFar) s.marked[mark] = spares[spare];
  });
  if (lane == 0) s.marked[reserve] = 0;
  __syncwarp();
  uint32_t codes[kRows], marks[kRows], first[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const unsigned char* const at = s.tile + kCodes + row * 32 + lane;
    const uint32_t b0 = at[0], b1 = at[kCodeBytes], b2 = at[2 * kCodeBytes];
    codes[row] = to_nibbles(b0) | to_nibbles(b1) << 1 | to_nibbles(b2) << 2;
    marks[row] = b0 & b1 & b2;
  }
  rank_marks(marks, first, lane);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    uint32_t low = __byte_perm(book.first[0], book.first[1], codes[row]);
    uint32_t high = __byte_perm(book.first[0], book.first[1], codes[row] >> 16);
    uint32_t at = first[row];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (marks[row] >> j & 1) {
        const uint32_t exponent = s.marked[at < reserve ? at : reserve];
        ++at;
        if (j < 4) low |= exponent << 8 * j;
        else high |= exponent << 8 * (j - 4);
      }
    }
    const uint2 rests = reinterpret_cast<const uint2*>(s.tile)[row * 32 + lane];
    value[row] = make_uint4(elements_of(rests.x, low, 0x4140), elements_of(rests.x, low, 0x4342),
                            elements_of(rests.y, high, 0x4140), elements_of(rests.y, high, 0x4342));
  }
}

// ------------------------------------------------------------------ cells

// Addresses of this lane's units of `count` units of a plane, from `first` on; null: past them, or skipped.
template <int kGranule>
__device__ __forceinline__ void locate_cell(const PackArgs& args, const PackedPart& part, uint32_t plane, uint32_t first,
                                            uint32_t count, uint32_t skip, int lane, uint4* (&paged)[kRows]) {
  constexpr int kHeld = kRows / kGranule, kHolders = 32 / kGranule;  // as in locate_rows()
  uint64_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t unit = (i * 32 + lane) * kGranule;
    held[i] = unit < count ? locate_in_plane(args.planes[plane], args.ids + part.first_id, first + unit, skip) : 0;
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint64_t mine = held[row / kGranule];
    const uint64_t start = kGranule == 1 ? mine : __shfl_sync(kAll, mine, (row * kHolders + lane / kGranule) & 31);
    paged[row] = start == 0 ? nullptr : reinterpret_cast<uint4*>(start) + lane % kGranule;
  }
}

// The cells of a warp, one after the other.
class Cells {
 public:
  __device__ __forceinline__ Cells(const PackArgs& args) : args_(args) {
    constexpr uint32_t kWarps = kBlockThreads / 32;
    const uint32_t warps = gridDim.x * kWarps, warp = blockIdx.x * kWarps + threadIdx.x / 32;
    const uint64_t total = args.last_cell - args.first_cell;
    cell_ = args.first_cell + uint32_t(total * warp / warps);
    end_ = args.first_cell + uint32_t(total * (warp + 1) / warps);
    if (cell_ == end_) return;
    uint32_t low = args.first_part, high = args.last_part + 1;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (args.parts[middle].first_cell <= cell_) low = middle;
      else high = middle;
    }
    index = low;
    enter_part();
  }
  __device__ __forceinline__ bool any() const { return cell_ != end_; }
  // Returns whether the part is another one.
  __device__ __forceinline__ bool next() {
    if (++cell_ == end_) return false;
    const bool leaves = cell_ - part.first_cell >= part.cells;
    if (leaves) {
      ++index;
      enter_part();
    } else if (++cell >= plane_end_ && cell < part.spill_cell) {
      enter_plane(plane + 1);
    }
    return leaves;
  }
  __device__ __forceinline__ bool is_tile() const { return cell - of_plane.first_cell < of_plane.tiles; }
  __device__ __forceinline__ uint32_t tile() const { return cell - of_plane.first_cell; }
  // Of the header or of the spill entries.
  __device__ __forceinline__ bool is_flat() const { return cell >= part.spill_cell || cell < first_plane_cell(); }

  uint32_t index = 0, cell = 0, plane = 0;  // of the part; of the cell in the part; of its plane
  PackedPart part;
  TilePlane of_plane;

 private:
  __device__ __forceinline__ uint32_t first_plane_cell() const {
    return (args_.header_units + kStripeUnits - 1) / kStripeUnits;
  }
  __device__ __forceinline__ const TilePlane* planes() const { return reinterpret_cast<const TilePlane*>(part.planes); }
  __device__ __forceinline__ void enter_part() {
    part = args_.parts[index];
    cell = cell_ - part.first_cell + part.begin;
    uint32_t low = 0, high = args_.num_planes;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (planes()[middle].first_cell <= cell) low = middle;
      else high = middle;
    }
    enter_plane(low);
  }
  __device__ __forceinline__ void enter_plane(uint32_t which) {
    plane = which;
    of_plane = planes()[which];
    plane_end_ = of_plane.first_cell + of_plane.tiles + (of_plane.rest_units != 0);
  }

  const PackArgs& args_;
  uint32_t cell_, end_, plane_end_ = 0;  // in the row; where the plane's cells end in the part
};

// Loads `count` units of flat memory. Hashes them.
__device__ __forceinline__ void hash_flat(StripeSums& sums, uint32_t index, const PackedPart& part, uint32_t unit,
                                          uint32_t count, int lane) {
  const uint4* const flat = reinterpret_cast<const uint4*>(part.slot) + unit;
  sums.begin(index, part, unit, count);
  for (uint32_t i = lane; i < count; i += 32) sums.add(unit + i, __ldcs(flat + i));
  sums.end();
}

// What is left of a plane, from paged blocks to the slot, or back.
template <int kGranule, Direction kDirection>
__device__ __forceinline__ void move_rest(const PackArgs& args, const Cells& at, StripeSums& sums, bool writes, int lane) {
  const uint32_t unit = at.of_plane.slot_unit + at.of_plane.tiles * args.tile_units, count = at.of_plane.rest_units;
  uint4* paged[kRows];
  locate_cell<kGranule>(args, at.part, at.plane, at.of_plane.tiles * kTileUnits, count,
                        kDirection == Direction::scatter ? at.part.skip_blocks : 0, lane, paged);
  uint4* const flat = reinterpret_cast<uint4*>(at.part.slot) + unit;
  sums.begin(at.index, at.part, unit, count);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint32_t i = row * 32 + lane;
    if (i >= count) continue;
    const uint4 v = __ldcs(kDirection == Direction::gather ? paged[row] : flat + i);
    if (kDirection == Direction::gather) __stcs(flat + i, v);
    else if (paged[row] != nullptr && writes) __stcs(paged[row], v);
    sums.add(unit + i, v);
  }
  sums.end();
  if (unit + count == at.part.units) sums.pad(at.index, at.part);
}

// A tile that does not fit: as much as there is room for into s.tile, the others into a spill entry.
__device__ __forceinline__ void spill_tile(const PackArgs& args, const Cells& at, WarpScratch& s, const uint4 (&value)[kRows],
                                        int lane) {
  uint32_t entry = 0;
  if (lane == 0) entry = uint32_t(atomicAdd(args.sums + 3 * at.index + 2, 1ull));
  entry = __shfl_sync(kAll, entry, 0);
  const uint32_t kept = args.tile_units - 1, spilled = kTileUnits - kept;
  const bool has_room = entry < at.part.spills;
  const uint32_t unit = at.part.spill_unit + (has_room ? entry * spilled : 0);
  uint4* const slot = reinterpret_cast<uint4*>(at.part.slot) + unit;
  __syncwarp();
  StripeSums sums(args, lane);
  if (has_room) sums.begin(at.index, at.part, unit, spilled);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint32_t i = row * 32 + lane;
    if (i < kept) {
      reinterpret_cast<uint4*>(s.tile)[i] = value[row];
    } else if (has_room) {
      __stcs(slot + i - kept, value[row]);
      sums.add(unit + i - kept, value[row]);
    }
  }
  if (has_room) sums.end();
  sums.finish();
  if (lane == 0) reinterpret_cast<uint4*>(s.tile)[kept] = make_uint4(0, 0, 0, has_room ? (entry + 1) << 16 : 0);
  __syncwarp();
}

template <int kGranule>
__device__ __forceinline__ void pack_cells(const PackArgs& args) {
  load_keys(args);
  const int lane = threadIdx.x & 31;
  WarpScratch& s = scratch();
  StripeSums sums(args, lane);
  uint32_t table_of = UINT32_MAX;
  for (Cells at(args); at.any(); table_of = at.next() ? UINT32_MAX : table_of) {
    if (!at.is_tile()) {
      move_rest<kGranule, Direction::gather>(args, at, sums, true, lane);
      continue;
    }
    uint4* paged[kRows];
    uint4 value[kRows];
    locate_cell<kGranule>(args, at.part, at.plane, at.tile() * kTileUnits, kTileUnits, 0, lane, paged);
#pragma unroll
    for (int row = 0; row < kRows; ++row) value[row] = __ldcs(paged[row]);
    if (table_of != at.plane) {
      table_of = at.plane;
      make_table(s, args.headers + uint64_t(at.index) * args.header_units * kUnitBytes + kBookStart + kBookSize * at.plane,
                 lane);
    }
    if (!pack_tile(s, value, args.marks, lane)) spill_tile(args, at, s, value, lane);
    const uint32_t unit = at.of_plane.slot_unit + at.tile() * args.tile_units;
    uint4* const flat = reinterpret_cast<uint4*>(at.part.slot) + unit;
    sums.begin(at.index, at.part, unit, args.tile_units);
#pragma unroll 2
    for (uint32_t i = lane; i < args.tile_units; i += 32) {
      const uint4 v = reinterpret_cast<const uint4*>(s.tile)[i];
      __stcs(flat + i, v);
      sums.add(unit + i, v);
    }
    sums.end();
    __syncwarp();  // before the next tile is written to s.tile
    if (unit + args.tile_units == at.part.units) sums.pad(at.index, at.part);
  }
  sums.finish();
}

template <int kGranule>
__device__ __forceinline__ void unpack_cells(const PackArgs& args) {
  load_keys(args);
  const int lane = threadIdx.x & 31;
  WarpScratch& s = scratch();
  StripeSums sums(args, lane);
  Exponents book{};
  bool sound = false;
  uint32_t book_of = UINT32_MAX, checked = UINT32_MAX;
  for (Cells at(args); at.any(); at.next()) {
    if (checked != at.index) {
      checked = at.index;
      book_of = UINT32_MAX;
      const uint4 header = *reinterpret_cast<const uint4*>(at.part.slot);
      sound = header.x == kPartMagic && (header.y & 0xffff) == args.num_planes;
      if (!sound && lane == 0) atomicAdd(args.sums + 3 * at.index + 2, 1ull);
    }
    if (at.is_flat()) {
      const bool spill = at.cell >= at.part.spill_cell;
      const uint32_t begin = spill ? at.part.spill_unit + (at.cell - at.part.spill_cell) * kStripeUnits
                                   : at.cell * kStripeUnits;
      const uint32_t end = spill ? at.part.units : args.header_units;
      hash_flat(sums, at.index, at.part, begin, min(end - begin, uint32_t(kStripeUnits)), lane);
      if (spill && begin + kStripeUnits >= end) sums.pad(at.index, at.part);
      continue;
    }
    if (!at.is_tile()) {
      move_rest<kGranule, Direction::scatter>(args, at, sums, sound, lane);
      continue;
    }
    const uint32_t unit = at.of_plane.slot_unit + at.tile() * args.tile_units;
    const uint4* const flat = reinterpret_cast<const uint4*>(at.part.slot) + unit;
    uint4 packed[kMostTileUnits / 32];
#pragma unroll
    for (uint32_t i = 0; i < kMostTileUnits / 32; ++i)
      packed[i] = i * 32 + lane < args.tile_units ? __ldcs(flat + i * 32 + lane) : make_uint4(0, 0, 0, 0);
    uint4* paged[kRows];
    uint4 value[kRows];
    locate_cell<kGranule>(args, at.part, at.plane, at.tile() * kTileUnits, kTileUnits, at.part.skip_blocks, lane, paged);
    sums.begin(at.index, at.part, unit, args.tile_units);
#pragma unroll
    for (uint32_t i = 0; i < kMostTileUnits / 32; ++i) {
      if (i * 32 + lane >= args.tile_units) continue;
      reinterpret_cast<uint4*>(s.tile)[i * 32 + lane] = packed[i];
      sums.add(unit + i * 32 + lane, packed[i]);
    }
    sums.end();
    if (unit + args.tile_units == at.part.units) sums.pad(at.index, at.part);
    if (!sound) continue;
    if (book_of != at.plane) {
      book_of = at.plane;
      book.load(s, reinterpret_cast<const unsigned char*>(at.part.slot) + kBookStart + kBookSize * at.plane, lane);
    }
    __syncwarp();
    const uint32_t number = reinterpret_cast<const uint4*>(s.tile)[args.tile_units - 1].w >> 16;
    if (number == 0) {
      unpack_tile(s, book, args.marks, lane, value);
    } else if (number <= at.part.spills) {
      const uint32_t kept = args.tile_units - 1, spilled = kTileUnits - kept;
      const uint4* const entry =
          reinterpret_cast<const uint4*>(at.part.slot) + at.part.spill_unit + (number - 1) * spilled;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint32_t i = row * 32 + lane;
        value[row] = i < kept ? reinterpret_cast<const uint4*>(s.tile)[i] : entry[i - kept];
      }
    } else if (lane == 0) {
      atomicAdd(args.sums + 3 * at.index + 2, 1ull);
    }
    if (number <= at.part.spills) {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (paged[row] != nullptr) __stcs(paged[row], value[row]);
    }
    __syncwarp();  // before the next tile is written to s.tile
  }
  sums.finish();
}

// ------------------------------------------------------------------ before and after the tiles of a gather

// A warp for each plane of each part: counts the exponents of its sample, and writes its book into the header.
__device__ __forceinline__ void learn_books(const PackArgs& args) {
  constexpr uint32_t kWarps = kBlockThreads / 32;
  const int lane = threadIdx.x & 31;
  uint32_t* const counts = scratch().table;
  for (uint32_t each = blockIdx.x * kWarps + threadIdx.x / 32; each < args.num_parts * args.num_planes;
       each += gridDim.x * kWarps) {
    const uint32_t index = each / args.num_planes, plane = each % args.num_planes;
    const PackedPart part = args.parts[index];
    const uint32_t tiles = reinterpret_cast<const TilePlane*>(part.planes)[plane].tiles;
    for (int i = lane; i < 256; i += 32) counts[i] = 0;
    __syncwarp();
    // A granule for each eight lanes, eight of them in flight.
    const uint32_t of_tile = uint32_t(sampled_granules(tiles)), granules = tiles * of_tile;
    for (uint32_t first = lane / 8; first < granules; first += 32) {
      uint4 value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t granule = first + 4 * i, tile = granule / of_tile;
        const uint32_t at = uint32_t(sampled_granule(tile, granule - tile * of_tile));
        if (granule < granules)
          value[i] = __ldg(reinterpret_cast<const uint4*>(locate_in_plane(
              args.planes[plane], args.ids + part.first_id, tile * kTileUnits + at * 8 + lane % 8, 0)));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (first + 4 * i < granules) atomicAdd(counts + exponent_at(value[i], j), 1u);
    }
    __syncwarp();
    uint32_t keys[8];  // of exponents lane, lane + 32, …: the commonest is the greatest, then the smallest exponent
#pragma unroll
    for (int i = 0; i < 8; ++i) keys[i] = counts[lane + 32 * i] << 8 | (255 - (lane + 32 * i));
    unsigned char* const header = args.headers + uint64_t(index) * args.header_units * kUnitBytes;
    unsigned char* const book = header + kBookStart + kBookSize * plane;
    for (uint32_t k = 0; k < kBookSize; ++k) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) best = max(best, keys[i]);
      best = __reduce_max_sync(kAll, best);
#pragma unroll
      for (int i = 0; i < 8; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
      if (lane == 0) book[k] = k < kBookEntries ? 255 - (best & 255) : 0;
    }
    if (plane + 1 == args.num_planes)
      for (unsigned char* at = book + kBookSize + lane; at < header + args.header_units * kUnitBytes; at += 32) *at = 0;
    __syncwarp();
  }
}

// A thread block for each part: stores its header, and zeros in the spill entries that are not in use.
__device__ __forceinline__ void finish_parts(const PackArgs& args) {
  load_keys(args);
  constexpr uint32_t kWarps = kBlockThreads / 32;
  const int lane = threadIdx.x & 31;
  StripeSums sums(args, lane);
  for (uint32_t index = blockIdx.x; index < args.num_parts; index += gridDim.x) {
    const PackedPart part = args.parts[index];
    const uint32_t spilled = kTileUnits - (args.tile_units - 1);
    const uint32_t in_use = min(uint32_t(args.sums[3 * index + 2]), part.spills);
    const uint4* const header =
        reinterpret_cast<const uint4*>(args.headers) + uint64_t(index) * args.header_units;
    uint4* const slot = reinterpret_cast<uint4*>(part.slot);
    const uint32_t unused = part.spill_unit + in_use * spilled;
    const uint32_t header_chunks = (args.header_units + kStripeUnits - 1) / kStripeUnits;
    const uint32_t chunks = header_chunks + (part.units - unused + kStripeUnits - 1) / kStripeUnits;
    for (uint32_t chunk = threadIdx.x / 32; chunk < chunks; chunk += kWarps) {
      const bool is_header = chunk < header_chunks;
      const uint32_t begin = is_header ? chunk * kStripeUnits : unused + (chunk - header_chunks) * kStripeUnits;
      const uint32_t end = is_header ? args.header_units : part.units;
      const uint32_t count = min(end - begin, uint32_t(kStripeUnits));
      sums.begin(index, part, begin, count);
      for (uint32_t i = begin + lane; i < begin + count; i += 32) {
        uint4 v = is_header ? header[i] : make_uint4(0, 0, 0, 0);
        if (i == 0) v = make_uint4(kPartMagic, args.num_planes | in_use << 16, 0, 0);
        __stcs(slot + i, v);
        sums.add(i, v);
      }
      sums.end();
      if (begin + count == part.units) sums.pad(index, part);
    }
    if (unused == part.units && part.spills != 0 && threadIdx.x < 32) sums.pad(index, part);
  }
  sums.finish();
}

}  // namespace

#define KVDOCK_PACK_KERNEL(name, ...)                                                                          \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) name(const __grid_constant__ PackArgs args) { \
    __VA_ARGS__(args);                                                                                         \
    if (args.report != nullptr) report_packed(args);                                                           \
  }

KVDOCK_PACK_KERNEL(kvdock_learn, learn_books)
KVDOCK_PACK_KERNEL(kvdock_pack, pack_cells<8>)
KVDOCK_PACK_KERNEL(kvdock_pack_narrow, pack_cells<1>)
KVDOCK_PACK_KERNEL(kvdock_unpack, unpack_cells<8>)
KVDOCK_PACK_KERNEL(kvdock_unpack_narrow, unpack_cells<1>)
KVDOCK_PACK_KERNEL(kvdock_finish, finish_parts)

}  // namespace kvdock::cuda
