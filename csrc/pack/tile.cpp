#include "pack/tile.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/cpu.h"
#include "base/errors.h"

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

uint64_t load64(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// ------------------------------------------------------------------ marked elements, alike in all paths

// The exponents of marked elements in their order; what lies beyond the reserve is of no use.
struct MarkedExponents {
  alignas(64) uint8_t values[kTileElements + 64];
  size_t count = 0;
};

// Writes their nibbles and spares, and no spill. False: there are too many.
bool write_marked(const MarkedExponents& marked, const Book& book, size_t marks, char* tile) {
  auto* nibbles = reinterpret_cast<uint8_t*>(tile) + kNibblesAt;
  uint8_t* const spares = nibbles + marks / 2;
  std::memset(nibbles, 0, marks / 2 + kTrailerBytes);
  if (marked.count > marks) return false;
  size_t far = 0;
  for (size_t i = 0; i < marked.count; ++i) {
    const uint8_t rank = book.ranks[marked.values[i]];
    uint8_t nibble = uint8_t(rank - kFirstCodes);
    if (rank == Book::kFar) {
      if (far == kSpares) return false;
      spares[far++] = marked.values[i];
      nibble = kFarNibble;
    }
    nibbles[i / 2] |= uint8_t(nibble << 4 * (i % 2));
  }
  return true;
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
void put_spares(const char* tile, size_t marks, uint8_t* values) {
  const auto* nibbles = reinterpret_cast<const uint8_t*>(tile) + kNibblesAt;
  size_t far = 0;
  for (size_t i = 0; i < marks && far < kSpares; ++i)
    if ((nibbles[i / 2] >> 4 * (i % 2) & 15) == kFarNibble) values[i] = nibbles[marks / 2 + far++];
}

// Reads the exponents of the reserve, used or not, and 64 zeros after them.
void read_marked(const char* tile, const uint8_t* book, size_t marks, uint8_t* values) {
  const Further further(book);
  const auto* nibbles = reinterpret_cast<const uint8_t*>(tile) + kNibblesAt;
  for (size_t i = 0; i < marks; ++i) values[i] = further.exponents[nibbles[i / 2] >> 4 * (i % 2) & 15];
  std::memset(values + marks, 0, 64);
  put_spares(tile, marks, values);
}

// ------------------------------------------------------------------ scalar

bool scalar_pack(const char* from, const Book& book, size_t marks, char* to) {
  MarkedExponents marked;
  for (size_t i = 0; i < kTileElements; i += 64) {
    uint64_t planes[3] = {};
    for (size_t j = 0; j < 64; ++j) {
      uint16_t element;
      std::memcpy(&element, from + 2 * (i + j), sizeof element);
      to[i + j] = char(rest_of(element));
      const uint8_t exponent = exponent_of(element), rank = book.ranks[exponent];
      const uint64_t code = std::min(rank, kMark);
      if (code == kMark) marked.values[marked.count++] = exponent;
      for (size_t bit = 0; bit < 3; ++bit) planes[bit] |= (code >> bit & 1) << j;
    }
    for (size_t bit = 0; bit < 3; ++bit) std::memcpy(to + kCodesAt + bit * kCodePlaneBytes + i / 8, &planes[bit], 8);
  }
  return write_marked(marked, book, marks, to);
}

void scalar_unpack(const char* from, const uint8_t* book, size_t marks, char* to) {
  MarkedExponents marked;
  read_marked(from, book, marks, marked.values);
  size_t rank = 0;
  for (size_t i = 0; i < kTileElements; i += 64) {
    uint64_t planes[3];
    for (size_t bit = 0; bit < 3; ++bit) planes[bit] = load64(from + kCodesAt + bit * kCodePlaneBytes + i / 8);
    for (size_t j = 0; j < 64; ++j) {
      const auto code = uint8_t((planes[0] >> j & 1) | (planes[1] >> j & 1) << 1 | (planes[2] >> j & 1) << 2);
      const uint8_t exponent = code == kMark ? marked.values[std::min(rank++, marks)] : book[code];
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

// Exponents, or rests, of 32 elements, in their order.
KVDOCK_AVX2_INLINE __m256i packed_bytes(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
}

KVDOCK_AVX2_INLINE __m256i rests_of(__m256i elements) {
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(elements, 8), _mm256_set1_epi16(0x80)),
                         _mm256_and_si256(elements, _mm256_set1_epi16(0x7f)));
}

KVDOCK_AVX2_INLINE __m256i elements_of(__m256i rests, __m256i exponents) {
  return _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(rests, _mm256_set1_epi16(0x80)), 8),
                                         _mm256_and_si256(rests, _mm256_set1_epi16(0x7f))),
                         _mm256_slli_epi16(exponents, 7));
}

