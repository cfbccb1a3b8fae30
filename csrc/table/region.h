// The table's region as typed arrays: made for a new pool, or opened as an earlier server left it.
//
// Ownership: none: the memory is the caller's. Region consists of pointers, so its copies share the same memory.
// Invariant: the arrays lie where RegionMap says, by the capacities in the header.
#pragma once

#include "segment/mapping.h"
#include "table/calls.h"

namespace kvdock {

struct Region {
  TableHeader& header;
  Namespace* spaces;
  SegmentEntry* segments;
  Slab* slabs;
  Session* sessions;
  Member* members;
  Grant* grants;
  EntryBlock* blocks;
  uint32_t* page_sizes;
  uint8_t* pages;

  explicit Region(void* at);  // REQUIRES: the header's capacities are written

  static uint64_t bytes_for(uint64_t max_records, uint64_t max_grants);
  // Writes the header of a new table, without its version.
  static Region create(const Mapping& memory, const TableOptions& options);
  // The last store of a new table: from now on it can be adopted.
  void finish();
  // Throws TableError wrong_version or not_adoptable unless the header is that of this build and of this pool.
  static Region open(const Mapping& memory, const TableOptions& options);

  uint64_t incarnation() const { return header.incarnation & kWordMask; }
};

// For damage in an earlier server's region that SIGKILL cannot have left behind.
[[noreturn]] void refuse_adoption(const char* what, uint64_t where = 0, Value wanted = {});

}  // namespace kvdock
