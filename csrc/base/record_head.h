// The heads of records of the tier on disk, as record_head() in kvdock/tiers/disk/log.py has them: where a record's
// page begins, its part, its place and two checksums. Numbers are little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvdock {

struct RecordHead {
  static constexpr size_t kKey = 86, kMark = 16, kBytes = 157, kPage = 4096;

  // What a record of `length` bytes takes, with its page.
  static constexpr uint64_t taken(uint64_t length) { return kPage + (length + kPage - 1) / kPage * kPage; }

  // `key`: as key_of() in the same file makes it. `mark`: that of the segment.
  static std::array<char, kBytes> of(const char* key, uint64_t length, uint64_t checksum, const char* mark,
                                     uint64_t offset) {
    std::array<char, kBytes> head{};
    char* at = head.data();
    std::memcpy(at, "kvdock\0\2\2\0", 10);              // magic, version
    std::memcpy(at + 10, key + 64, 6);                   // group, writer, deletion
    std::memcpy(at + 16, key, 64);                       // namespace, key
    std::memcpy(at + 80, &length, 8);
    std::memcpy(at + 88, &checksum, 8);
    std::memcpy(at + 96, key + 70, 16);                  // birth, generation
    const uint32_t of_header = crc32(at, 124);
    std::memcpy(at + 124, &of_header, 4);
    std::memcpy(at + 128, mark, kMark);
    std::memcpy(at + 144, &offset, 8);
    at[152] = 1;                                         // a part, which was not deleted
    const uint32_t of_head = crc32(at + 124, 29, of_header);
    std::memcpy(at + 153, &of_head, 4);
    return head;
  }

 private:
  using Tables = std::array<std::array<uint32_t, 256>, 4>;

  static constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0);
      tables[0][i] = value;
    }
    for (size_t t = 1; t < tables.size(); ++t)
      for (size_t i = 0; i < 256; ++i) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
    return tables;
  }

  // zlib's CRC-32. `seed`: of what came before.
  static uint32_t crc32(const char* data, size_t bytes, uint32_t seed = 0) {
    static constexpr Tables tables = make_tables();
    uint32_t crc = ~seed;
    for (; bytes >= 4; data += 4, bytes -= 4) {
      uint32_t word;
      std::memcpy(&word, data, 4);
      crc ^= word;
      crc = tables[3][crc & 255] ^ tables[2][crc >> 8 & 255] ^ tables[1][crc >> 16 & 255] ^ tables[0][crc >> 24];
    }
    for (; bytes; ++data, --bytes) crc = (crc >> 8) ^ tables[0][(crc ^ uint8_t(*data)) & 255];
    return ~crc;
  }
};

}  // namespace kvdock
