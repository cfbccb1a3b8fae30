// The kernels that pack in the gather and unpack in the scatter: docs/understand/packing.md.
//
// A warp works on one cell at a time, most of which are tiles: as many bytes, with the same addresses, as a stripe of
// the copy kernels. Lane l has elements 8 (32 r + l) to 8 (32 r + l) + 7 of row r: a byte of each bit plane. Packed
// tiles pass through shared memory, where lanes share bytes; from there, or to there, they move 16 bytes at a time.
//
// Stripes do not end where cells do. A warp keeps its sums of the stripe that it is in. If it has only a part of the
// stripe, it adds them to the stripe's StripeShare, and whoever completes the stripe there computes level two.
//
// Invariants: bytes are stored from the values that were hashed, and hashed where they were loaded. Whatever a slot's
// bytes are, nothing outside of the slot is read, and nothing outside of the part's blocks written.
#pragma once

#include "copy/direction.h"
#include "cuda/kernel_parts.h"
#include "cuda/pack_args.h"
#include "pack/tile.h"

namespace kvdock::cuda {

inline namespace inside {  // named, as in kernels.cu

// The numbers of pack/tile.h, for arithmetic with 32 bits.
constexpr uint32_t kElements = kTileElements, kCodes = kCodesAt, kCodeBytes = kCodePlaneBytes, kNibbles = kNibblesAt;
constexpr uint32_t kMostFar = kSpares, kPoolMarks = kUnitMarks, kMostPool = kMostUnits, kRaw = kRawTile;
constexpr uint32_t kBookSize = kBookBytes, kBookEntries = kBookExponents, kFarCode = 15;
constexpr uint32_t kTileRows = kMostTileUnits / 32 + 1;  // of a packed tile: they begin at multiples of 32 units

// What a thread block shares. `tables`, one for each warp, by exponent: its code's bits at 0, 8 and 16, its nibble at
// 28; or counts. `spread`, by byte: bit j at 4 j, 4 j + 1, 4 j + 2.
struct Shared {
  uint32_t tables[kMostPackThreads / 32][256];
  uint4 keys[2][2 * kStripeUnits];  // k, k' of copy/checksum.h, each of them twice: a run's lie in one piece
  uint32_t spread[3][256];
  struct Warp {
    unsigned char tile[kMostTileUnits * kUnitBytes];
    // From byte kMarked on: the exponents of marked elements, in their order, or their nibbles. So what a tile's
    // reserve has no room for begins at a multiple of 16 bytes.
    unsigned char marked[kMarkedBytes];
  } warps[1];  // as many as the thread block has
};
static_assert(sizeof(Shared::Warp) == kPackWarpBytes && sizeof(Shared) == kPackSharedBytes + kPackWarpBytes);

extern __shared__ __align__(1024) uint4 g_shared[];

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(g_shared); }
__device__ __forceinline__ Shared::Warp& scratch() { return shared().warps[threadIdx.x / 32]; }
__device__ __forceinline__ uint32_t* table() { return shared().tables[threadIdx.x / 32]; }

__device__ __forceinline__ void load_keys(const PackArgs& args) {
  for (uint32_t i = threadIdx.x; i < 4 * kStripeUnits; i += blockDim.x)
    shared().keys[i / (2 * kStripeUnits)][i % (2 * kStripeUnits)] = __ldg(
        reinterpret_cast<const uint4*>(args.nh_keys) + i / (2 * kStripeUnits) * kStripeUnits + i % kStripeUnits);
  __syncthreads();
}

// Calls work(unit) in one lane for each of `count` units from `unit` on, a row of a warp in one stripe; after each row,
// calls after(row) in all lanes, with the row's first unit.
template <class Work, class After>
__device__ __forceinline__ void for_units(uint32_t unit, uint32_t count, int lane, Work work, After after) {
  for (uint32_t row = unit & ~31u; row < unit + count; row += 32) {
    if (row + lane - unit < count) work(row + lane);
    after(row);
  }
}

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

