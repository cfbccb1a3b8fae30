#include "pack/tile.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
// GCC 12 takes what its own intrinsics leave undefined on purpose for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace kvdock {

namespace {

constexpr uint8_t kMark = kFirstCodes;
constexpr uint8_t kFarNibble = 15;
constexpr size_t kFurther = kBookExponents - kFirstCodes;  // exponents that nibbles name
static_assert(kFurther == kFarNibble);

uint8_t exponent_of(uint16_t element) { return uint8_t(element >> 7); }
uint8_t rest_of(uint16_t element) { return uint8_t((element >> 8 & 0x80) | (element & 0x7f)); }
uint16_t element_of(uint8_t rest, uint8_t exponent) {
  return uint16_t((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}
uint8_t nibble_of(uint8_t rank) { return std::min(uint8_t(rank - kFirstCodes), kFarNibble); }

uint16_t load16(const char* at) {
  uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t load64(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// ------------------------------------------------------------------ marked elements

// A byte for each mark of a tile, in their order, and 64 more: its nibble when packing, its exponent when unpacking.
struct Marked {
  alignas(64) uint8_t values[kMostMarks + kMostUnits * kUnitMarks + 64];
};

// `bytes` pairs of nibbles become bytes; a multiple of 4.
void join(const uint8_t* nibbles, size_t bytes, char* to) {
  for (size_t i = 0; i < bytes; i += 4) {
    uint64_t eight = load64(reinterpret_cast<const char*>(nibbles) + 2 * i);
    eight = (eight | eight >> 4) & 0x00ff00ff00ff00ff;
    eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
    const auto four = uint32_t(eight | eight >> 16);
    std::memcpy(to + i, &four, sizeof four);
  }
}

// Marked elements among the 64 from the i-th on.
uint64_t marked_of(const char* tile, size_t i) {
  const char* const codes = tile + kCodesAt + i / 8;
  return load64(codes) & load64(codes + kCodePlaneBytes) & load64(codes + 2 * kCodePlaneBytes);
}

// Finds the elements of nibbles that say far, in a tile whose codes are there. False: there are too many.
bool put_spares(const char* from, const char* tile, const uint8_t* nibbles, size_t count, Trailer* trailer) {
  size_t far = 0, before = 0;
  const auto next_from = [&](size_t mark) {
    const void* const found = std::memchr(nibbles + mark, kFarNibble, count - mark);
    return found != nullptr ? size_t(static_cast<const uint8_t*>(found) - nibbles) : count;
  };
  size_t next = next_from(0);
  for (size_t i = 0; next < count; i += 64) {
    uint64_t left = marked_of(tile, i);
    for (const auto end = before + size_t(std::popcount(left)); before < end; ++before, left &= left - 1) {
      if (before != next) continue;
      if (far == kSpares) return false;
      trailer->spares[far++] = exponent_of(load16(from + 2 * (i + size_t(std::countr_zero(left)))));
      next = next_from(before + 1);
    }
  }
  return true;
}

// Writes the nibbles of `count` marks, and the trailer; the rest of the tile is there already. Returns what a path's
// pack() returns.
template <auto kJoin>
uint8_t put_marked(const char* from, size_t marks, Marked& nibbles, size_t count, char* to, char* more) {
  const size_t units = count > marks ? (count - marks + kUnitMarks - 1) / kUnitMarks : 0;
  std::memset(nibbles.values + count, 0, marks + units * kUnitMarks - count);
  kJoin(nibbles.values, marks / 2, to + kNibblesAt);
  kJoin(nibbles.values + marks, units * kUnitBytes, more);
  Trailer trailer{};
  if (!put_spares(from, to, nibbles.values, count, &trailer)) return kRawTile;
  std::memcpy(to + kNibblesAt + marks / 2, &trailer, sizeof trailer);
  return uint8_t(units);
}

// What nibbles name.
struct Further {
  alignas(16) uint8_t exponents[16];
  explicit Further(const uint8_t* book) {
    std::memcpy(exponents, book + kFirstCodes, kFurther);
    exponents[kFarNibble] = 0;
  }
};

// Puts the spares where nibbles say far.
void take_spares(const char* tile, size_t marks, const char* more, size_t units, Marked& exponents) {
  const char* const trailer = tile + kNibblesAt + marks / 2;
  size_t far = 0;
  for (size_t i = 0; i < marks + units * kUnitMarks; i += 16) {
    const uint64_t pairs = load64(i < marks ? tile + kNibblesAt + i / 2 : more + (i - marks) / 2);
    uint64_t left = pairs & pairs >> 1 & pairs >> 2 & pairs >> 3 & 0x1111111111111111;
    for (; left && far < kSpares; left &= left - 1)
      exponents.values[i + size_t(std::countr_zero(left)) / 4] = uint8_t(trailer[far++]);
  }
}

// Reads the exponents of the reserve and the units, used or not, and 64 zeros after them. `kName` does so for pairs of
// nibbles, and says whether one of them is far.
template <auto kName>
void take_marked(const char* tile, const uint8_t* book, size_t marks, const char* more, size_t units,
                               Marked& exponents) {
  const Further further(book);
  bool far = kName(tile + kNibblesAt, marks / 2, further, exponents.values);
  if (units != 0) far |= kName(more, units * kUnitBytes, further, exponents.values + marks);
  std::memset(exponents.values + marks + units * kUnitMarks, 0, 64);
  if (far) take_spares(tile, marks, more, units, exponents);
}

// ------------------------------------------------------------------ scalar: 8 elements at a time

// Byte j is bit j of the index.
constexpr auto kSpread = [] {
  std::array<uint64_t, 256> spread{};
  for (size_t bits = 0; bits < spread.size(); ++bits)
    for (size_t j = 0; j < 8; ++j) spread[bits] |= uint64_t(bits >> j & 1) << 8 * j;
  return spread;
}();

// The inverse, of the lowest bits of the bytes.
uint8_t gathered(uint64_t bytes) { return uint8_t((bytes & 0x0101010101010101) * 0x0102040810204080 >> 56); }

uint8_t scalar_pack(const char* from, const Book& book, size_t marks, char* to, char* more) {
  Marked nibbles;
  size_t count = 0;
  for (size_t i = 0; i < kTileElements; i += 8) {
    uint64_t codes = 0;
    for (size_t j = 0; j < 8; ++j) {
      const uint16_t element = load16(from + 2 * (i + j));
      to[i + j] = char(rest_of(element));
      const uint8_t rank = book.ranks[exponent_of(element)];
      codes |= uint64_t(std::min(rank, kMark)) << 8 * j;
      nibbles.values[count] = nibble_of(rank);
      count += rank >= kMark;
    }
    for (size_t bit = 0; bit < 3; ++bit)
      to[kCodesAt + bit * kCodePlaneBytes + i / 8] = char(gathered(codes >> bit));
  }
  return put_marked<join>(from, marks, nibbles, count, to, more);
}

bool scalar_name(const char* pairs, size_t bytes, const Further& further, uint8_t* exponents) {
  bool far = false;
  for (size_t i = 0; i < 2 * bytes; ++i) {
    const uint8_t nibble = uint8_t(pairs[i / 2]) >> 4 * (i % 2) & 15;
    far |= nibble == kFarNibble;
    exponents[i] = further.exponents[nibble];
  }
  return far;
}

void scalar_unpack(const char* from, const uint8_t* book, size_t marks, const char* more, size_t units, char* to) {
  Marked marked;
  take_marked<scalar_name>(from, book, marks, more, units, marked);
  size_t rank = 0, end = marks + units * kUnitMarks;
  uint8_t exponents[kMark + 1] = {};
  std::memcpy(exponents, book, kFirstCodes);
  for (size_t i = 0; i < kTileElements; i += 8) {
    uint64_t codes = 0;
    for (size_t bit = 0; bit < 3; ++bit)
      codes |= kSpread[uint8_t(from[kCodesAt + bit * kCodePlaneBytes + i / 8])] << bit;
    for (size_t j = 0; j < 8; ++j) {
      const uint8_t code = uint8_t(codes >> 8 * j);
      const uint8_t exponent = code == kMark ? marked.values[std::min(rank, end)] : exponents[code];
      rank += code == kMark;
      const uint16_t element = element_of(uint8_t(from[i + j]), exponent);
      std::memcpy(to + 2 * (i + j), &element, sizeof element);
    }
  }
}

constexpr TilePath kScalar{"scalar", scalar_pack, scalar_unpack};

#if defined(__x86_64__)

// ------------------------------------------------------------------ AVX2: 32 elements at a time

#define KVDOCK_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define KVDOCK_AVX2_INLINE __attribute__((target("avx2,bmi,popcnt"), always_inline)) inline

// Orders of 8 bytes for a shuffle, by a byte that has a bit for each of them: `first` puts those with a bit in front,
// `apart` puts the first ones where the bits are, and zeros elsewhere. A branch for each marked element would be
// foreseen wrongly once or twice in 32 elements.
struct Orders {
  alignas(64) uint8_t first[256][8], apart[256][8];
};
constexpr Orders kOrders = [] {
  Orders orders{};
  for (size_t bits = 0; bits < 256; ++bits) {
    for (size_t j = 0; j < 8; ++j) orders.first[bits][j] = orders.apart[bits][j] = 0x80;
    for (size_t j = 0, found = 0; j < 8; ++j) {
      if (bits >> j & 1) {
        orders.first[bits][found] = uint8_t(j);
        orders.apart[bits][j] = uint8_t(found++);
      }
    }
  }
  return orders;
}();

KVDOCK_AVX2_INLINE __m128i eight_at(const uint8_t* at) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
}

// Exponents, or rests, of 32 elements, in their order.
KVDOCK_AVX2_INLINE __m256i packed_bytes(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
}

KVDOCK_AVX2_INLINE __m256i rests_of(__m256i elements) {
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(elements, 8), _mm256_set1_epi16(0x80)),
                         _mm256_and_si256(elements, _mm256_set1_epi16(0x7f)));
}

KVDOCK_AVX2 uint8_t avx2_pack(const char* from, const Book& book, size_t marks, char* to, char* more) {
  Marked marked;  // their exponents, then their nibbles
  size_t count = 0;
  const __m256i byte = _mm256_set1_epi16(0xff);
  for (size_t i = 0; i < kTileElements; i += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i + 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), packed_bytes(rests_of(a), rests_of(b)));
    const __m256i exponents = packed_bytes(_mm256_and_si256(_mm256_srli_epi16(a, 7), byte),
                                           _mm256_and_si256(_mm256_srli_epi16(b, 7), byte));
    __m256i code = _mm256_set1_epi8(kMark);
    for (size_t k = 0; k < kFirstCodes; ++k) {
      const __m256i is = _mm256_cmpeq_epi8(exponents, _mm256_set1_epi8(char(book.exponents[k])));
      code = _mm256_blendv_epi8(code, _mm256_set1_epi8(char(k)), is);
    }
    uint32_t planes[3];
    for (size_t bit = 0; bit < 3; ++bit) {
      planes[bit] = uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(code, int(7 - bit))));
      std::memcpy(to + kCodesAt + bit * kCodePlaneBytes + i / 8, &planes[bit], 4);
    }
    const uint32_t is_marked = planes[0] & planes[1] & planes[2];
    alignas(32) uint8_t each[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(each), exponents);
    for (size_t j = 0; j < 4; ++j) {
      const auto bits = uint8_t(is_marked >> 8 * j);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(marked.values + count),
                       _mm_shuffle_epi8(eight_at(each + 8 * j), eight_at(kOrders.first[bits])));
      count += size_t(std::popcount(bits));
    }
  }
  for (size_t i = 0; i < count; ++i) marked.values[i] = nibble_of(book.ranks[marked.values[i]]);
  return put_marked<join>(from, marks, marked, count, to, more);
}

