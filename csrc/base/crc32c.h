// CRC-32C (Castagnoli, reflected, polynomial 0x82f63b78): guards headers and the table's bodies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdock {

// `seed` is the CRC of what came before: crc32c(b, m, crc32c(a, n)) covers a then b.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed = 0);

}  // namespace kvdock