  // Begins a run of `count` units at `unit`, at most a stripe's worth. Each of them goes to add() in one lane, row by
  // row as for_units() has them, and end_row() follows each row.
  __device__ __forceinline__ void begin(uint32_t part, const PackedPart& of, uint32_t unit, uint32_t count) {
    if (part != part_ || unit / kStripeUnits != stripe_) flush();
    if (part != part_) deliver();
    part_ = part;
    first_stripe_ = of.first_stripe;
    stripe_ = unit / kStripeUnits;
    const uint32_t left = kStripeUnits - unit % kStripeUnits;
    units_ += min(count, left);
    next_units_ = count - min(count, left);
  }
  __device__ __forceinline__ void add(uint32_t unit, uint4 v) {
    const uint32_t at = unit % kStripeUnits;
    add(shared().keys[0] + at, v);
  }
  // The same, where the unit's key is known.
  __device__ __forceinline__ void add(const uint4* key, uint4 v) {
    const uint4 k = key[0], l = key[2 * kStripeUnits];
    a_ += uint64_t(v.x + k.x) * (v.y + k.y);
    a_ += uint64_t(v.z + k.z) * (v.w + k.w);
    b_ += uint64_t(v.x + l.x) * (v.y + l.y);
    b_ += uint64_t(v.z + l.z) * (v.w + l.w);
  }
  __device__ __forceinline__ void end_row(uint32_t row) {
    if ((row + 32) % kStripeUnits != 0) return;
    flush();
    ++stripe_;
    units_ = next_units_;
    next_units_ = 0;
  }
  // The zeros after a part's last unit.
  __device__ __forceinline__ void pad(uint32_t part, const PackedPart& of) {
    const uint32_t count = (kStripeUnits - of.units % kStripeUnits) % kStripeUnits;
    if (count == 0) return;
    begin(part, of, of.units, count);
    for_units(of.units, count, lane_, [&](uint32_t at) { add(at, make_uint4(0, 0, 0, 0)); },
              [&](uint32_t row) { end_row(row); });
  }
  __device__ __forceinline__ void finish() {
    flush();
    deliver();
  }

 private:
  __device__ __forceinline__ void flush() {
    if (units_ == 0) return;
    StripeShare* const share = args_.shares + uint32_t(first_stripe_ + stripe_);
    collected_ = with_stripe(share, args_.level2 + 4 * uint64_t(stripe_), a_, b_, units_, collected_);
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
  uint64_t a_ = 0, b_ = 0;                 // of `stripe_`
  uint32_t units_ = 0, next_units_ = 0;  // of `stripe_` and of the next one, to the end of the run
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
  for (uint32_t i = threadIdx.x; i < 3 * args.num_parts; i += blockDim.x) args.report[i] = __ldcg(args.sums + i);
}

// ------------------------------------------------------------------ marks

// The marks of elements 64 l to 64 l + 63 of the tile, for lane l.
__device__ __forceinline__ uint2 marks_of(const Shared::Warp& s, int lane) {
  const uint2* const codes = reinterpret_cast<const uint2*>(s.tile + kCodes) + lane;
  const uint2 a = codes[0], b = codes[kCodeBytes / 8], c = codes[2 * kCodeBytes / 8];
  return make_uint2(a.x & b.x & c.x, a.y & b.y & c.y);
}

// Lane l gets the sum of `own` over lanes before l.
__device__ __forceinline__ uint32_t sum_before(uint32_t own, int lane) {
  uint32_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const uint32_t below = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += below;
  }
  return sum - own;
}

// Calls work(element, mark) for each of a lane's marks; `first`: the number of its first.
template <class Work>
__device__ __forceinline__ void for_marks(uint2 marks, uint32_t first, int lane, Work work) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    for (uint32_t left = half == 0 ? marks.x : marks.y; left != 0; left &= left - 1, ++first)
      work(64 * lane + 32 * half + __ffs(left) - 1, first);
}

// Bit 4 j: nibble j says far.
__device__ __forceinline__ uint32_t far_nibbles(uint32_t nibbles) {
  const uint32_t twos = nibbles & nibbles >> 1;
  return twos & twos >> 2 & 0x11111111;
}

// Of 8 marks in each lane, those that are far (far_nibbles()): calls put(mark, spare); the first lane's first mark is
// `first`. Returns how many were far with those before them, of which there were `before`.
template <class Put>
__device__ __forceinline__ uint32_t for_far(uint32_t far, uint32_t first, uint32_t before, int lane, Put put) {
  if (!__any_sync(kAll, far != 0)) return before;
  const uint32_t own = __popc(far), others = sum_before(own, lane);
  uint32_t spare = before + others;
  for (uint32_t left = far; left != 0; left &= left - 1, ++spare)
    put(first + 8 * lane + (__ffs(left) - 1) / 4, spare);
  return before + __shfl_sync(kAll, others + own, 31);
}

// ------------------------------------------------------------------ packing a tile

// Fills table() from a book of a header.
__device__ __forceinline__ void make_table(const unsigned char* book, int lane) {
  __syncwarp();
  for (int i = lane; i < 256; i += 32) table()[i] = kFarCode << 28 | 0x010101u;
  __syncwarp();
  if (lane < int(kBookEntries)) {
    const uint32_t code = lane < 7 ? lane : 7, nibble = lane < 7 ? 0 : lane - 7;
    table()[book[lane]] = nibble << 28 | (code & 1) | (code >> 1 & 1) << 8 | (code >> 2) << 16;
  }
  __syncwarp();
}

// What table() has for the exponent of an element of a pair: of the one at bit 0 or 16. `table_at`: its address in
// shared memory, a multiple of 1024.
template <int kBit>
__device__ __forceinline__ uint32_t code_of(uint32_t pair, uint32_t table_at) {
  uint32_t found;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(table_at | (pair >> (kBit + 5) & 0x3fc)));
  return found;
}

