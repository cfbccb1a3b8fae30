// Taking over the region of an earlier server (section 9): first everything is judged and nothing is written,
// then the few transitions of a new server life are made, then what is derived is built.
//
// Ownership: an Adopter lives inside the constructor of the Table that adopts.
// Crash safety: every write of `take_over` is a transition of its own, or repairs what the one before left
//   behind, so a server killed while it adopts leaves a region that the next one adopts.
// Invariants: SIGKILL at any instruction fails no check. A record that nobody holds and that is damaged is
//   dropped and counted; damage to anything that protects memory in use refuses the whole region.
#pragma once

#include "table/body_crc.h"

namespace kvdock {

struct Table::Adopter {
  Table& t;
  TableHeader& h;
  Adoption& found;
  std::vector<uint32_t> live{};       // records that are whole
  std::vector<uint32_t> damaged{};    // records that are not
  std::vector<uint32_t> bad_pages{};  // of which not even the record size can be trusted
  std::vector<uint32_t> older{};      // READY records of a key that a later generation has
  struct Lines {
    std::vector<uint32_t> blocks;
    uint32_t count;
  };
  std::map<uint32_t, Lines> grants{};  // by cell: those with undischarged holders
  std::vector<uint32_t> done{};       // discharged grants that can still answer repeats
  std::vector<uint32_t> forgotten{};  // discharged grants that cannot
  std::vector<bool> block_used{};

  void run(const std::vector<SegmentFacts>& segments);

  // -- judging (table_adopt.cpp)
  void judge_namespaces();
  void judge_segments(const std::vector<SegmentFacts>& segments);
  void judge_slabs();
  void judge_sessions();
  void judge_members();
  void judge_records();
  bool sound(const Record& r, uint32_t size) const;
  void judge_grant(uint32_t cell);
  void judge_body(const Grant& g, uint32_t cell) const;
  std::optional<Lines> follow_lines(const Grant& g, bool held);
  bool holds_its_record(const Line& line) const;

  // -- taking over, and building (table_adopt_build.cpp)
  void take_over();
  void restart_members();
  void restart_grant(uint32_t cell, const Lines& lines);
  void finish_commits(Grant& g, uint64_t holders[2]);
  void build_records();
  void build_grants();
  void settle_all();
};

// Bits of the grant's readers in word i of its holders.
inline uint64_t readers_mask(const Grant& g, uint32_t i) {
  uint32_t ranks = g.readers > 64 * i ? std::min(g.readers - 64 * i, 64u) : 0;
  return ranks == 64 ? ~0ull : (1ull << ranks) - 1;
}

// Undischarged holders: a rank counts as one until both words say that it is not.
inline void holders_of(const Grant& g, uint64_t out[2]) {
  for (uint32_t i = 0; i < 2; ++i) out[i] = (g.holders[i] | ~g.released[i]) & readers_mask(g, i);
}

// No rank holds and has released; the bits of ranks that are none are as the grant was opened.
inline bool holders_possible(const Grant& g) {
  for (uint32_t i = 0; i < 2; ++i)
    if ((g.holders[i] & g.released[i]) || ((g.holders[i] | ~g.released[i]) & ~readers_mask(g, i))) return false;
  return true;
}

}  // namespace kvdock
