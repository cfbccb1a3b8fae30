// The chunk table: which chunks exist, which processes may read or write them, and when their memory is used again.
// It implements docs/understand/lifetime_protocol.md.
//
// Ownership: a Table owns the region it is given for as long as it lives. Its parts own what they derive from it:
//   Chunks (records, slots, keys, pins, eviction), Members (sessions, members), Grants (leases, reservations). Grants
//   uses the other two; neither knows Grants. Promises uses none. Table has the calls, and with them the
//   rules that span the parts.
// Thread safety: the caller of the table or of one of its parts holds its one mutex (csrc/bind/table.cpp), except for
//   incarnation() and first_incarnation(), which return constants. The parts lock nothing.
// Invariants: I1-I8 and L1 of docs/understand/lifetime_protocol.md#invariants. check_integrity() sees I1, I2, I4, I5,
//   I7 and L1, and compares all that is derived. It cannot see I3, I6 and I8: they are about steps, not about a state.
//   tests/table/test_model.py holds I6 and I8 step by step, tests/table/test_protocol_model.py all three in the model.
#pragma once

#include <map>
#include <mutex>

#include "base/work.h"
#include "table/grants.h"
#include "table/promises.h"

namespace kvdock {

// A run of chunks, by what lookups would find of each: kReady: the chunk; kBeingStored: nothing yet; kUnknown: nothing,
// and as far as is known it was never there. Any other value is a Gone, counted from kGone.
struct FateRun {
  enum : uint32_t { kReady, kBeingStored, kUnknown, kGone };
  uint32_t chunks, fate;
  uint64_t at_ms, used_ms;  // the first chunk's, as in Departure; 0 for a chunk that is not gone
};

// Appends the record's parts of those groups.
void append_parts(const Record& r, uint32_t groups, std::vector<PartAt>* out);

class Table {
 public:
  Table(const Mapping& memory, const TableOptions& options);

  // Takes over the region of an earlier server of the pool (docs/understand/lifetime_table.md#table-and-restart), with
  // the capacities that this has. Throws TableError before anything was changed: wrong_version, or not_adoptable with
  // the reason.
  // REQUIRES: the pool's lock.
  Table(const Mapping& memory, const TableOptions& options, const std::vector<SegmentFacts>& segments, Adoption* found);
  // The segments that the region names, gone ones included, in rising order. Throws as the constructor does.
  static std::vector<SegmentFacts> stored_segments(const Mapping& memory, const TableOptions& options);
  uint64_t incarnation() const { return region_.incarnation(); }
  uint64_t first_incarnation() const { return region_.header.first_incarnation; }

  std::mutex mutex;

  // The table itself, or the one part that a call concerns.
  template <class Part>
  auto& part() {
    if constexpr (std::is_same_v<Part, Members>) return members_;
    else if constexpr (std::is_same_v<Part, Grants>) return grants_;
    else if constexpr (std::is_same_v<Part, Chunks>) return chunks_;
    else if constexpr (std::is_same_v<Part, Records>) return chunks_.records();
    else if constexpr (std::is_same_v<Part, Eviction>) return chunks_.eviction();
    else if constexpr (std::is_same_v<Part, SlotAllocator>) return chunks_.slots();
    else if constexpr (std::is_same_v<Part, Namespaces>) return chunks_.namespaces();
    else if constexpr (std::is_same_v<Part, Tenants>) return chunks_.namespaces().tenants();
    else return *this;
  }

  void set_limits(uint64_t limit_bytes, double session_cap, double total_cap);

  // -- namespaces, sessions and members
  // Idempotent by digest. Drops idle namespaces if there is no free entry.
  uint32_t add_namespace(const NewNamespace& wanted);
  bool has_namespace(const Key& digest) { return chunks_.namespaces().find(digest).has_value(); }
  // Forgets namespaces that have no sessions and no chunks, at most `most`; returns the others.
  std::vector<uint32_t> drop_idle_namespaces(size_t most);
  // Idempotent by nonce: an open session stays in its namespace, which may differ from `space` only in weights.
  uint64_t open_session(const Id16& nonce, uint32_t space, uint64_t now);
  // From now on the session's lookups and stores are in `space`, which differs from its present namespace only in
  // weights. Earlier grants keep their chunks. Throws TableError bad_argument.
  void move_session(uint64_t session, uint32_t space, uint64_t now);
  // The questions stop at `most`: a question counts eight, and one more for each of its ranks.
  std::vector<Question> heartbeat(uint64_t member, uint64_t now, uint64_t most);
  // Each of these does about `most` units of work (base/work.h) and returns whether that was too little: then it is to
  // be called again.
  bool member_dead(uint64_t member, uint64_t now, uint64_t most);
  bool leave(uint64_t member, uint64_t most);  // a member that has not quite left gets no grant any more
  bool tick(uint64_t now, uint64_t most);

