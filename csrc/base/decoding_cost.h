// What it costs to decode a body of JSON or MessagePack, before any of its values is made. Objects cost far more than
// the bytes that they are made of: a list of a million tokens has five megabytes and takes 40 ms.
//
// The unit is a small number, some 15 ns. A list or map costs four of them, and a number of eight bytes two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdock {

// The number that a big-endian field of `bytes` bytes has; the bytes beyond `end` count as zero.
inline uint64_t big_endian(const uint8_t* at, const uint8_t* end, int bytes) {
  uint64_t out = 0;
  for (int i = 0; i < bytes; ++i) out = out << 8 | (at + i < end ? at[i] : 0);
  return out;
}

// Whether decoding a MessagePack body costs at most `limit`. A container costs what its head announces, whether or not
// the body goes on. The decoder refuses a body that is cut off or malformed; it costs what comes before that point.
inline bool packed_costs_within(const uint8_t* at, const uint8_t* end, uint64_t limit) {
  uint64_t cost = 1, values = 0, announced = 1;
  while (at < end && cost <= limit && values < announced) {
    const uint8_t head = *at++;
    ++values;
    uint64_t skipped = 0, children = 0;
    bool is_container = (head & 0xe0) == 0x80;
    if (head >= 0x80 && head <= 0x8f) children = 2 * (head & 0x0f);
    else if (head >= 0x90 && head <= 0x9f) children = head & 0x0f;
    else if (head >= 0xa0 && head <= 0xbf) skipped = head & 0x1f;
    else if (head >= 0xc4 && head <= 0xc9) {  // bin and ext, whose length has 1, 2 or 4 bytes
      const bool is_ext = head >= 0xc7;
      const int width = 1 << (head - (is_ext ? 0xc7 : 0xc4));
      skipped = width + big_endian(at, end, width) + is_ext;
    } else if (head >= 0xca && head <= 0xcb) skipped = head == 0xca ? 4 : 8;
    else if (head >= 0xcc && head <= 0xd3) {  // integers
      skipped = uint64_t{1} << (head & 3);
      cost += skipped == 8;
    } else if (head >= 0xd4 && head <= 0xd8) skipped = 1 + (uint64_t{1} << (head - 0xd4));
    else if (head >= 0xd9 && head <= 0xdb) {
      const int width = 1 << (head - 0xd9);
      skipped = width + big_endian(at, end, width);
    } else if (head >= 0xdc) {
      if (head >= 0xe0) continue;  // a negative integer of this byte alone
      const int width = head & 1 ? 4 : 2;
      children = big_endian(at, end, width) * (head >= 0xde ? 2 : 1);
      skipped = width;
      is_container = true;
    }
    announced += children;
    cost += children + 3 * is_container;
    if (skipped > uint64_t(end - at)) break;
    at += skipped;
  }
  return cost <= limit;
}

// The same for JSON, as far as its punctuation tells: that of strings counts too. Within a slice the loop has no
// branch, so that the compiler makes it wide.
inline bool json_costs_within(const uint8_t* at, const uint8_t* end, uint64_t limit) {
  constexpr ptrdiff_t kSlice = 4096;
  uint64_t cost = 1;
  while (at < end && cost <= limit) {
    const uint8_t* const stop = end - at > kSlice ? at + kSlice : end;
    uint32_t found = 0;
    for (; at < stop; ++at) found += uint32_t(*at == ',') + 4 * (uint32_t(*at == '[') + uint32_t(*at == '{'));
    cost += found;
  }
  return cost <= limit;
}

}  // namespace kvdock