// As read_marked() does.
KVDOCK_AVX2_INLINE void avx2_read_marked(const char* tile, const uint8_t* book, size_t marks, uint8_t* values) {
  const Further further(book);
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(further.exponents));
  const __m128i low4 = _mm_set1_epi8(15);
  __m128i far = _mm_setzero_si128();
  for (size_t i = 0; i < marks; i += 16) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(tile + kNibblesAt + i / 2));
    const __m128i even = _mm_and_si128(pairs, low4), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), low4);
    const __m128i nibbles = _mm_unpacklo_epi8(even, odd);
    far = _mm_or_si128(far, _mm_cmpeq_epi8(nibbles, low4));
    _mm_store_si128(reinterpret_cast<__m128i*>(values + i), _mm_shuffle_epi8(table, nibbles));
  }
  std::memset(values + marks, 0, 64);
  if (_mm_movemask_epi8(far)) put_spares(tile, marks, values);
}

KVDOCK_AVX2 bool avx2_pack(const char* from, const Book& book, size_t marks, char* to) {
  MarkedExponents marked;
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
    for (uint32_t left = planes[0] & planes[1] & planes[2]; left; left &= left - 1) {
      uint16_t element;
      std::memcpy(&element, from + 2 * (i + size_t(std::countr_zero(left))), sizeof element);
      marked.values[marked.count++] = exponent_of(element);
    }
  }
  return write_marked(marked, book, marks, to);
}

// Byte j is 0xff where bit j of `bits` is set.
KVDOCK_AVX2_INLINE __m256i spread(uint32_t bits) {
  const __m256i each = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3,
                                        3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i copied = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), each);
  return _mm256_cmpeq_epi8(_mm256_and_si256(copied, bit), bit);
}

KVDOCK_AVX2 void avx2_unpack(const char* from, const uint8_t* book, size_t marks, char* to) {
  MarkedExponents marked;
  avx2_read_marked(from, book, marks, marked.values);
  size_t rank = 0;
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(book)));
  for (size_t i = 0; i < kTileElements; i += 32) {
    uint32_t planes[3];
    __m256i code = _mm256_setzero_si256();
    for (size_t bit = 0; bit < 3; ++bit) {
      std::memcpy(&planes[bit], from + kCodesAt + bit * kCodePlaneBytes + i / 8, 4);
      code = _mm256_or_si256(code, _mm256_and_si256(spread(planes[bit]), _mm256_set1_epi8(char(1 << bit))));
    }
    alignas(32) uint8_t exponents[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(exponents), _mm256_shuffle_epi8(table, code));
    for (uint32_t left = planes[0] & planes[1] & planes[2]; left; left &= left - 1)
      exponents[std::countr_zero(left)] = marked.values[std::min(rank++, marks)];
    for (size_t half = 0; half < 32; half += 16) {
      const auto* rests = reinterpret_cast<const __m128i*>(from + i + half);
      const auto* those = reinterpret_cast<const __m128i*>(exponents + half);
      const __m256i elements =
          elements_of(_mm256_cvtepu8_epi16(_mm_loadu_si128(rests)), _mm256_cvtepu8_epi16(_mm_load_si128(those)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * (i + half)), elements);
    }
  }
}

constexpr TilePath kAvx2{"avx2", avx2_pack, avx2_unpack};

// ------------------------------------------------------------------ AVX-512: 64 elements at a time

#define KVDOCK_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi,popcnt")))
#define KVDOCK_AVX512_INLINE \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi,popcnt"), always_inline)) inline

KVDOCK_AVX512_INLINE __m512i bytes_of(__m512i low, __m512i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(low)), _mm512_cvtepi16_epi8(high), 1);
}

KVDOCK_AVX512_INLINE __m512i rests_of(__m512i elements) {
  return _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(elements, 8), _mm512_set1_epi16(0x80)),
                         _mm512_and_si512(elements, _mm512_set1_epi16(0x7f)));
}

KVDOCK_AVX512_INLINE __m512i elements512_of(__m256i rests, __m256i exponents) {
  const __m512i rest = _mm512_cvtepu8_epi16(rests), exponent = _mm512_cvtepu8_epi16(exponents);
  return _mm512_or_si512(_mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(rest, _mm512_set1_epi16(0x80)), 8),
                                         _mm512_and_si512(rest, _mm512_set1_epi16(0x7f))),
                         _mm512_slli_epi16(exponent, 7));
}