// 16 at a time: `bytes` is a multiple of 8.
KVDOCK_AVX2 bool avx2_name(const char* pairs, size_t bytes, const Further& further, uint8_t* exponents) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(further.exponents));
  const __m128i low4 = _mm_set1_epi8(15);
  __m128i far = _mm_setzero_si128();
  for (size_t i = 0; i < bytes; i += 8) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(pairs + i));
    const __m128i even = _mm_and_si128(eight, low4), odd = _mm_and_si128(_mm_srli_epi16(eight, 4), low4);
    const __m128i nibbles = _mm_unpacklo_epi8(even, odd);
    far = _mm_or_si128(far, _mm_cmpeq_epi8(nibbles, low4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(exponents + 2 * i), _mm_shuffle_epi8(table, nibbles));
  }
  return _mm_movemask_epi8(far) != 0;
}

// The code of bit planes, of 32 elements in the order 0..7, 16..23, 8..15, 24..31: interleaving low and high bytes of
// elements, which is done within halves of a register, puts them in their order.
KVDOCK_AVX2_INLINE __m256i codes_of(const uint32_t (&planes)[3]) {
  const __m256i each = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3,
                                        3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  __m256i code = _mm256_setzero_si256();
  for (size_t i = 0; i < 3; ++i) {
    const __m256i copied = _mm256_shuffle_epi8(_mm256_set1_epi32(int(planes[i])), each);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(copied, bit), bit);
    code = _mm256_or_si256(code, _mm256_and_si256(is_set, _mm256_set1_epi8(char(1 << i))));
  }
  return code;
}

