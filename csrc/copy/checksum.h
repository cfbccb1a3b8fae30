// The checksum of a part: docs/understand/lifetime_protocol.md#checksum.
//
//   part → stripes of 4096 bytes, the last padded with zeros
//   stripe → a, b: NH sums under two keys (level one: the loops of cpu_paths.h)
//   part → the sum over stripes of the halves of a and b times keys, mod p = 2^61 - 1 (level two)
//
// Thread safety: keys never change once they are set. A reader keeps the table that it started with, so a longer table
//   may replace it at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/limits.h"
#include "copy/cpu_paths.h"

namespace kvdock {

inline size_t stripes_of(size_t bytes) { return (bytes + kChecksumStripeBytes - 1) / kChecksumStripeBytes; }

struct ChecksumKeys {
  static constexpr size_t kWords = kChecksumStripeBytes / sizeof(uint32_t);
  alignas(64) uint32_t first[kWords];   // k
  alignas(64) uint32_t second[kWords];  // k'
  std::vector<uint64_t> level2;         // four for each stripe, each < 2^61

  size_t stripes() const { return level2.size() / 4; }
};

// Sets the keys. nh: k, then k' (each as long as a stripe); level2: 32 bytes for each stripe. Ignores a table unless it
// has more stripes than the present one.
void set_checksum_keys(const char* nh, const char* level2, size_t stripes);

// Keys for parts of up to `stripes` stripes. Throws Refused{copy} when the table is shorter.
std::shared_ptr<const ChecksumKeys> checksum_keys(size_t stripes);

// Computes level two over the stripes of one part, or of a share of the part. A part's sum is that of its shares mod p.
class PartSum {
 public:
  explicit PartSum(const ChecksumKeys& keys) : keys_(keys) {}
  void add(size_t stripe, const StripeSums& sums);
  uint64_t value() const;  // < p

 private:
  const ChecksumKeys& keys_;
  unsigned __int128 total_ = 0;  // each stripe adds < 2^95, so 2^33 stripes fit
};

inline uint64_t add_mod_p(uint64_t x, uint64_t y) {
  const uint64_t sum = x + y;
  return sum >= kChecksumPrime ? sum - kChecksumPrime : sum;
}

// Hashes the zeros that pad a part's last stripe. The stripe's first `used` bytes, a multiple of 16, are the part's.
void hash_padding(const CpuPath& path, const ChecksumKeys& keys, size_t used, StripeSums* sums);

// The checksum of a part of any length and alignment (`data`, `bytes`), or the share of the stripes [first, last).
uint64_t checksum(const char* data, size_t bytes, size_t first = 0, size_t last = SIZE_MAX);

// Copies bytes and hashes them, in one pass where `to` is 16-byte aligned. Returns their share of the checksum of a
// part in which they begin with the stripe `first`, and end with the end of a stripe or of the part.
uint64_t copy_hashed(const char* from, char* to, size_t bytes, size_t first);

// The same share of bytes that stay where they are.
uint64_t share_of_checksum(const char* data, size_t bytes, size_t first);

}  // namespace kvdock