KVDOCK_AVX512 bool avx512_pack(const char* from, const Book& book, size_t marks, char* to) {
  MarkedExponents marked;
  __m512i ranks[4];
  for (size_t k = 0; k < 4; ++k) ranks[k] = _mm512_loadu_si512(book.ranks + 64 * k);
  for (size_t i = 0; i < kTileElements; i += 64) {
    const __m512i a = _mm512_loadu_si512(from + 2 * i), b = _mm512_loadu_si512(from + 2 * i + 64);
    _mm512_storeu_si512(to + i, bytes_of(rests_of(a), rests_of(b)));
    const __m512i exponents = bytes_of(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7));
    const __m512i low = _mm512_permutex2var_epi8(ranks[0], exponents, ranks[1]);
    const __m512i high = _mm512_permutex2var_epi8(ranks[2], exponents, ranks[3]);
    const __m512i rank = _mm512_mask_blend_epi8(_mm512_movepi8_mask(exponents), low, high);
    const __m512i code = _mm512_min_epu8(rank, _mm512_set1_epi8(kMark));
    uint64_t planes[3];
    for (size_t bit = 0; bit < 3; ++bit) {
      planes[bit] = _mm512_test_epi8_mask(code, _mm512_set1_epi8(char(1 << bit)));
      std::memcpy(to + kCodesAt + bit * kCodePlaneBytes + i / 8, &planes[bit], 8);
    }
    const uint64_t is_marked = planes[0] & planes[1] & planes[2];
    _mm512_storeu_si512(marked.values + marked.count, _mm512_maskz_compress_epi8(is_marked, exponents));
    marked.count += size_t(std::popcount(is_marked));
  }
  return write_marked(marked, book, marks, to);
}

KVDOCK_AVX512 void avx512_unpack(const char* from, const uint8_t* book, size_t marks, char* to) {
  MarkedExponents marked;
  avx2_read_marked(from, book, marks, marked.values);
  size_t rank = 0;
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(book)));
  for (size_t i = 0; i < kTileElements; i += 64) {
    uint64_t planes[3];
    __m512i code = _mm512_setzero_si512();
    for (size_t bit = 0; bit < 3; ++bit) {
      planes[bit] = load64(from + kCodesAt + bit * kCodePlaneBytes + i / 8);
      code = _mm512_or_si512(code, _mm512_maskz_set1_epi8(planes[bit], char(1 << bit)));
    }
    const uint64_t is_marked = planes[0] & planes[1] & planes[2];
    const __m512i following = _mm512_loadu_si512(marked.values + std::min(rank, marks));
    const __m512i exponents = _mm512_mask_expand_epi8(_mm512_shuffle_epi8(table, code), is_marked, following);
    rank += size_t(std::popcount(is_marked));
    const __m512i rests = _mm512_loadu_si512(from + i);
    _mm512_storeu_si512(to + 2 * i,
                        elements512_of(_mm512_castsi512_si256(rests), _mm512_castsi512_si256(exponents)));
    _mm512_storeu_si512(to + 2 * i + 64, elements512_of(_mm512_extracti64x4_epi64(rests, 1),
                                                        _mm512_extracti64x4_epi64(exponents, 1)));
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

Book make_book(std::span<const uint8_t, kBookExponents> exponents) {
  Book book{};
  std::memset(book.ranks, Book::kFar, sizeof book.ranks);
  for (size_t i = 0; i < kBookExponents; ++i) {
    uint8_t& rank = book.ranks[exponents[i]];
    if (rank != Book::kFar) refuse(Refusal::copy, "exponents of a book", int(exponents[i]) , "each of them once");
    rank = uint8_t(i);
    book.exponents[i] = exponents[i];
  }
  return book;
}

Book learn_book(std::span<const uint64_t, 256> counts) {
  uint8_t order[256];
  std::iota(std::begin(order), std::end(order), uint8_t(0));
  std::stable_sort(std::begin(order), std::end(order), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
  return make_book(std::span<const uint8_t, kBookExponents>(order, kBookExponents));
}

void count_exponents(const char* tile, std::span<uint64_t, 256> counts) {
  for (size_t i = 0; i < kTileElements; ++i) {
    uint16_t element;
    std::memcpy(&element, tile + 2 * i, sizeof element);
    ++counts[exponent_of(element)];
  }
}

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
