// The checksum of a part (lifetime protocol, section 7), and the loops that hash bytes while moving them.
//
//   part → stripes of 4096 bytes, the last padded with zeros
//   stripe → a, b: NH sums under two keys (level one: vector loops, one implementation per CpuPath)
//   part → Σ over stripes of halves of a and b times keys, mod p = 2^61 - 1 (level two)
//
// Thread safety: keys are immutable once published. A reader holds the table it started with, so a
//   longer table may replace it at any time.
// Invariant: all paths give the same sums and move the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvdock {

inline constexpr size_t kStripeBytes = 4096;
inline constexpr uint64_t kPrime = (uint64_t(1) << 61) - 1;

inline size_t stripes_of(size_t bytes) { return (bytes + kStripeBytes - 1) / kStripeBytes; }

struct ChecksumKeys {
  alignas(64) uint32_t first[1024];   // k
  alignas(64) uint32_t second[1024];  // k'
  std::vector<uint64_t> level2;       // four a stripe, each < 2^61

  size_t stripes() const { return level2.size() / 4; }
};

// nh: k, then k' (8192 bytes); level2: 32 bytes a stripe. A table no longer than the present one is dropped.
void set_checksum_keys(const char* nh, const char* level2, size_t stripes);

// The keys, long enough for `stripes`. Throws Refused{copy} when they are not.
std::shared_ptr<const ChecksumKeys> checksum_keys(size_t stripes);

// Partial NH sums of one stripe. Which lane holds what is a path's own affair: only the totals count.
struct alignas(64) StripeSums {
  uint64_t a[8];
  uint64_t b[8];
};

// Hashes `bytes` (a multiple of 16) at `from` into `sums`, and stores the very registers that were
// hashed at `to`. `first`, `second`: the keys at this position of the stripe. `ahead`: what will be
// read next, to be brought nearer; any address will do. REQUIRES: to is 16-byte aligned (hash ignores it).
using SpanLoop = void (*)(const char* from, char* to, size_t bytes, const uint32_t* first, const uint32_t* second,
                          const char* ahead, StripeSums* sums);

struct CpuPath {
  const char* name;
  SpanLoop copy;  // non-temporal stores: sfence() before anyone else may look
  SpanLoop hash;
};

// The fastest path this processor has, or the one chosen by use_cpu_path.
const CpuPath& cpu_path();
std::vector<std::string> cpu_paths();
// For tests and measurements. Returns false when this processor lacks it. "" goes back to the fastest.
bool use_cpu_path(const std::string& name);
void store_fence();

// Level two over the stripes of one part, or of a share of it: shares add up mod p.
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
  return sum >= kPrime ? sum - kPrime : sum;
}

// Hashes the zeros that pad a stripe of which `used` bytes (a multiple of 16) are real.
void hash_padding(const CpuPath& path, const ChecksumKeys& keys, size_t used, StripeSums* sums);

// Checksum of plain bytes of any length and alignment.
// Of the share that begins at a stripe. `data`, `bytes`: of the whole part.
uint64_t checksum(const char* data, size_t bytes, size_t first_stripe = 0);

}  // namespace kvdock
