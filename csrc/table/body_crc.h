// CRCs over the bodies that csrc/table/layout.h describes, without the fields that may change while they are live.
#pragma once

#include <cstddef>

#include "base/crc32c.h"
#include "table/layout.h"

namespace kvdock {

template <class Body>
uint32_t span_crc(const Body& b, size_t from, size_t to, uint32_t seed = 0) {
  return crc32c(reinterpret_cast<const uint8_t*>(&b) + from, to - from, seed);
}

inline uint32_t body_crc(const TableHeader& h) {
  return span_crc(h, offsetof(TableHeader, geometry), offsetof(TableHeader, incarnation));
}

inline uint32_t body_crc(const Namespace& ns) {
  return span_crc(ns, offsetof(Namespace, chunk_tokens), offsetof(Namespace, left_ms));
}

inline uint32_t body_crc(const Session& s) {
  return span_crc(s, offsetof(Session, nonce), offsetof(Session, filed));
}

inline uint32_t body_crc(const Member& m) {
  return span_crc(m, offsetof(Member, session), offsetof(Member, heartbeat_ms));
}

inline uint32_t body_crc(const Grant& g) { return span_crc(g, offsetof(Grant, kind), offsetof(Grant, holders)); }

inline uint32_t body_crc(const Record& r, uint64_t generation) {
  uint32_t crc = crc32c(&generation, sizeof generation, 0);
  crc = span_crc(r, offsetof(Record, key), offsetof(Record, temp_seen), crc);
  crc = span_crc(r, offsetof(Record, space), offsetof(Record, last_used), crc);
  for (uint32_t p = 0; p < r.part_count; ++p) crc = span_crc(r.parts[p], 0, offsetof(StoredPart, committed), crc);
  return crc;
}

}  // namespace kvdock