  // -- lookups and leases
  LookupResult lookup(uint64_t session, uint64_t member, const LookupCall& call, uint64_t now);
  // Leases those of `keys` that are READY, with all their groups, to one reader, for copies to lower tiers. It does not
  // count as a use. In the result, a chunk that was not leased has no parts.
  LookupResult hold(uint64_t session, uint64_t member, const Id16& request, const std::vector<Key>& keys, uint64_t now);
  uint64_t peek(uint32_t space, const std::vector<Key>& keys);
  // The state of each of `keys`, as runs of chunks that have the same one.
  std::vector<FateRun> fates(uint32_t space, const std::vector<Key>& keys);
  // How many chunks, stored or being stored, follow the chunk of that key.
  uint32_t children(uint32_t space, const Key& key);
  // As ChangeLog::since(), but each server of the pool numbers its changes from a base of its own. If `since` is a
  // number of another server, changes may be missing, and the answer says so.
  Changes changes(uint32_t space, uint64_t since, size_t at_most);
  AllChanges all_changes(uint64_t since, size_t at_most);
  void withdraw(uint64_t session, const Id16& request);  // the promises of the request's lookups
  std::vector<uint32_t> release(uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks);
  // All parts of those chunks of a lease that lookups find, whichever groups the lease is for.
  std::vector<LeasedPart> leased_parts(uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks);
  // Returns the keys of the chunks that it took out.
  Damaged mismatch(uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks);

  // -- stores
  ReserveResult reserve(uint64_t session, uint64_t member, const ReserveCall& call, uint64_t now);
  CommitResult commit(uint64_t session, uint64_t grant, uint32_t rank, const std::vector<PartCommit>& parts,
                      uint64_t now);
  // Gives parts of an open reservation slots for raw bytes in place of packed ones, in the order of `parts` (indices
  // into the store's keys, and groups) until a limit is met. The rank has ended its copies into the slots that they
  // have. Repeating it changes nothing. Throws TableError not_reserved, already_committed, grant_closed.
  RawResult make_raw(uint64_t session, uint64_t grant, uint32_t rank,
                     const std::vector<std::pair<uint32_t, uint32_t>>& parts, uint64_t now);
  std::vector<uint32_t> abort(uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks);

  // Takes out temporary chunks that no reader has read; returns how many.
  uint32_t drop_unread(uint32_t space, const std::vector<Key>& keys);

  // -- hints of engines (csrc/table/preferences.h)
  // `keys`: in the order of their chain. Retains chunks as far as the chain is stored, and retained from its start on,
  // within kRetainedShare of the pool. 1 <= priority <= kMostPriority. Throws TableError bad_argument.
  RetainResult retain(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms);
  // Lowers the priority of `keys`, from the last back to a chunk that another chain continues too. `following`: the key
  // after the last, whose chunk is not shared; root: none. kConversationEnded <= priority <= 0; until_ms 0: until a
  // request names the chunk. Throws TableError bad_argument.
  LowerResult lower(uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms,
                    const Key& following);

  // -- any grant
  void cancel(uint64_t session, uint64_t member, uint64_t grant);  // D3
  void keep(uint64_t member, uint64_t grant, uint64_t now);
  void done(uint64_t member, uint64_t grant, const std::vector<uint32_t>& ranks);  // no ranks: the asker has finished

  // -- administration: none of it discharges a holder (I6)
  // Takes out READY and RESERVED chunks; returns how many of them were READY.
  uint32_t remove(uint32_t space, const std::vector<Key>& keys);
  // Clears the namespace: raises its generation by one, or to `least` where that is more; does nothing where `least` is
  // not above it, unless it is 0. From then on lookups find none of the chunks that were stored, and open reservations
  // publish nothing. Returns the generation. Throws TableError bad_argument.
  uint64_t raise_generation(uint32_t space, uint64_t least);
  // Closes the reservations that were open then, from cursor `start` on (0 first), in `most` units of work. Returns the
  // next cursor; -1: there are no more. One that is still open is closed by the next call for it.
  int64_t close_cleared(uint64_t start, uint64_t most);
  uint64_t generation(uint32_t space) {
    chunks_.namespaces().require(space);
    return chunks_.namespaces().generation(space);
  }
  uint32_t keep_chunks(uint32_t space, const std::vector<Key>& keys, uint64_t until_ms);  // 0: no longer

  // -- views
  std::vector<SessionInfo> sessions(const std::optional<std::vector<uint64_t>>& named);  // nullopt: all
  std::optional<SessionInfo> most_holding(bool by_grants);  // the session that holds most: grants, or bytes
  std::map<std::string, uint64_t> stats();
  const Reuse& reuse() const { return chunks_.eviction().reuse(); }
  const char* state_of(uint32_t space, const Key& key);
  void check_integrity();  // Throws TableError corrupt

