// Limits on which several parts of kvdock must agree. bind/module.cpp exports them to Python, so that each is written
// here and nowhere else. A change of one changes stored or sent data: see docs/understand/lifetime_protocol.md.
//
// Only constants, in C++17: nvcc compiles this file too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvdock {

inline constexpr uint32_t kKeyBytes = 32;       // of a chunk's key, and of a namespace's digest
inline constexpr uint32_t kIdBytes = 16;        // of the id of a request, store, session or member
inline constexpr uint32_t kMaxKeys = 4096;      // in one lookup
inline constexpr uint32_t kMaxStoreKeys = 1024; // in one store, which costs several times as much as a lookup
inline constexpr uint32_t kMaxGroups = 16;      // KV groups of a namespace
inline constexpr uint32_t kMaxRanks = 128;      // writers of a chunk, readers of a lease
inline constexpr uint32_t kMaxSegments = 4096;  // of a pool, at one time
inline constexpr uint32_t kSegmentIds = 1u << 31;  // ids are below it, rise, and are never used again

inline constexpr int8_t kMostPriority = 100;        // the highest that a hint may give; the lowest is -kMostPriority
inline constexpr int8_t kConversationEnded = -101;  // of chunks that no request is expected to ask for again

// The checksum of a part: docs/understand/lifetime_protocol.md#checksum.
inline constexpr uint64_t kChecksumPrime = (uint64_t{1} << 61) - 1;
inline constexpr size_t kChecksumStripeBytes = 4096;

}  // namespace kvdock