KVDOCK_AVX2 void avx2_unpack(const char* from, const uint8_t* book, size_t marks, const char* more, size_t units,
                             char* to) {
  Marked marked;
  take_marked<avx2_name>(from, book, marks, more, units, marked);
  size_t rank = 0, end = marks + units * kUnitMarks;
  alignas(16) uint8_t first[16] = {};  // marked elements have 0 here, so that what names them is added
  std::memcpy(first, book, kFirstCodes);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(first)));
  const __m256i one = _mm256_set1_epi8(1), below = _mm256_set1_epi8(0x7f);
  const __m256i sign = _mm256_set1_epi8(char(0x80));
  for (size_t i = 0; i < kTileElements; i += 32) {
    uint32_t planes[3];
    for (size_t bit = 0; bit < 3; ++bit) std::memcpy(&planes[bit], from + kCodesAt + bit * kCodePlaneBytes + i / 8, 4);
    const __m256i code = codes_of(planes);
    const __m256i rests =
        _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)), 0xd8);
    const uint32_t is_marked = planes[0] & planes[1] & planes[2];
    const uint8_t* following = marked.values + std::min(rank, end);
    rank += size_t(std::popcount(is_marked));
    __m128i parts[4];
    for (size_t j = 0; j < 4; ++j) {
      const auto bits = uint8_t(is_marked >> 8 * j);
      parts[j] = _mm_shuffle_epi8(eight_at(following), eight_at(kOrders.apart[bits]));
      following += std::popcount(bits);
    }
    // In the order of the codes.
    const __m256i further = _mm256_set_m128i(_mm_unpacklo_epi64(parts[1], parts[3]),
                                             _mm_unpacklo_epi64(parts[0], parts[2]));
    const __m256i exponents = _mm256_or_si256(_mm256_shuffle_epi8(table, code), further);
    const __m256i even = _mm256_slli_epi16(_mm256_and_si256(exponents, one), 7);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(exponents, 1), below);
    const __m256i a = _mm256_or_si256(_mm256_andnot_si256(sign, rests), even);
    const __m256i b = _mm256_or_si256(_mm256_and_si256(sign, rests), upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), _mm256_unpacklo_epi8(a, b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i + 32), _mm256_unpackhi_epi8(a, b));
  }
}