 private:
  // Below 2^53, since JSON readers hold no larger integers exactly.
  uint64_t changes_base() const { return (incarnation() & 0x1fffff) << 32; }
  struct Counters {
    uint64_t lookups = 0, lookup_tokens = 0, hit_tokens = 0, reservations = 0, mismatches = 0;
    uint64_t refused_retains = 0;
  };
  struct Scan;

  void adopt(const std::vector<SegmentFacts>& segments, Adoption* found);
  void remember_widest_caps();
  void check_tenants();
  void gone(uint32_t member, Work& work);  // D2, also when the member leaves; it is GONE unless `work` is over

  // -- lookups (lookup.cpp)
  Scan scan(uint32_t space, const std::vector<Key>& keys);
  static uint32_t best_hit(const Scan& s, uint32_t limit);
  uint32_t within_pinned(const Scan& s, uint32_t session, uint32_t first, uint32_t end);
  uint32_t within_caps(const Scan& s, uint32_t session, uint32_t first, uint32_t end);
  uint32_t limit_hit(const Scan& s, uint32_t session, uint64_t skip_tokens, uint32_t hit, LookupResult* out);
  void lock_chunks(Grant& g, const Scan& s, uint32_t first, uint32_t hit, uint64_t reader, LookupResult* out);
  uint32_t storer_of(uint32_t space, const Key& key, uint64_t now);
  void promise(const Members::Asker& asker, const LookupCall& call, const Scan& s, uint32_t hit, uint64_t now,
               LookupResult* out);
  bool holds(const Promise& promise, uint64_t now) const;
  void drop_promises(const Grant& reservation);
  void close_if_over(Grant& reservation, uint64_t now);
  Grant* current_lease(uint32_t session, const LookupCall& call);
  uint32_t segments_in_reach(uint32_t session);

  Grant* hold_new(const Members::Asker& asker, const Id16& request, const std::vector<Key>& keys, uint64_t hash,
                  uint64_t now, LookupResult* out);
  // Records of the lease's chunks that are READY, with the index of their chunk.
  std::map<uint32_t, uint32_t> ready_of(uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks);

  // -- stores (store.cpp)
  void check_chain(uint32_t space, const ReserveCall& call, uint32_t groups);
  void repeat_reservation(Grant& g, const ReserveCall& call, uint64_t now, ReserveResult* out);
  Grant* reserve_missing(const Members::Asker& asker, const ReserveCall& call, uint32_t groups, uint64_t now,
                         ReserveResult* out);
  uint32_t count_missing(uint32_t session, const ReserveCall& call, size_t i, const NewChunk& each);
  struct NewPart {
    StoredPart* at;
    uint64_t checksum;
  };
  SessionInfo session_info(uint32_t cell);
  static void require_one_checksum_each(std::vector<NewPart> parts);
  // The rank's part of a group in a record; nullptr: the record has none.
  static StoredPart* part_of(Record& r, uint32_t group, uint32_t rank);
  std::vector<GrantEntry> entries_of(const Grant& g) const;  // in rising order of their index
  static const GrantEntry& entry_of(const std::vector<GrantEntry>& entries, uint32_t index, uint32_t group);
  std::vector<NewPart> fresh_parts(const std::vector<GrantEntry>& entries, uint32_t rank,
                                   const std::vector<PartCommit>& parts);
  CommitResult publish_whole(Grant& g, const std::vector<GrantEntry>& entries, uint32_t rank, uint64_t now);
  uint32_t take_out(std::vector<uint32_t> ids, Gone why);  // returns how many distinct ones they were

  uint64_t session_cap_bytes() const { return static_cast<uint64_t>(cap_bytes(options_.session_cap)); }
  uint64_t total_cap_bytes() const { return static_cast<uint64_t>(cap_bytes(options_.total_cap)); }
  // Whether the session may pin that number of bytes in addition.
  bool may_hold(uint32_t session, uint64_t bytes) const {
    const Pins& pins = chunks_.pins();
    return pins.held_bytes(session) + bytes <= session_cap_bytes() && pins.held_bytes() + bytes <= total_cap_bytes();
  }
  double cap_bytes(double share) const { return share * static_cast<double>(options_.limit_bytes); }

  TableOptions options_;
  Region region_;
  Chunks chunks_;
  Members members_;
  Grants grants_;
  Promises promises_;
  double widest_session_cap_ = 0, widest_total_cap_ = 0;  // bytes: grants made under wider caps stay
  Counters counters_;
};

}  // namespace kvdock