// Bits of `a` where the mask has ones, of `b` elsewhere.
__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t chosen;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(chosen) : "r"(mask), "r"(a), "r"(b));
  return chosen;
}

// Four exponents, and four elements without them.
__device__ __forceinline__ uint32_t exponents_of(uint32_t low, uint32_t high) {
  return __byte_perm(low << 1, high << 1, 0x7531);
}
__device__ __forceinline__ uint32_t rests_of(uint32_t low, uint32_t high) {
  constexpr uint32_t kMantissas = 0x007f007f;  // what is left of the others' bits is in the bytes that are dropped
  return __byte_perm(choose(kMantissas, low, low >> 8), choose(kMantissas, high, high >> 8), 0x6420);
}

// Packs a tile into s.tile, with the nibbles of further marks where they begin in s.marked. Returns how many pool units
// those take; kRaw: too many elements are far.
__device__ __forceinline__ uint32_t pack_tile(Shared::Warp& s, const uint4 (&value)[kRows], uint32_t reserve,
                                              int lane) {
  const auto table_at = uint32_t(__cvta_generic_to_shared(table()));
  uint2* const eights = reinterpret_cast<uint2*>(s.tile) + lane;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint4 v = value[row];
    eights[row * 32] = make_uint2(exponents_of(v.x, v.y), exponents_of(v.z, v.w));  // until the marks are done
    uint32_t bits = code_of<0>(v.x, table_at);
    bits += code_of<16>(v.x, table_at) << 1;
    bits += code_of<0>(v.y, table_at) << 2;
    bits += code_of<16>(v.y, table_at) << 3;
    bits += code_of<0>(v.z, table_at) << 4;
    bits += code_of<16>(v.z, table_at) << 5;
    bits += code_of<0>(v.w, table_at) << 6;
    bits += code_of<16>(v.w, table_at) << 7;
#pragma unroll
    for (int plane = 0; plane < 3; ++plane)
      s.tile[kCodes + plane * kCodeBytes + row * 32 + lane] = bits >> 8 * plane;
  }
  __syncwarp();
  const uint2 marks = marks_of(s, lane);
  const uint32_t own = __popc(marks.x) + __popc(marks.y), first = sum_before(own, lane);
  const uint32_t count = __shfl_sync(kAll, first + own, 31);
  unsigned char* const marked = s.marked + kMarked;
  for_marks(marks, first, lane, [&](uint32_t element, uint32_t mark) { marked[mark] = s.tile[element]; });
  unsigned char* const nibbles = s.tile + kNibbles;
  if (lane == 0) *reinterpret_cast<uint2*>(nibbles + reserve / 2) = make_uint2(0, 0);
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    eights[row * 32] = make_uint2(rests_of(value[row].x, value[row].y), rests_of(value[row].z, value[row].w));
  // Nibbles take the place of exponents, and do not reach those of the next round.
  const uint32_t units = count > reserve ? (count - reserve + kPoolMarks - 1) / kPoolMarks : 0;
  const uint32_t words = (reserve + units * kPoolMarks) / 8;
  uint32_t far = 0;
  for (uint32_t round = 0; round < words; round += 32) {
    const uint32_t begin = 8 * (round + lane), left = count > begin ? count - begin : 0;
    uint32_t eight = 0;
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j)
      if (j < left) eight |= table()[marked[begin + j]] >> 28 << 4 * j;
    far = for_far(far_nibbles(eight), 8 * round, far, lane, [&](uint32_t mark, uint32_t spare) {
      if (spare < kMostFar) nibbles[reserve / 2 + spare] = marked[mark];
    });
    __syncwarp();
    const uint32_t word = round + lane;
    if (word < reserve / 8) reinterpret_cast<uint32_t*>(nibbles)[word] = eight;
    else if (word < words) reinterpret_cast<uint32_t*>(marked)[word] = eight;
    __syncwarp();
  }
  return far > kMostFar ? kRaw : units;
}

// ------------------------------------------------------------------ unpacking a tile

// What codes and nibbles name.
struct Exponents {
  uint32_t first[2];  // seven, and a zero
  __device__ __forceinline__ void load(const unsigned char* book, int lane) {
    const uint2* const words = reinterpret_cast<const uint2*>(book);
    const uint2 a = words[0], b = words[1], c = words[2];
    first[0] = a.x;
    first[1] = a.y & 0x00ffffff;
    const uint32_t further[4] = {__byte_perm(a.y, b.x, 0x6543), __byte_perm(b.x, b.y, 0x6543),
                                 __byte_perm(b.y, c.x, 0x6543), __byte_perm(c.x, c.y, 0x6543) & 0x00ffffff};
    __syncwarp();
    if (lane == 0) *reinterpret_cast<uint4*>(table()) = make_uint4(further[0], further[1], further[2], further[3]);
    __syncwarp();
  }
};

// Bit j of a byte to bit 4 j.
__device__ __forceinline__ uint32_t to_nibbles(uint32_t byte) {
  uint32_t x = (byte | byte << 12) & 0x000f000f;
  x = (x | x << 6) & 0x03030303;
  return (x | x << 3) & 0x11111111;
}

