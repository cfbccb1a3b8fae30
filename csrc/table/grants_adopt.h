// Takes over the grants that an earlier server left: judge() first, which writes nothing; then take_over(), which makes
// their transitions; then rebuild(), which makes what is derived.
//
// Invariant: damage to a grant that has a holder refuses the whole region: it protects memory in use.
#pragma once

#include "table/grants.h"

namespace kvdock {

struct Grants::Adopter {
  Adopter(Grants& grants, Adoption& counts) : g(grants), found(counts) {}
  void judge();
  void restart_held();      // reservations close; a lease stays as it was
  void finish_discharged();  // each becomes a tombstone, or is forgotten
  void rebuild();
  void settle();  // reservations whose holders had all committed before the server ended

 private:
  struct Lines {
    std::vector<uint32_t> blocks;
    uint32_t count;
  };
  enum class Chain { held, discharged };  // a held grant's may end in a line that was being added

  void judge_cell(uint32_t cell);
  void judge_body(const Grant& grant, uint32_t cell) const;
  std::optional<Lines> follow_lines(const Grant& grant, Chain chain);
  bool names_its_record(const Line& line) const;
  void restart(Grant& grant, const Lines& lines);
  void finish_commits(Grant& grant, uint64_t holders[2]);
  void name(uint32_t cell);

  Grants& g;
  Adoption& found;
  std::map<uint32_t, Lines> held_;   // by cell
  std::vector<uint32_t> answering_;  // discharged grants that can still answer repeats
  std::vector<uint32_t> forgotten_;  // discharged grants that cannot
  std::vector<bool> block_used_;
};

}  // namespace kvdock
