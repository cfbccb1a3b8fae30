// What the pool holds, for people: by namespace, and by prefix: a first chunk with all that goes on from it.
//
// It is counted some chunks at a time, while the pool changes. Chunks that come or go meanwhile are counted or left
// out, and a prefix whose first chunk goes is left out.
// Ownership: derived, and of one count alone.
// Thread safety: the caller holds the table's mutex.
#pragma once

#include <unordered_map>
#include <vector>

#include "table/chunks.h"

namespace kvdock {

struct SpaceCount {
  uint64_t chunks = 0, bytes = 0;
  uint64_t oldest = UINT64_MAX, newest = 0;  // ticks of last uses
};

struct PrefixCount {
  uint32_t space;
  Key first;
  uint64_t chunks, bytes;
  uint64_t born_ms, used_ms;  // on the server clock; 0: not known
  uint32_t uses;              // lookups that found the first chunk
};

class Census {
 public:
  explicit Census(const Chunks& chunks);

  // Looks at `budget` chunks more. True: all are counted.
  bool step(uint32_t budget);

  // By namespace, those that have chunks; the ticks are milliseconds of the server clock, 0: not known.
  std::vector<std::pair<uint32_t, SpaceCount>> spaces() const;
  // The `most` prefixes of those namespaces that were used most often, and how many there are. Of equally often used
  // ones the larger comes first.
  std::pair<std::vector<PrefixCount>, size_t> prefixes(const std::vector<uint32_t>& spaces, size_t most) const;

 private:
  struct Sum {
    uint64_t chunks = 0, bytes = 0, used = 0;  // `used`: tick
  };
  bool is_ready(uint32_t id) const;
  void link(uint32_t id);
  void add(uint32_t id);
  uint32_t first_of(uint32_t id);

  const Chunks& chunks_;
  uint32_t end_, at_ = 0;
  bool is_linked_ = false;
  std::vector<uint32_t> above_;  // by record: that of the chunk before it, itself at a first chunk, kNone: not counted
  std::vector<SpaceCount> spaces_;
  std::unordered_map<uint32_t, Sum> prefixes_;  // by the first chunk's record
};

}  // namespace kvdock