__device__ __forceinline__ void load_spread() {
  for (uint32_t i = threadIdx.x; i < 3 * 256; i += blockDim.x) shared().spread[0][i] = to_nibbles(i % 256) << i / 256;
}

// A pair of elements: bytes 0 and 1 of `rests` and `exponents`, or 2 and 3.
__device__ __forceinline__ uint32_t elements_of(uint32_t rests, uint32_t exponents, bool upper) {
  const uint32_t x = __byte_perm(rests, exponents, upper ? 0x7362 : 0x5140);  // exponent, sign, mantissa
  const uint32_t unsign = (x & 0x007f007f) | (x >> 1 & ~0x007f007fu);
  return (unsign & 0x7fff7fff) | (x << 8 & 0x80008000);
}

// Unpacks s.tile and `units` pool units at `more`, and calls store(row, elements). A mark beyond them, or a far element
// beyond the spares, gets exponent 0.
template <class Store>
__device__ __forceinline__ void unpack_tile(Shared::Warp& s, const Exponents& book, uint32_t reserve,
                                            const uint32_t* more, uint32_t units, int lane, Store store) {
  const unsigned char* const further = reinterpret_cast<const unsigned char*>(table());
  unsigned char* const marked = s.marked + kMarked;
  const unsigned char* const nibbles = s.tile + kNibbles;
  const uint32_t end = min(reserve + units * kPoolMarks, kElements), words = end / 8;
  uint32_t far = 0;
  for (uint32_t round = 0; round < words; round += 32) {
    const uint32_t word = round + lane;
    uint32_t eight = 0;
    if (word < reserve / 8) eight = reinterpret_cast<const uint32_t*>(nibbles)[word];
    else if (word < words) eight = more[word - reserve / 8];
    uint32_t exponents[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) exponents[j / 4] |= uint32_t(further[eight >> 4 * j & 15]) << 8 * (j % 4);
    if (word < words) reinterpret_cast<uint2*>(marked)[word] = make_uint2(exponents[0], exponents[1]);
    far = for_far(far_nibbles(eight), 8 * round, far, lane, [&](uint32_t mark, uint32_t spare) {
      if (spare < kMostFar) marked[mark] = nibbles[reserve / 2 + spare];
    });
  }
  if (lane == 0) marked[end] = 0;
  uint2* const eights = reinterpret_cast<uint2*>(s.tile) + lane;
  uint2 rests[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const unsigned char* const at = s.tile + kCodes + row * 32 + lane;
    const uint32_t codes = shared().spread[0][at[0]] | shared().spread[1][at[kCodeBytes]] |
                           shared().spread[2][at[2 * kCodeBytes]];
    rests[row] = eights[row * 32];
    // Exponents take their place, until marked ones are put among them.
    eights[row * 32] = make_uint2(__byte_perm(book.first[0], book.first[1], codes),
                                  __byte_perm(book.first[0], book.first[1], codes >> 16));
  }
  const uint2 marks = marks_of(s, lane);
  const uint32_t first = sum_before(__popc(marks.x) + __popc(marks.y), lane);
  __syncwarp();
  for_marks(marks, first, lane, [&](uint32_t element, uint32_t mark) { s.tile[element] = marked[min(mark, end)]; });
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const uint2 rest = rests[row], exponents = eights[row * 32];
    store(row, make_uint4(elements_of(rest.x, exponents.x, false), elements_of(rest.x, exponents.x, true),
                          elements_of(rest.y, exponents.y, false), elements_of(rest.y, exponents.y, true)));
  }
}

// ------------------------------------------------------------------ cells

// Addresses of this lane's units of `count` units of a plane, from `first` on; null: past them, or skipped.
template <int kGranule>
__device__ __forceinline__ void locate_cell(const PackArgs& args, const PackedPart& part, uint32_t plane,
                                            uint32_t first, uint32_t count, uint32_t skip, int lane,
                                            uint4* (&paged)[kRows]) {
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
    const uint32_t each = blockDim.x / 32, warps = gridDim.x * each, warp = blockIdx.x * each + threadIdx.x / 32;
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
    } else if (++cell >= plane_end_ && cell < part.pool_cell) {
      enter_plane(plane + 1);
    }
    return leaves;
  }
  __device__ __forceinline__ bool is_tile() const { return cell - of_plane.first_cell < of_plane.tiles; }
  __device__ __forceinline__ uint32_t tile() const { return cell - of_plane.first_cell; }
  // The rest of the share's last stripe.
  __device__ __forceinline__ bool is_tail() const {
    return cell - part.begin == part.cells - 1 && part.tail_unit < part.end_unit;
  }
  // Where the part's header, or its pool, is: in the share, or else in the slot.
  __device__ __forceinline__ const unsigned char* header() const {
    return reinterpret_cast<const unsigned char*>(part.begin == 0 ? part.slot : args_.parts[index].slot);
  }
  __device__ __forceinline__ const uint4* pool() const {
    const uint64_t slot = part.end_unit == part.units ? part.slot : args_.parts[index].slot;
    return reinterpret_cast<const uint4*>(slot) + part.pool_unit;
  }
  // Of the header or of the pool.
  __device__ __forceinline__ bool is_flat() const { return cell >= part.pool_cell || cell < first_plane_cell(); }

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
    if (args_.stage != 0)
      part.slot = args_.stage + uint64_t(index - args_.first_part) * args_.stage_bytes -
                  uint64_t(part.stage_unit) * kUnitBytes;
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

