// The takeover of an earlier server's region: first everything is checked and nothing is written (but the end of a
// part's move), then come the few transitions of a new server, then the derived state is built.
//
// Crash safety: every write is a transition of its own, or repairs what the write before it left behind. So a server
//   that is killed while it adopts leaves a region that the next server can adopt.
// Invariants: a region is accepted in any state in which SIGKILL can leave it. A damaged record without a holder is
//   dropped and counted; damage to grants, or to records that they pin, refuses the whole region, with an error that
//   names the damage.
#include <algorithm>

#include "base/pause.h"
#include "table/adopters.h"
#include "table/table.h"

namespace kvdock {

namespace {
constexpr uint64_t kSaneMs = 1ull << 50;  // no server clock reaches it
constexpr uint64_t kSaneTick = 1ull << 62;
}  // namespace

std::vector<SegmentFacts> Table::stored_segments(const Mapping& memory, const TableOptions& options) {
  const SegmentEntry* entries = Region::open(memory, options).segments;
  std::vector<SegmentFacts> out;
  for (uint32_t i = 0; i < kMaxSegments; ++i) {
    const SegmentEntry& s = entries[i];
    if (s.word == 0) continue;
    if (!whole(s.word, i + 1) || s.state() == SegmentState::kNever || s.id() >= kSegmentIds)
      refuse_adoption("a segment's state is damaged", i);
    out.push_back({s.id(), s.state(), s.data_offset, s.data_bytes});
  }
  std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.segment < b.segment; });
  return out;
}

Table::Table(const Mapping& memory, const TableOptions& options, const std::vector<SegmentFacts>& segments,
             Adoption* found)
    : options_(options),
      region_(Region::open(memory, options)),
      chunks_(region_, options.grace_ms),
      members_(region_, chunks_.namespaces()),
      grants_(region_, members_, chunks_) {
  adopt(segments, found);
}

void Table::adopt(const std::vector<SegmentFacts>& segments, Adoption* found) {
  Chunks::Adopter chunks(chunks_, *found);
  Grants::Adopter grants(grants_, *found);
  chunks.judge(region_, segments);
  std::vector<bool> namespaces(kMaxNamespaces);
  for (uint32_t space : chunks_.namespaces().live()) namespaces[space] = true;
  members_.judge(namespaces, found);
  grants.judge();
  KVDOCK_PAUSE("adopt.judged");

  TableHeader& h = region_.header;
  publish(h.incarnation, sealed(region_.incarnation() + 1));
  KVDOCK_PAUSE("adopt.new_life");
  h.limit_bytes = options_.limit_bytes;
  if (h.use_tick >= kSaneTick) h.use_tick = 0;
  if (h.clock_ms < kSaneMs) found->clock_ms = std::max(found->clock_ms, h.clock_ms);
  chunks.drop_damaged();
  grants.restart_held();
  KVDOCK_PAUSE("adopt.grants_restarted");
  chunks.quarantine_unfinished();
  grants.finish_discharged();
  KVDOCK_PAUSE("adopt.records_done");
  members_.restart(found->clock_ms);
  chunks_.namespaces().restart(found->clock_ms);
  KVDOCK_PAUSE("adopt.taken_over");

  chunks.rebuild();
  grants.rebuild();
  remember_widest_caps();
  for (uint32_t cell : members_.open_sessions())
    widest_session_cap_ = std::max(widest_session_cap_, static_cast<double>(chunks_.pins().held_bytes(cell)));
  widest_total_cap_ = std::max(widest_total_cap_, static_cast<double>(chunks_.pins().held_bytes()));
  chunks.settle();
  grants.settle();
  for (uint32_t cell : members_.sessions_without_members())
    if (grants_.held_by(cell).empty()) members_.close_session(cell);
  for (uint32_t cell : members_.gone())
    if (!grants_.names(cell)) members_.forget(cell);
  KVDOCK_PAUSE("adopt.settled");
  check_integrity();
}

}  // namespace kvdock
