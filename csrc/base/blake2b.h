// BLAKE2b (RFC 7693) with digests of 32 bytes and a personalisation, without key and salt.
//
// Ownership: values. Thread safety: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvdock {

class Blake2b {
 public:
  static constexpr size_t kDigestBytes = 32;

  // `person`: at most 16 bytes; digests with different ones differ.
  explicit Blake2b(std::string_view person);
  void update(std::string_view data);
  std::array<char, kDigestBytes> digest();  // of all data so far; the object is used up

 private:
  static constexpr size_t kBlockBytes = 128;
  void compress(bool is_last);

  std::array<uint64_t, 8> state_;
  std::array<char, kBlockBytes> block_;
  size_t held_ = 0;    // bytes in block_
  uint64_t total_ = 0;  // bytes before block_, and after compress() those in it
};

}  // namespace kvdock