// Where the whole tile is, if it is in one run that may be written, else null.
__device__ __forceinline__ uint4* one_run(const PackArgs& args, const Cells& at, uint32_t skip) {
  const PlaneArgs& plane = args.planes[at.plane];
  const uint32_t first = at.tile() * kTileUnits, run = divide(first, plane.by_run);
  if (first - run * plane.run_units + kTileUnits > plane.run_units) return nullptr;
  return reinterpret_cast<uint4*>(locate_in_plane(plane, args.ids + at.part.first_id, first, skip));
}

// Hashes a cell of the header or of the pool, or a tail.
__device__ __forceinline__ void hash_flat(const PackArgs& args, const Cells& at, StripeSums& sums, int lane) {
  const bool is_tail = at.is_tail(), of_pool = !is_tail && at.cell >= at.part.pool_cell;
  const uint32_t begin = is_tail   ? at.part.tail_unit
                         : of_pool ? at.part.pool_unit + (at.cell - at.part.pool_cell) * kStripeUnits
                                   : at.cell * kStripeUnits;
  const uint32_t last = is_tail ? at.part.end_unit : of_pool ? at.part.units : args.header_units;
  const uint32_t end = min(last, begin + uint32_t(kStripeUnits)), unit = max(begin, at.part.hash_unit);
  if (unit >= end) return;  // the share before has hashed it
  const uint32_t count = end - unit;
  const uint4* const slot = reinterpret_cast<const uint4*>(at.part.slot);
  sums.begin(at.index, at.part, unit, count);
  for_units(unit, count, lane, [&](uint32_t which) { sums.add(which, __ldcs(slot + which)); },
            [&](uint32_t row) { sums.end_row(row); });
  if (unit + count == at.part.units) sums.pad(at.index, at.part);
}

// Stores and hashes `count` units of a slot.
template <class Value>
__device__ __forceinline__ void store_flat(StripeSums& sums, uint32_t index, const PackedPart& part, uint32_t unit,
                                           uint32_t count, int lane, Value value_of) {
  uint4* const slot = reinterpret_cast<uint4*>(part.slot);
  sums.begin(index, part, unit, count);
  for_units(
      unit, count, lane,
      [&](uint32_t at) {
        const uint4 v = value_of(at);
        __stcs(slot + at, v);
        sums.add(at, v);
      },
      [&](uint32_t row) { sums.end_row(row); });
  if (unit + count == part.units) sums.pad(index, part);
}

// The units of a packed tile row by row: calls move(which, key) for unit `which` of the tile, and adds the unit that it
// returns, unless the share before has hashed it.
template <class Move>
__device__ __forceinline__ void for_tile(StripeSums& sums, uint32_t index, const PackedPart& part, uint32_t unit,
                                         uint32_t count, int lane, Move move) {
  const uint32_t from = max(unit, part.hash_unit), end = unit + count;  // hash_unit is the first of a stripe
  if (from < end) sums.begin(index, part, from, end - from);
  const uint32_t before = unit % 32, first = lane - before, from_row = (from - unit + before) / 32;
  const uint4* const keys = shared().keys[0] + (unit % kStripeUnits - before) + lane;
#pragma unroll
  for (uint32_t i = 0; i < kTileRows; ++i) {
    if (first + i * 32 < count) {
      const uint4 v = move(i, first + i * 32);
      if (i >= from_row) sums.add(keys + i * 32, v);
    }
    if (i >= from_row && i * 32 < before + count) sums.end_row(unit - before + i * 32);
  }
  if (end == part.units && from < end) sums.pad(index, part);
}

