#include "base/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace kvdock {

namespace {

constexpr std::array<uint64_t, 8> kStart = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

constexpr size_t kRounds = 12;
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

uint64_t little_endian(uint64_t word) {
  return std::endian::native == std::endian::big ? __builtin_bswap64(word) : word;
}

[[gnu::always_inline]] inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + y;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

// The order of a round is known to the compiler, so that the words of `v` stay in registers: twice as fast.
template <size_t kRound>
[[gnu::always_inline]] inline void run_round(uint64_t* v, const uint64_t* m) {
  constexpr const uint8_t* at = kOrder[kRound % 10];
  mix(v[0], v[4], v[8], v[12], m[at[0]], m[at[1]]);
  mix(v[1], v[5], v[9], v[13], m[at[2]], m[at[3]]);
  mix(v[2], v[6], v[10], v[14], m[at[4]], m[at[5]]);
  mix(v[3], v[7], v[11], v[15], m[at[6]], m[at[7]]);
  mix(v[0], v[5], v[10], v[15], m[at[8]], m[at[9]]);
  mix(v[1], v[6], v[11], v[12], m[at[10]], m[at[11]]);
  mix(v[2], v[7], v[8], v[13], m[at[12]], m[at[13]]);
  mix(v[3], v[4], v[9], v[14], m[at[14]], m[at[15]]);
}

template <size_t... kRound>
[[gnu::always_inline]] inline void run_rounds(uint64_t* v, const uint64_t* m, std::index_sequence<kRound...>) {
  (run_round<kRound>(v, m), ...);
}

}  // namespace

Blake2b::Blake2b(std::string_view person) : state_(kStart) {
  uint64_t words[2] = {};
  std::memcpy(words, person.data(), std::min(person.size(), sizeof words));
  state_[0] ^= 0x01010000u ^ kDigestBytes;  // one leaf, no key
  state_[6] ^= little_endian(words[0]);
  state_[7] ^= little_endian(words[1]);
}

void Blake2b::update(std::string_view data) {
  while (!data.empty()) {
    if (held_ == kBlockBytes) compress(false);  // only once more data follows: the last block is marked as such
    const size_t taken = std::min(data.size(), kBlockBytes - held_);
    std::memcpy(block_.data() + held_, data.data(), taken);
    held_ += taken;
    data.remove_prefix(taken);
  }
}

std::array<char, Blake2b::kDigestBytes> Blake2b::digest() {
  std::fill(block_.begin() + ptrdiff_t(held_), block_.end(), char(0));
  compress(true);
  std::array<char, kDigestBytes> digest;
  for (uint64_t& word : state_) word = little_endian(word);
  std::memcpy(digest.data(), state_.data(), digest.size());
  return digest;
}

void Blake2b::compress(bool is_last) {
  total_ += held_;
  held_ = 0;
  uint64_t m[16], v[16];
  std::memcpy(m, block_.data(), sizeof m);
  for (uint64_t& word : m) word = little_endian(word);
  std::copy(state_.begin(), state_.end(), v);
  std::copy(kStart.begin(), kStart.end(), v + 8);
  v[12] ^= total_;
  if (is_last) v[14] = ~v[14];
  run_rounds(v, m, std::make_index_sequence<kRounds>());
  for (size_t i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
}

}  // namespace kvdock
