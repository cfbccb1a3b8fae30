// Takes over the chunks that an earlier server left: judge() first, which writes nothing; then take_over(), which makes
// the transitions of records; then rebuild(), which makes what is derived.
//
// Invariant: a record that is damaged and that nobody holds is dropped and counted; a slot with two owners refuses the
//   whole region.
#pragma once

#include "table/chunks.h"

namespace kvdock {

struct Chunks::Adopter {
  Adopter(Chunks& chunks, Adoption& counts) : c(chunks), found(counts) {}
  void judge(const Region& region, const std::vector<SegmentFacts>& segments);
  void drop_damaged();
  void quarantine_unfinished();  // what was never published, and what was replaced
  void rebuild();
  void settle();  // what nobody holds any more goes where it would have gone

 private:
  void judge_segments(const std::vector<SegmentFacts>& segments);
  void judge_slabs(const Slab* slabs);
  void judge_record(uint32_t id);
  bool sound(const Record& r, uint32_t size) const;

  Chunks& c;
  Adoption& found;
  std::vector<uint32_t> live;       // records that are whole
  std::vector<uint32_t> damaged;    // records that are not
  std::vector<uint32_t> bad_pages;  // pages of which not even the record size can be trusted
  std::vector<uint32_t> older;      // READY records of a key that a later generation has
};

}  // namespace kvdock
