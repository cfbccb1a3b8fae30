// Uses SSE4.2 where the processor has it, else a table.
#include "base/crc32c.h"
#include "base/cpu.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvdock {

namespace {

uint32_t crc_table(const uint8_t* p, size_t n, uint32_t crc) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  for (; n; --n) crc = table[(crc ^ *p++) & 255] ^ crc >> 8;
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2,crc32"))) uint32_t crc_hardware(const uint8_t* p, size_t n, uint32_t crc) {
  uint64_t c = crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    c = _mm_crc32_u64(c, v);
  }
  return crc_table(p, n, static_cast<uint32_t>(c));
}
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) {
  auto* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (cpu().sse42) return ~crc_hardware(p, bytes, ~seed);
#endif
  return ~crc_table(p, bytes, ~seed);
}

}  // namespace kvdock