// What is left of a plane, from paged blocks to the slot, or back.
template <Direction kDirection>
__device__ __forceinline__ void move_rest(const PackArgs& args, const Cells& at, StripeSums& sums, bool writes,
                                          int lane) {
  const uint32_t unit = at.of_plane.slot_unit + at.of_plane.tiles * args.tile_units, count = at.of_plane.rest_units;
  const uint32_t first = at.of_plane.tiles * kTileUnits;
  const auto paged = [&](uint32_t which) {
    return reinterpret_cast<uint4*>(locate_in_plane(args.planes[at.plane], args.ids + at.part.first_id,
                                                    first + which - unit,
                                                    kDirection == Direction::scatter ? at.part.skip_blocks : 0));
  };
  if (kDirection == Direction::gather) {
    store_flat(sums, at.index, at.part, unit, count, lane, [&](uint32_t which) { return __ldcs(paged(which)); });
    return;
  }
  const uint4* const slot = reinterpret_cast<const uint4*>(at.part.slot);
  const uint32_t from = max(unit, at.part.hash_unit), end = unit + count;
  if (from < end) sums.begin(at.index, at.part, from, end - from);
  for_units(
      unit, count, lane,
      [&](uint32_t which) {
        const uint4 v = __ldcs(slot + which);
        uint4* const to = paged(which);
        if (to != nullptr && writes) __stcs(to, v);
        if (which >= from) sums.add(which, v);
      },
      [&](uint32_t row) {
        if (row + 32 > from) sums.end_row(row);
      });
  if (end == at.part.units && from < end) sums.pad(at.index, at.part);
}

// Takes `count` units of the part's pool, and fills them: value_of(i) is the i-th 16 bytes. Returns the first. If there
// are not enough, those that are left get zeros: each byte of a slot is stored and hashed once, whatever becomes of it.
template <class Value>
__device__ __forceinline__ uint32_t fill_pool(const PackArgs& args, const Cells& at, uint32_t count, int lane,
                                              Value value_of) {
  uint32_t first = 0;
  if (lane == 0) first = uint32_t(atomicAdd(args.sums + 3 * at.index + 2, (unsigned long long)(count)));
  first = __shfl_sync(kAll, first, 0);
  const uint32_t left = at.part.pool - min(first, at.part.pool);
  if (left == 0) return 0;
  StripeSums sums(args, lane);
  PackedPart part = at.part;
  part.slot = args.parts[at.index].slot;  // the pool is never staged
  const uint32_t unit = part.pool_unit + 2 * first;
  store_flat(sums, at.index, part, unit, 2 * min(count, left), lane, [&](uint32_t which) {
    return count <= left ? value_of(which - unit) : make_uint4(0, 0, 0, 0);
  });
  sums.finish();
  return first;
}

// A tile that is not packed: as much as there is room for into s.tile, the others into the pool.
__device__ __forceinline__ void put_raw(const PackArgs& args, const Cells& at, Shared::Warp& s,
                                        const uint4 (&value)[kRows], int lane) {
  const uint32_t kept = args.tile_units - 1, others = kTileUnits - kept;
  uint4* const units = reinterpret_cast<uint4*>(s.tile);
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row * 32 + lane >= kept) units[row * 32 + lane - kept] = value[row];
  __syncwarp();
  const uint32_t first = fill_pool(args, at, (others + 1) / 2, lane, [&](uint32_t i) {
    return i < others ? units[i] : make_uint4(0, 0, 0, 0);
  });
  __syncwarp();
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row * 32 + lane < kept) units[row * 32 + lane] = value[row];
  if (lane == 0) units[kept] = make_uint4(0, 0, 0, kRaw << 8 | first << 16);
  __syncwarp();
}

template <int kGranule>
__device__ __forceinline__ void pack_cells(const PackArgs& args) {
  load_keys(args);
  const int lane = threadIdx.x & 31;
  Shared::Warp& s = scratch();
  StripeSums sums(args, lane);
  uint32_t table_of = UINT32_MAX;
  for (Cells at(args); at.any(); table_of = at.next() ? UINT32_MAX : table_of) {
    if (!at.is_tile()) {
      move_rest<Direction::gather>(args, at, sums, true, lane);
      continue;
    }
    uint4 value[kRows];
    if (const uint4* const run = one_run(args, at, 0); run != nullptr) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) value[row] = __ldcs(run + row * 32 + lane);
    } else {
      uint4* paged[kRows];
      locate_cell<kGranule>(args, at.part, at.plane, at.tile() * kTileUnits, kTileUnits, 0, lane, paged);
#pragma unroll
      for (int row = 0; row < kRows; ++row) value[row] = __ldcs(paged[row]);
    }
    if (table_of != at.plane) {
      table_of = at.plane;
      const uint64_t header = uint64_t(at.index) * args.header_units * kUnitBytes;
      make_table(args.headers + header + kBookStart + kBookSize * at.plane, lane);
    }
    const uint32_t units = pack_tile(s, value, args.marks, lane);
    if (units == kRaw) {
      put_raw(args, at, s, value, lane);
    } else if (units != 0) {
      const uint4* const more = reinterpret_cast<const uint4*>(s.marked + kMarked + args.marks / 2);
      const uint32_t first = fill_pool(args, at, units, lane, [&](uint32_t i) { return more[i]; });
      if (lane == 0) reinterpret_cast<uint4*>(s.tile)[args.tile_units - 1].w |= units << 8 | first << 16;
      __syncwarp();
    }
    const uint32_t unit = at.of_plane.slot_unit + at.tile() * args.tile_units;
    uint4* const slot = reinterpret_cast<uint4*>(at.part.slot) + unit;
    for_tile(sums, at.index, at.part, unit, args.tile_units, lane, [&](uint32_t, uint32_t which) {
      const uint4 v = reinterpret_cast<const uint4*>(s.tile)[which];
      __stcs(slot + which, v);
      return v;
    });
    __syncwarp();  // before the next tile is written to s.tile
  }
  sums.finish();
}

