// The layout of a segment of the pool in memory. This file alone describes it.
//
//   0                    data_offset                                   bytes
//   | SegmentHeader | 0…0 | slots, each at a multiple of kSlotAlign …    |
//
// Ownership: the server that creates the segment writes the header once; engines only read it.
// Process safety: `version` is written last, with release order, and read first, with acquire order (SYNC POINT
// version), so a reader that sees it sees the other fields too. A fresh object is all zeros, so version 0 means
// "not ready yet". Afterwards the header is constant.
// Invariant: `crc` covers every field before it except `version`. A reader can tell a header that is
// still being written, one of another build, and a damaged one apart.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/crc32c.h"

namespace kvdock {

inline constexpr uint64_t kSlotAlign = 4096;
inline constexpr uint64_t kSegmentHeaderBytes = 4096;
inline constexpr uint64_t kSegmentMagic = 0x6765736b636f6476;  // "vdockseg", little-endian

struct SegmentHeader {
  uint64_t magic;
  uint32_t version;  // kSegmentVersion; 0 until all other fields are written
  uint32_t header_bytes;
  uint64_t pool_id;
  uint64_t bytes;        // of the whole object
  uint64_t data_offset;  // first slot byte, from the start of the object
  uint64_t slot_align;
  uint32_t segment;
  uint32_t crc;
};

static_assert(sizeof(SegmentHeader) == 56);
static_assert(offsetof(SegmentHeader, magic) == 0);
static_assert(offsetof(SegmentHeader, version) == 8);  // never moves: other builds read it
static_assert(offsetof(SegmentHeader, crc) == sizeof(SegmentHeader) - 4);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

// The version contains sizes of structures, so builds that disagree about the layout refuse each other's segments.
inline constexpr uint32_t kSegmentFormat = 1;
inline constexpr uint32_t kSegmentVersion =
    kSegmentFormat << 24 | uint32_t(sizeof(SegmentHeader)) << 12 | uint32_t(kSegmentHeaderBytes >> 6);

inline uint32_t segment_crc(SegmentHeader header) {
  header.version = 0;
  return crc32c(&header, offsetof(SegmentHeader, crc));
}

// REQUIRES: the object is fresh, so that its version is 0 until the last store here.
void write_segment_header(void* base, uint64_t bytes, uint64_t pool_id, uint32_t segment, uint64_t data_offset);

enum class HeaderState { ok, not_ready, wrong_version, corrupt };

// Copies the header to *out and checks the copy. `bytes` is the size of the object as the reader sees it.
inline HeaderState read_segment_header(const void* base, uint64_t bytes, SegmentHeader* out) {
  auto* shared = static_cast<SegmentHeader*>(const_cast<void*>(base));
  const uint32_t version =
      std::atomic_ref<uint32_t>(shared->version).load(std::memory_order_acquire);  // SYNC POINT version
  *out = *shared;
  out->version = version;
  if (version == 0) return HeaderState::not_ready;
  if (out->magic != kSegmentMagic) return HeaderState::corrupt;
  if (version != kSegmentVersion) return HeaderState::wrong_version;
  const bool sound = out->crc == segment_crc(*out) && out->bytes == bytes && out->slot_align == kSlotAlign &&
                     out->data_offset >= sizeof(SegmentHeader) && out->data_offset % kSlotAlign == 0 &&
                     out->data_offset < bytes;
  return sound ? HeaderState::ok : HeaderState::corrupt;
}

}  // namespace kvdock
