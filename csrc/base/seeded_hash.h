// Hashes for tables of what callers name. They differ from process to process, so that nobody can choose names that
// fall together, which would make a table a list.
#pragma once

#include <sys/random.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>

namespace kvdock {

using HashSeed = std::array<uint64_t, 4>;

inline HashSeed random_hash_seed() {
  HashSeed seed;
  if (getrandom(seed.data(), sizeof seed, 0) != ssize_t{sizeof seed})
    throw std::system_error(errno, std::generic_category(), "getrandom");
  return seed;
}
inline const HashSeed kHashSeed = random_hash_seed();

constexpr uint64_t multiplied(uint64_t a, uint64_t b) {
  __extension__ using Product = unsigned __int128;
  Product product = Product{a} * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Of 32 bytes and a number.
inline uint64_t seeded_hash(const uint8_t* bytes, uint64_t number) {
  std::array<uint64_t, 4> word;
  std::memcpy(word.data(), bytes, sizeof word);
  const HashSeed& seed = kHashSeed;
  return multiplied(word[0] ^ seed[0], word[1] ^ seed[1]) ^ multiplied(word[2] ^ seed[2] ^ number, word[3] ^ seed[3]);
}

struct SeededHash {  // of numbers, for std::unordered_map
  size_t operator()(uint64_t number) const { return multiplied(number ^ kHashSeed[0], kHashSeed[1] | 1); }
};

}  // namespace kvdock