// Stores s.tile, unpacked, into the engine's blocks: at `run`, if it is in one run that may be written.
template <int kGranule>
__device__ __forceinline__ void put_tile(const PackArgs& args, const Cells& at, Shared::Warp& s, const Exponents& book,
                                         uint4* run, int lane) {
      const uint32_t trailer = reinterpret_cast<const uint4*>(s.tile)[args.tile_units - 1].w;
      const uint32_t units = trailer >> 8 & 255, first = trailer >> 16;
      const uint32_t kept = args.tile_units - 1;
      const uint32_t taken = units == kRaw ? (kTileUnits - kept + 1) / 2 : units;
      const bool is_whole = (units <= kMostPool || units == kRaw) && (taken == 0 || first + taken <= at.part.pool);
      const uint4* const more = at.pool() + (taken != 0 ? 2 * first : 0);
      uint4* paged[kRows];
      if (run == nullptr)
        locate_cell<kGranule>(args, at.part, at.plane, at.tile() * kTileUnits, kTileUnits, at.part.skip_blocks, lane,
                              paged);
      const auto store = [&](int row, uint4 value) {
        if (run != nullptr) __stcs(run + row * 32 + lane, value);
        else if (paged[row] != nullptr) __stcs(paged[row], value);
      };
      if (!is_whole) {
        if (lane == 0) atomicAdd(args.sums + 3 * at.index + 2, 1ull);
      } else if (units != kRaw) {
        unpack_tile(s, book, args.marks, reinterpret_cast<const uint32_t*>(more), units, lane, store);
      } else {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const uint32_t i = row * 32 + lane;
          store(row, i < kept ? reinterpret_cast<const uint4*>(s.tile)[i] : more[i - kept]);
        }
      }
}

template <int kGranule>
__device__ __forceinline__ void unpack_cells(const PackArgs& args) {
  load_spread();
  load_keys(args);
  const int lane = threadIdx.x & 31;
  Shared::Warp& s = scratch();
  StripeSums sums(args, lane);
  Exponents book{};
  bool sound = false;
  uint32_t book_of = UINT32_MAX, checked = UINT32_MAX;
  for (Cells at(args); at.any(); at.next()) {
    if (checked != at.index) {
      checked = at.index;
      book_of = UINT32_MAX;
      const uint4 header = *reinterpret_cast<const uint4*>(at.header());
      sound = header.x == kPartMagic && (header.y & 0xffff) == args.num_planes;
      if (!sound && lane == 0) atomicAdd(args.sums + 3 * at.index + 2, 1ull);
    }
    if (at.is_tail() || at.is_flat()) {
      hash_flat(args, at, sums, lane);
      continue;
    }
    if (!at.is_tile()) {
      move_rest<Direction::scatter>(args, at, sums, sound, lane);
      continue;
    }
    const uint32_t unit = at.of_plane.slot_unit + at.tile() * args.tile_units;
    const uint4* const flat = reinterpret_cast<const uint4*>(at.part.slot) + unit;
    const uint32_t first_unit = lane - unit % 32;
    uint4 packed[kTileRows];
#pragma unroll
    for (uint32_t i = 0; i < kTileRows; ++i)
      if (first_unit + i * 32 < args.tile_units) packed[i] = __ldcs(flat + (first_unit + i * 32));
    uint4* const run = one_run(args, at, at.part.skip_blocks);
    for_tile(sums, at.index, at.part, unit, args.tile_units, lane, [&](uint32_t row, uint32_t which) {
      reinterpret_cast<uint4*>(s.tile)[which] = packed[row];
      return packed[row];
    });
    if (!sound) {
      __syncwarp();
      continue;
    }
    if (book_of != at.plane) {
      book_of = at.plane;
      book.load(at.header() + kBookStart + kBookSize * at.plane, lane);
    }
    __syncwarp();
    put_tile<kGranule>(args, at, s, book, run, lane);
    __syncwarp();  // before the next tile is written to s.tile
  }
  sums.finish();
}

// ------------------------------------------------------------------ before and after the tiles of a gather

__device__ __forceinline__ uint32_t exponent_at(uint4 v, int j) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  return words[j / 2] >> (j % 2 != 0 ? 23 : 7) & 0xff;
}

