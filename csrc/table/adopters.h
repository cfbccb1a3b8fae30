// The takeover of an earlier server's chunks and grants. judge() writes nothing but the end of a part's move; then come
// the transitions, then rebuild() of the derived state, then settle(). csrc/table/adopt.cpp has the order in which
// Chunks::Adopter and Grants::Adopter work.
//
// Invariants: a damaged record without a holder is dropped and counted; a slot with two owners, or damage to a grant
//   that has a holder, refuses the whole region, since memory in use would be unprotected.
#pragma once

#include "table/grants.h"

namespace kvdock {

struct Chunks::Adopter {
  Adopter(Chunks& chunks, Adoption& counts) : c(chunks), found(counts) {}
  void judge(const Region& region, const std::vector<SegmentFacts>& segments);
  void drop_damaged();
  void quarantine_unfinished();  // records that were never published, or were replaced or cleared
  void rebuild();
  void settle();  // makes the transitions of records without pins that their last unpinning would have made

 private:
  void finish_move();
  void judge_segments(const std::vector<SegmentFacts>& segments);
  void judge_slabs(const Slab* slabs);
  void judge_record(uint32_t id);
  bool sound(const Record& r, uint32_t size) const;

  Chunks& c;
  Adoption& found;
  std::vector<uint32_t> live;       // records that are whole
  std::vector<uint32_t> damaged;    // records that are damaged
  std::vector<uint32_t> bad_pages;  // pages with an impossible record size
  std::vector<uint32_t> older;      // READY records of a key that also has a READY record of a later generation
  std::vector<uint32_t> cleared;    // READY records that were cleared, and not taken out yet
};

struct Grants::Adopter {
  Adopter(Grants& grants, Adoption& counts) : g(grants), found(counts) {}
  void judge();
  void restart_held();      // closes reservations; a lease stays as it was
  void finish_discharged();  // each grant becomes a tombstone, or is forgotten
  void rebuild();
  void settle();  // completes reservations whose holders had all committed before the server ended

 private:
  struct Entries {
    std::vector<uint32_t> blocks;
    uint32_t count;
  };
  enum class Chain { held, discharged };  // the chain of a held grant may end in an entry that was being added

  void judge_cell(uint32_t cell);
  void judge_body(const Grant& grant, uint32_t cell) const;
  std::optional<Entries> follow_entries(const Grant& grant, Chain chain);
  const GrantEntry& entry_of(const Entries& entries, uint32_t i) const;
  bool in_order(const Entries& entries) const;
  bool names_its_record(const GrantEntry& entry) const;
  void link(Grant& grant, const Entries& entries);
  void restart(Grant& grant, const Entries& entries);
  void finish_commits(Grant& grant, uint64_t holders[2]);
  void name(uint32_t cell);

  Grants& g;
  Adoption& found;
  std::map<uint32_t, Entries> held_;   // by cell
  std::vector<std::pair<uint32_t, Entries>> answering_;  // discharged grants that can still answer repeats, by cell
  std::vector<uint32_t> forgotten_;  // discharged grants that cannot answer repeats any more
  std::vector<bool> block_used_;
};

}  // namespace kvdock