constexpr TilePath kAvx2{"avx2", avx2_pack, avx2_unpack};

// ------------------------------------------------------------------ AVX-512: 64 elements at a time

#define KVDOCK_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi,popcnt")))
#define KVDOCK_AVX512_INLINE \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi,popcnt"), always_inline)) inline

// The bits of `one` where those of `mask` are set, else those of `other`.
KVDOCK_AVX512_INLINE __m512i chosen(__m512i mask, __m512i one, __m512i other) {
  return _mm512_ternarylogic_epi64(mask, one, other, 0xca);
}

// The first `count` of 64 bits, or of 32.
KVDOCK_AVX512_INLINE uint64_t first_bits(size_t count) {
  return count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
}

KVDOCK_AVX512 void avx512_join(const uint8_t* nibbles, size_t bytes, char* to) {
  const __m512i weights = _mm512_set1_epi16(0x1001);
  for (size_t i = 0; i < bytes; i += 32) {
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(nibbles + 2 * i), weights);
    const auto used = __mmask32(first_bits(bytes - i));
    _mm256_mask_storeu_epi8(to + i, used, _mm512_cvtepi16_epi8(pairs));
  }
}

KVDOCK_AVX512 uint8_t avx512_pack(const char* from, const Book& book, size_t marks, char* to, char* more) {
  Marked nibbles;
  size_t count = 0;
  __m512i ranks[4], even = _mm512_setzero_si512();
  for (size_t k = 0; k < 4; ++k) ranks[k] = _mm512_loadu_si512(book.ranks + 64 * k);
  alignas(64) uint8_t numbers[64];
  for (size_t k = 0; k < 64; ++k) numbers[k] = uint8_t(2 * k);
  even = _mm512_load_si512(numbers);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
  const __m512i sign = _mm512_set1_epi8(char(0x80)), upper = _mm512_set1_epi8(char(0xfe));
  for (size_t i = 0; i < kTileElements; i += 64) {
    const __m512i a = _mm512_loadu_si512(from + 2 * i), b = _mm512_loadu_si512(from + 2 * i + 64);
    const __m512i lows = _mm512_permutex2var_epi8(a, even, b), highs = _mm512_permutex2var_epi8(a, odd, b);
    _mm512_storeu_si512(to + i, chosen(sign, highs, lows));
    const __m512i exponents = chosen(upper, _mm512_slli_epi16(highs, 1), _mm512_srli_epi16(lows, 7));
    const __m512i low = _mm512_permutex2var_epi8(ranks[0], exponents, ranks[1]);
    const __m512i high = _mm512_permutex2var_epi8(ranks[2], exponents, ranks[3]);
    const __m512i rank = _mm512_mask_blend_epi8(_mm512_movepi8_mask(exponents), low, high);
    const __m512i code = _mm512_min_epu8(rank, _mm512_set1_epi8(kMark));
    for (size_t bit = 0; bit < 3; ++bit) {
      const uint64_t plane = _mm512_test_epi8_mask(code, _mm512_set1_epi8(char(1 << bit)));
      std::memcpy(to + kCodesAt + bit * kCodePlaneBytes + i / 8, &plane, 8);
    }
    const uint64_t is_marked = _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(kMark));
    const __m512i named = _mm512_min_epu8(_mm512_sub_epi8(rank, _mm512_set1_epi8(kFirstCodes)),
                                          _mm512_set1_epi8(kFarNibble));
    _mm512_storeu_si512(nibbles.values + count, _mm512_maskz_compress_epi8(is_marked, named));
    count += size_t(std::popcount(is_marked));
  }
  return put_marked<avx512_join>(from, marks, nibbles, count, to, more);
}