// A warp for each plane of each part: counts the exponents of its sample, and writes its book into the header.
__device__ __forceinline__ void learn_books(const PackArgs& args) {
  uint32_t* const counts = table();
  const uint32_t lane = threadIdx.x & 31, warps = blockDim.x / 32;
  for (uint32_t each = blockIdx.x * warps + threadIdx.x / 32; each < args.num_parts * args.num_planes;
       each += gridDim.x * warps) {
    const uint32_t index = each / args.num_planes, plane = each % args.num_planes;
    const PackedPart part = args.parts[index];
    const uint32_t tiles = reinterpret_cast<const TilePlane*>(part.planes)[plane].tiles;
    for (uint32_t i = lane; i < 256; i += 32) counts[i] = 0;
    __syncwarp();
    // A granule for each eight lanes, eight of them in flight.
    const auto granules = uint32_t(sampled_granules(tiles));
    for (uint32_t first = lane / 8; first < granules; first += 32) {
      uint4 value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + 4 * i >= granules) continue;
        const auto granule = uint32_t(sampled_granule(tiles, first + 4 * i));
        value[i] = __ldg(reinterpret_cast<const uint4*>(locate_in_plane(
            args.planes[plane], args.ids + part.first_id, granule * (kGranuleBytes / kUnitBytes) + lane % 8, 0)));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (first + 4 * i < granules) atomicAdd(counts + exponent_at(value[i], j), 1u);
    }
    __syncwarp();
    // Of exponents lane, lane + 32, …: the first in the book has the greatest. See ExponentCounts::book().
    uint32_t keys[8], best = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t exponent = lane + 32 * i, count = counts[exponent];
      keys[i] = count == 0 ? 0 : 1u << 31 | count << 16 | (255 - exponent) << 8 | exponent;
      best = max(best, keys[i]);
    }
    best = __reduce_max_sync(kAll, best);
    const uint32_t commonest = best & 255;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t exponent = lane + 32 * i;
      if (keys[i] != 0) continue;
      keys[i] = (exponent < commonest ? 1u << 16 | exponent << 8 : (255 - exponent) << 8) | exponent;
    }
    unsigned char* const header = args.headers + uint64_t(index) * args.header_units * kUnitBytes;
    unsigned char* const book = header + kBookStart + kBookSize * plane;
    for (uint32_t k = 0; k < kBookSize; ++k) {
      best = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) best = max(best, keys[i]);
      best = __reduce_max_sync(kAll, best);
#pragma unroll
      for (int i = 0; i < 8; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
      if (lane == 0) book[k] = k < kBookEntries ? best & 255 : 0;
    }
    if (plane + 1 == args.num_planes)
      for (unsigned char* at = book + kBookSize + lane; at < header + args.header_units * kUnitBytes; at += 32) *at = 0;
    __syncwarp();
  }
}

// A thread block for each part: stores its header, and zeros in the pool units that are not in use.
__device__ __forceinline__ void finish_parts(const PackArgs& args) {
  load_keys(args);
  const int lane = threadIdx.x & 31;
  StripeSums sums(args, lane);
  for (uint32_t index = blockIdx.x; index < args.num_parts; index += gridDim.x) {
    const PackedPart part = args.parts[index];
    const uint32_t in_use = min(uint32_t(args.sums[3 * index + 2]), part.pool);
    const uint4* const header =
        reinterpret_cast<const uint4*>(args.headers) + uint64_t(index) * args.header_units;
    const uint32_t unused = part.pool_unit + 2 * in_use;
    const uint32_t header_chunks = (args.header_units + kStripeUnits - 1) / kStripeUnits;
    const uint32_t chunks = header_chunks + (part.units - unused + kStripeUnits - 1) / kStripeUnits;
    for (uint32_t chunk = threadIdx.x / 32; chunk < chunks; chunk += blockDim.x / 32) {
      const bool is_header = chunk < header_chunks;
      const uint32_t begin = is_header ? chunk * kStripeUnits : unused + (chunk - header_chunks) * kStripeUnits;
      const uint32_t end = is_header ? args.header_units : part.units;
      const uint32_t count = min(end - begin, uint32_t(kStripeUnits));
      store_flat(sums, index, part, begin, count, lane, [&](uint32_t i) {
        if (i == 0) return make_uint4(kPartMagic, args.num_planes | in_use << 16, 0, 0);
        return is_header ? header[i] : make_uint4(0, 0, 0, 0);
      });
    }
  }
  sums.finish();
}

}  // namespace inside

#define KVDOCK_PACK_KERNEL(name, threads, ...)                                                         \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ PackArgs args) { \
    __VA_ARGS__(args);                                                                                 \
    if (args.report != nullptr) report_packed(args);                                                   \
  }

KVDOCK_PACK_KERNEL(kvdock_learn, kMostPackThreads, learn_books)
KVDOCK_PACK_KERNEL(kvdock_pack, kMostPackThreads, pack_cells<8>)
KVDOCK_PACK_KERNEL(kvdock_pack_narrow, kMostPackThreads, pack_cells<1>)
KVDOCK_PACK_KERNEL(kvdock_unpack, kMostUnpackThreads, unpack_cells<8>)
KVDOCK_PACK_KERNEL(kvdock_unpack_narrow, kMostUnpackThreads, unpack_cells<1>)
KVDOCK_PACK_KERNEL(kvdock_finish, kMostPackThreads, finish_parts)

}  // namespace kvdock::cuda
