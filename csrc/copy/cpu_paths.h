// Loops that hash bytes while copying them, and loops that only hash: a pair (CpuPath) for each instruction set.
//
// Thread safety: all functions. Invariant: all paths give the same sums and copy the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvdock {

// Partial NH sums of one stripe. Paths may spread them over the lanes differently: only the totals count.
struct alignas(64) StripeSums {
  uint64_t a[8];
  uint64_t b[8];
};

// Hashes `bytes` (a multiple of 16) at `from` into `sums`, and stores at `to` the registers that were hashed.
// `first`, `second`: the two hash keys from this position of the stripe on. `ahead`: the address that is read next, to
// be prefetched; a wrong one does no harm. REQUIRES: to is 16-byte aligned (hash ignores it).
using SpanLoop = void (*)(const char* from, char* to, size_t bytes, const uint32_t* first, const uint32_t* second,
                          const char* ahead, StripeSums* sums);

struct CpuPath {
  const char* name;
  SpanLoop copy;  // uses non-temporal stores: store_fence() before another thread reads
  SpanLoop hash;
};

// The fastest path that this processor has, or the one chosen by use_cpu_path().
const CpuPath& cpu_path();
// Names of the paths that this processor can run, fastest first. The last, "scalar", runs anywhere.
std::vector<std::string> cpu_paths();
// Chooses a path, for tests and measurements; "" chooses the fastest. Returns false when this processor lacks the path.
bool use_cpu_path(const std::string& name);
void store_fence();

}  // namespace kvdock