KVDOCK_AVX512 bool avx512_name(const char* pairs, size_t bytes, const Further& further, uint8_t* exponents) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(further.exponents)));
  const __m512i low4 = _mm512_set1_epi8(15);
  uint64_t far = 0;
  for (size_t i = 0; i < bytes; i += 32) {
    const __m256i loaded = _mm256_maskz_loadu_epi8(__mmask32(first_bits(bytes - i)), pairs + i);
    const __m512i wide = _mm512_cvtepu8_epi16(loaded);
    const __m512i nibbles = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), low4);
    far |= _mm512_cmpeq_epi8_mask(nibbles, low4);
    _mm512_storeu_si512(exponents + 2 * i, _mm512_shuffle_epi8(table, nibbles));
  }
  return far != 0;
}

KVDOCK_AVX512 void avx512_unpack(const char* from, const uint8_t* book, size_t marks, const char* more, size_t units,
                                 char* to) {
  Marked marked;
  take_marked<avx512_name>(from, book, marks, more, units, marked);
  size_t rank = 0, end = marks + units * kUnitMarks;
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(book)));
  const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2), four = _mm512_set1_epi8(4);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  // Words of 8 bytes, so that interleaving bytes within the quarters of a register puts elements in their order.
  const __m512i apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (size_t i = 0; i < kTileElements; i += 64) {
    uint64_t planes[3];
    for (size_t bit = 0; bit < 3; ++bit) planes[bit] = load64(from + kCodesAt + bit * kCodePlaneBytes + i / 8);
    const uint64_t is_marked = planes[0] & planes[1] & planes[2];
    const __m512i following = _mm512_loadu_si512(marked.values + std::min(rank, end));
    rank += size_t(std::popcount(is_marked));
    __m512i code = _mm512_maskz_mov_epi8(planes[0], one);
    code = _mm512_mask_add_epi8(code, planes[1], code, two);
    code = _mm512_mask_add_epi8(code, planes[2], code, four);
    const __m512i exponents = _mm512_permutexvar_epi64(
        apart, _mm512_mask_expand_epi8(_mm512_shuffle_epi8(table, code), is_marked, following));
    const __m512i rests = _mm512_permutexvar_epi64(apart, _mm512_loadu_si512(from + i));
    const __m512i low = chosen(sign, _mm512_slli_epi16(exponents, 7), rests);
    const __m512i high = chosen(sign, rests, _mm512_srli_epi16(exponents, 1));
    _mm512_storeu_si512(to + 2 * i, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + 2 * i + 64, _mm512_unpackhi_epi8(low, high));
  }
}

