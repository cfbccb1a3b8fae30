// Leases and reservations: which chunks their holders may touch, and which holders have not finished.
//
// Ownership: the cells of grants and their entries lie in the region; everything else is derived.
// Invariants: a holder is discharged once, by D1, D2 or D3 of docs/understand/lifetime_protocol.md#grants; time alone
//   discharges none (I6). A grant pins the records that its entries name while it has a holder. Without one it is
//   closed: its cell is a tombstone that answers repeats until it is needed for another grant.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <unordered_map>

#include "base/work.h"
#include "table/chunks.h"
#include "table/members.h"

namespace kvdock {

std::string hex_of(uint64_t id);  // as in JSON and in errors

struct NewGrant {
  GrantKind kind;
  Members::Asker asker;
  Id16 request;
  uint32_t readers;
  uint64_t now;
};

class Grants {
 public:
  Grants(const Region& region, Members& members, Chunks& chunks);
  void begin_empty();

  // -- finding
  Grant* find(uint64_t id) const;  // nullptr: such a grant was never given, or is forgotten
  // nullptr: the grant is forgotten, because all its holders were discharged. Throws TableError unknown_grant (it was
  // never given, or is not of `kind`), foreign_grant.
  Grant* of_session(uint64_t session, uint64_t id, std::optional<GrantKind> kind) const;
  void require_own(const Grant& g, uint32_t session) const;  // Throws TableError: foreign_grant, unknown_grant
  // The last grant that the session was given under the name `request`, or nullptr.
  Grant* of_request(uint32_t session, GrantKind kind, const Id16& request) const;
  std::vector<Grant*> held_by(uint32_t session) const;  // the session's grants that have a holder
  std::vector<uint32_t> holders() const;               // the cells of the sessions with such grants
  // Whether the member asked for a grant that has a holder.
  bool names(uint32_t member) const { return asked_[member] > 0; }
  std::vector<uint32_t> remaining(const Grant& g) const;
  void require_ranks(const Grant& g, std::span<const uint32_t> ranks) const;  // Throws TableError not_a_holder

  // -- opening: prepare() first; a lease is opened before its entries are added, a reservation after them
  void require_entries(uint32_t count);  // Throws TableError table_full unless `count` more entries fit
  Grant& prepare(const NewGrant& wanted);
  void give_up(Grant& g) { free_grants_.push_back(cell_of(g)); }  // for a grant that was prepared and got no entry
  void open(Grant& g);     // makes it live with one store, before the answer is sent
  void add_entry(Grant& g, const GrantEntry& entry);
  template <class F>
  void for_each_entry(const Grant& g, F&& f) const {
    uint32_t b = g.first_block;
    for (uint32_t i = 0; i < g.entry_count; ++i) {
      f(blocks_[b].entries[i % kEntriesPerBlock]);
      if (i % kEntriesPerBlock == kEntriesPerBlock - 1) b = blocks_[b].next;
    }
  }
  // The answer to a repeated call for an open reservation, without its chunks.
  ReserveResult& answer(const Grant& g) { return answers_[cell_of(g)]; }

  // -- ending
  void discharge(Grant& g, std::span<const uint32_t> ranks);  // closes the grant when no holder is left
  void close_reservation(Grant& g);  // it publishes nothing from now on; its memory waits for the holders
  bool was_cleared(const Grant& g) const;  // g: an open reservation. Its namespace was cleared after it was opened
  // The first open reservation from cell `start` on that was cleared, and the cell to go on with. nullptr: `work` is
  // over, or there is none, with -1.
  std::pair<Grant*, int64_t> next_cleared(uint64_t start, Work& work);
  // Each stops when `work` is over; call it again then.
  void member_dead(uint32_t member, Work& work);  // closes the reservations that the member has not finished
  void member_gone(uint32_t member, Work& work);  // D2
  void close_late(uint64_t now, Work& work);      // closes reservations past their deadline

  uint64_t aborted_chunks() const { return aborted_chunks_; }
  // Grants with a holder from place `from` on, in rising order, at most `at_most`. session 0: of all sessions.
  std::vector<GrantInfo> page(uint64_t session, uint64_t from, size_t at_most) const;
  std::optional<GrantInfo> view(uint64_t id) const;  // nullopt once all holders were discharged
  // How many of the session's grants have a holder, and whether one of them was asked for as `request`.
  std::pair<uint32_t, bool> open_grants(uint64_t session, const Id16& request) const;
  struct Count {
    uint32_t leases = 0, reservations = 0;
  };
  Count count(uint32_t session) const;
  const Count& count() const { return count_; }  // of all sessions

  // Computes the derived state again and compares. Returns the pins that the entries imply. Throws TableError corrupt.
  ImpliedPins check() const;
  struct Adopter;  // csrc/table/adopters.h

 private:
  static uint64_t cost_of(const Grant& g);
  struct RequestKey {
    uint64_t session = 0;  // the session's id
    GrantKind kind{};
    Id16 id{};
    bool operator==(const RequestKey& o) const { return session == o.session && kind == o.kind && id == o.id; }
  };
  struct RequestHash {
    size_t operator()(const RequestKey& k) const {
      uint64_t h;
      std::memcpy(&h, k.id.bytes, 8);
      return fold(h ^ static_cast<uint64_t>(k.kind), k.session);
    }
  };

  uint32_t cell_of(const Grant& g) const { return static_cast<uint32_t>(&g - grants_); }
  uint64_t place_of(const Grant& g) const { return g.opened_ms * header_.max_grants + cell_of(g); }
  RequestKey key_of(const Grant& g) const { return {Members::session_id(g.session, g.session_use), g.kind, g.request}; }
  bool is_held(const Grant& g) const;
  Usage& usage_of(const Grant& g) { return chunks_.namespaces().usage(members_.session(g.session).space()); }
  GrantInfo info_of(const Grant& g) const;
  void close(Grant& g);
  void free_entries(Grant& g);
  bool reclaim_tombstone();
  void check_cell(uint32_t cell) const;

  TableHeader& header_;
  Grant* grants_;
  EntryBlock* blocks_;
  Members& members_;
  Chunks& chunks_;
  std::vector<uint32_t> free_grants_, free_blocks_;
  std::deque<uint32_t> tombstones_;            // oldest first
  std::map<uint32_t, std::set<uint32_t>> held_;  // by session cell: cells of grants with a holder
  std::unordered_map<RequestKey, uint32_t, RequestHash> requests_;
  std::unordered_map<uint32_t, ReserveResult> answers_;   // by cell of an open reservation
  std::vector<uint32_t> asked_;  // by member cell: how many grants with a holder it asked for
  Count count_;  // of grants with a holder
  uint64_t aborted_chunks_ = 0;
};

}  // namespace kvdock