constexpr TilePath kAvx512{"avx512", avx512_pack, avx512_unpack};

#endif

std::vector<const TilePath*> detect() {
  std::vector<const TilePath*> paths;
#if defined(__x86_64__)
  if (cpu().avx512) paths.push_back(&kAvx512);
  if (cpu().avx2) paths.push_back(&kAvx2);
#endif
  paths.push_back(&kScalar);
  return paths;
}

const std::vector<const TilePath*>& available() {
  static const std::vector<const TilePath*> paths = detect();
  return paths;
}

std::atomic<const TilePath*> g_chosen{nullptr};  // null: the fastest. The paths are constants, so relaxed is enough

}  // namespace

const TilePath& tile_path() {
  const TilePath* chosen = g_chosen.load(std::memory_order_relaxed);
  return chosen != nullptr ? *chosen : *available().front();
}

std::vector<std::string> tile_paths() {
  std::vector<std::string> names;
  for (const TilePath* path : available()) names.emplace_back(path->name);
  return names;
}

bool use_tile_path(const std::string& name) {
  const TilePath* found = nullptr;
  for (const TilePath* path : available())
    if (name == path->name) found = path;
  const bool usable = found != nullptr || name.empty();
  if (usable) g_chosen.store(found, std::memory_order_relaxed);
  return usable;
}

}  // namespace kvdock
