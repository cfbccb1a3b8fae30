// The chunk table: which chunks exist, who may read or write them, and when their memory is used again.
// It implements docs/lifetime_protocol.md; section numbers below are its.
//
// Ownership: a Table owns the region it is given for as long as it lives. Primary facts lie in the region
//   (table_layout.h); members named *_ at the end of the class are derived and can be rebuilt.
// Thread safety: every public call takes the one mutex; none blocks on anything else.
// Invariants: I1–I8 of the protocol; check_integrity() walks them all.
#pragma once

#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "table/change_log.h"
#include "table/eviction.h"
#include "table/key_index.h"
#include "table/slots.h"
#include "table/layout.h"

namespace kvdock {

using Value = std::variant<std::monostate, int64_t, std::string>;

struct TableRefusal : std::exception {
  std::string code, message;
  Value found, wanted;
  TableRefusal(std::string c, std::string m, Value f = {}, Value w = {})
      : code(std::move(c)), message(std::move(m)), found(std::move(f)), wanted(std::move(w)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

struct TableOptions {
  uint64_t pool_id, lock_inode, incarnation, limit_bytes;
  uint64_t max_records, max_grants;
  uint64_t ask_ms, settle_ms, suspect_ms;
  double session_cap, total_cap;
};

// A segment as the table names it, or as the server that adopts it found it in memory.
struct SegmentFacts {
  uint32_t segment;
  uint64_t state;  // kSegmentLive, …
  uint64_t data_offset, data_bytes;
};
struct Adoption {  // what an adopting server found
  uint64_t clock_ms = 0;  // the earlier server's clock: the new one goes on from there
  uint32_t chunks = 0, dropped = 0, aborted = 0, replaced = 0, leases = 0, reservations = 0, sessions = 0, members = 0;
};

struct PartAt {
  uint32_t group, writer, segment;
  uint64_t offset, length, checksum;
};
struct LookupResult {
  uint64_t hit_tokens = 0, lease = 0;
  uint32_t first_chunk = 0;
  std::string limited;         // "", "held_bytes" or "pinning"
  uint64_t unpinned_tokens = 0;  // what the hit lost to pinning
  std::vector<PartAt> parts;        // of all chunks, one after the other
  std::vector<uint32_t> part_ends;  // per chunk: where its parts end
};
struct ReserveResult {
  uint64_t grant = 0;
  std::vector<std::pair<uint32_t, std::vector<PartAt>>> chunks;
  std::vector<uint32_t> present, busy;
  std::string limited;
};
struct PartCommit {
  uint32_t index, group;
  uint64_t checksum;
};
struct Question {
  uint64_t grant;
  std::vector<uint32_t> ranks;  // empty: the asker's word is wanted
};
struct GrantInfo {
  uint64_t grant;
  GrantKind kind;
  uint64_t session;
  Id16 request;
  uint32_t epoch, readers;
  std::vector<uint32_t> remaining;
  uint64_t chunks, bytes, opened_ms;
  uint64_t place;  // rises from the oldest to the youngest; ids do not, as their cells are used again
  bool closed;
};
struct SessionInfo {
  uint64_t session;
  Id16 nonce;
  uint32_t space, leases, reservations;
  uint64_t held_bytes, opened_ms;
};
struct MemberInfo {
  uint64_t member, session;
  Id16 nonce;
  std::vector<uint32_t> ranks;
  bool scheduler;
  MemberState state;
  uint64_t heartbeat_ms, lock_offset;
  std::optional<uint32_t> pinned_through;
};
struct ReserveCall {
  Id16 store;
  Key parent;
  std::vector<Key> keys;
  uint32_t groups;
  bool temporary;
  uint64_t deadline_ms;
};
struct LookupCall {
  Id16 request;
  uint32_t epoch;
  std::vector<Key> keys;
  uint32_t readers;
  uint64_t skip_tokens;
};

class Table {
 public:
  Table(uint8_t* region, uint64_t region_bytes, const TableOptions& options);
  static uint64_t region_bytes(uint64_t max_records, uint64_t max_grants);

  // Takes over the region that an earlier server of the pool left (section 9); its capacities are the region's.
  // TableRefusal before anything was changed: wrong_version, or not_adoptable and why. REQUIRES: the pool's lock.
  Table(uint8_t* region, uint64_t region_bytes, const TableOptions& options,
        const std::vector<SegmentFacts>& segments, Adoption* found);
  // The segments the region names, gone ones included, in rising order; refuses as the constructor does.
  static std::vector<SegmentFacts> stored_segments(const uint8_t* region, uint64_t region_bytes,
                                                   const TableOptions& options);
  uint64_t incarnation() const { return header_->incarnation & kWordMask; }
  uint64_t first_incarnation() const { return header_->first_incarnation; }

  void add_segment(uint32_t segment, uint64_t data_offset, uint64_t data_bytes);
  uint64_t free_bytes();
  uint64_t segment_used_bytes(uint32_t segment);
  uint32_t evict(uint64_t target_free_bytes, uint32_t max_chunks);

  uint32_t add_namespace(const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens, uint32_t writers,
                         const std::vector<Group>& groups);
  uint64_t open_session(const Id16& nonce, uint32_t space, uint64_t now);
  uint64_t add_member(uint64_t session, const Id16& nonce, const std::vector<uint32_t>& ranks, bool scheduler,
                      uint64_t lock_offset, uint64_t now);
  uint64_t find_member(uint64_t session, const Id16& nonce);

  std::vector<Question> heartbeat(uint64_t member, uint64_t now);
  void report_pinned(uint64_t member, uint32_t through);
  void keep(uint64_t member, uint64_t grant, uint64_t now);
  void done(uint64_t member, uint64_t grant, const std::vector<uint32_t>& ranks, uint64_t now);
  void member_dead(uint64_t member, uint64_t now);
  void leave(uint64_t member, uint64_t now);
  void tick(uint64_t now);

  LookupResult lookup(uint64_t session, uint64_t member, const LookupCall& call, uint64_t now);
  uint64_t peek(uint32_t space, const std::vector<Key>& keys);
  // As ChangeLog's; each life of the pool has numbers of its own, so that one of another life misses something.
  Changes changes(uint32_t space, uint64_t since, size_t at_most);
  std::vector<uint32_t> release(uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks, uint64_t now);
  void cancel(uint64_t session, uint64_t member, uint64_t grant, uint64_t now);
  ReserveResult reserve(uint64_t session, uint64_t member, const ReserveCall& call, uint64_t now);
  std::pair<uint32_t, std::vector<uint32_t>> commit(uint64_t session, uint64_t grant, uint32_t rank,
                                                    const std::vector<PartCommit>& parts, uint64_t now);
  std::vector<uint32_t> abort(uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks, uint64_t now);
  uint32_t mismatch(uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks, uint64_t now);
  uint32_t remove(uint32_t space, const std::vector<Key>* keys);

  std::pair<uint32_t, int64_t> clear(int64_t space, uint64_t start, uint32_t budget);
  bool can_evict();  // some leaf that nobody pins or keeps
  uint32_t keep_chunks(uint32_t space, const std::vector<Key>& keys, uint64_t until);
  void set_limits(uint64_t limit_bytes, double session_cap, double total_cap);
  uint64_t retire_segment(uint32_t segment, uint32_t max_chunks);
  void remove_segment(uint32_t segment);

  std::vector<SessionInfo> sessions();
  std::vector<MemberInfo> members();
  // Those from that place on, in rising order, `at_most` of them.
  std::vector<GrantInfo> grants(uint64_t session, uint64_t from, size_t at_most);
  std::optional<GrantInfo> grant(uint64_t id);
  std::pair<uint32_t, bool> open_grants(uint64_t session, const Id16& request);
  uint32_t session_namespace(uint64_t session);
  std::map<std::string, uint64_t> stats();
  const char* state_of(uint32_t space, const Key& key);
  void check_integrity();

 private:
  struct Page {
    std::vector<uint32_t> free;  // ids of FREE records
    uint32_t live = 0;
  };
  struct RecordInfo {
    uint32_t pins = 0;      // lines of grants with a holder that has not said done
    uint32_t sole = kNone;  // the one session pinning it, kMany, or kNone
    uint32_t children = 0;  // of a READY record: what its key's index entry counts, kept beside the pins
    uint32_t pages = 0;     // bytes in kSlotAlign; 0 while FREE
    bool kept = false;      // not to be evicted until kept_until_ms
  };
  static constexpr uint32_t kMany = kNone - 1;
  struct RequestKey {
    uint64_t session = 0;
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
  struct Counters {
    uint64_t lookups = 0, lookup_tokens = 0, hit_tokens = 0, reservations = 0, stored_chunks = 0, stored_bytes = 0,
             aborted_chunks = 0, evicted_chunks = 0, mismatches = 0;
  };
  struct SessionState {
    std::set<uint32_t> grants;  // cells with live holders
    std::set<uint32_t> members;
    uint64_t held_bytes = 0;
    uint32_t pinned_through = kNone;  // the least that its living members have pinned
  };

  struct Adopter;  // table_adopt.cpp
  void lay_out();
  void add_shape(const Namespace& ns);

  // -- records (table.cpp, table_evict.cpp)
  Record& record(uint32_t id) { return *reinterpret_cast<Record*>(pages_ + record_at(id)); }
  uint64_t record_at(uint32_t id) const {
    return uint64_t{id / kPageRecords} * kPageBytes + uint64_t{id % kPageRecords} * page_sizes_[id / kPageRecords];
  }
  uint64_t record_bytes(uint32_t id) const { return uint64_t{info_[id].pages} * kSlotAlign; }
  void prefetch_record(uint32_t id) {
    const uint8_t* at = pages_ + record_at(id);
    __builtin_prefetch(&info_[id]);
    __builtin_prefetch(at + offsetof(Record, word), 1);
    __builtin_prefetch(at + sizeof(Record) + sizeof(StoredPart) - 1, 1);
  }
  void count_child(uint32_t space, const Key& parent);
  void uncount_child(uint32_t space, const Key& parent);
  std::optional<uint32_t> new_record_id(uint32_t parts);
  std::optional<uint32_t> open_page(uint32_t size);
  void give_record_id(uint32_t id);
  void free_record(uint32_t id);
  void count_state(uint32_t id, int sign);
  void set_state(uint32_t id, RecordState state);
  void quarantine(uint32_t id);
  void publish_record(uint32_t id);
  void unlink(uint32_t id);
  void settle(uint32_t id);
  void offer(uint32_t id);
  bool evictable(const Record& r, uint32_t id);
  void stamp(Record& r, uint64_t tick);
  void add_pin(uint32_t id, uint32_t session);
  void drop_pin(uint32_t id, uint32_t session);
  bool make_room(uint64_t bytes);
  std::optional<Candidate> oldest(uint32_t shape);
  bool evict_lying_chain(uint64_t bytes);

  // -- administration (table_admin.cpp)
  void set_kept(uint32_t id, uint64_t until);
  void expire_kept(uint64_t now);

  // -- grants (table_grants.cpp)
  Grant& new_grant(GrantKind kind, uint32_t session, uint32_t asker, const Id16& request, uint32_t readers,
                   uint64_t now);
  Grant* find_grant(uint64_t session, uint64_t id, GrantKind kind, uint32_t* cell);
  std::optional<uint32_t> grant_cell(uint64_t id, bool* forgotten);
  Grant* request_grant(uint32_t session, GrantKind kind, const Id16& request, uint32_t* cell);
  void seal_grant(uint32_t cell);
  void require_lines(uint32_t count);
  void add_line(uint32_t cell, const Line& line);
  template <class F>
  void for_each_line(const Grant& g, F&& f) {
    uint32_t b = g.first_block;
    for (uint32_t i = 0; i < g.line_count; ++i) {
      f(blocks_[b].lines[i % kLinesPerBlock]);
      if (i % kLinesPerBlock == kLinesPerBlock - 1) b = blocks_[b].next;
    }
  }
  GrantInfo info_of(const Grant& g);
  uint64_t place_of(const Grant& g) { return g.opened_ms * header_->max_grants + static_cast<uint64_t>(&g - grants_); }
  void discharge(uint32_t cell, uint32_t rank);
  void close_reservation(uint32_t cell);
  void finish_if_done(uint32_t cell);
  void free_lines(Grant& g);
  bool reclaim_tombstone();
  std::vector<uint32_t> remaining(const Grant& g) const;
  static void append_parts(const Record& r, uint32_t groups, std::vector<PartAt>* out);
  static std::vector<PartAt> parts_of(const Record& r, uint32_t groups);
  void check_ranks(const Grant& g, const std::vector<uint32_t>& ranks) const;

  // -- lookups (table_lookup.cpp)
  struct Scan;
  Scan scan(uint32_t space, const std::vector<Key>& keys);
  uint32_t best_hit(const Namespace& ns, const Scan& s, uint32_t limit) const;
  uint32_t within_pinned(const Scan& s, uint32_t session, uint32_t first, uint32_t end);
  uint32_t within_caps(const Scan& s, uint32_t session, uint32_t first, uint32_t end);
  void lock_chunks(uint32_t cell, const Scan& s, uint32_t first, uint32_t hit, uint64_t reader, LookupResult* out);
  Grant* current_lease(uint32_t session, const LookupCall& call, uint32_t* cell);

  // -- stores (table_store.cpp)
  void check_chain(uint32_t space, const ReserveCall& call, uint32_t groups);
  bool reserve_one(uint32_t space, const Key& key, const Key& parent, uint32_t groups, bool temporary, uint64_t tick,
                   uint32_t below, uint32_t* out);
  bool take_parts(const Namespace& ns, uint32_t groups, uint32_t id, uint32_t below, std::vector<StoredPart>* out);
  void stamp_path(uint32_t space, Key key, uint64_t tick);
  void repeat_reservation(uint32_t cell, const ReserveCall& call, uint64_t now, ReserveResult* out);

  // -- life (table_life.cpp)
  Session& session_at(uint64_t id, uint32_t* cell);
  Member& member_at(uint64_t id, uint32_t* cell);
  Member& asker_at(uint64_t session, uint64_t member, uint32_t* session_cell, uint32_t* member_cell);
  uint64_t session_id(uint32_t cell) const { return sessions_[cell].use() << 20 | cell; }
  uint64_t member_id(uint32_t cell) const { return members_[cell].use() << 20 | cell; }
  void set_member_state(uint32_t cell, MemberState state);
  uint32_t least_pinned(const SessionState& state) const;
  uint32_t segments_in_reach(uint32_t session);
  uint32_t bound_member(const Grant& g, uint32_t rank) const;
  uint64_t come_back(uint32_t cell, const std::vector<uint32_t>& ranks, bool scheduler, uint64_t lock_offset,
                     uint64_t now);
  void gone(uint32_t cell);
  void close_session(uint32_t cell);

  // -- checks (table_check.cpp)
  void check_all();
  void check_records();
  void check_grants();
  void check_index();

  std::mutex mutex_;
  TableOptions options_;

  // The region.
  uint8_t* base_;
  TableHeader* header_;
  Namespace* spaces_;
  SegmentEntry* segments_;
  Session* sessions_;
  Member* members_;
  Grant* grants_;
  LineBlock* blocks_;
  uint32_t* page_sizes_;
  uint8_t* pages_;

  // Derived.
  SlotAllocator slots_;
  KeyIndex index_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<RecordInfo, HugeAllocator<RecordInfo>> info_;
  std::vector<Page> page_info_;
  std::map<uint32_t, std::set<uint32_t>> pages_with_room_;  // record size → pages with a FREE record
  std::vector<uint32_t> spare_pages_;                       // all FREE: for records of any size
  uint32_t next_page_ = 0;
  uint32_t space_count_ = 0;
  std::vector<uint32_t> space_shape_;
  std::vector<std::vector<uint64_t>> shapes_;  // distinct slot sizes of a namespace's parts, ascending
  std::vector<uint32_t> free_sessions_, free_members_, free_grants_, free_blocks_;
  std::deque<uint32_t> tombstones_;  // discharged grants, oldest first: they still answer repeats
  std::multimap<uint64_t, std::pair<uint32_t, uint64_t>> kept_until_;  // when → record, generation
  std::pair<uint32_t, Key> storing_{};  // namespace and parent of the chunk that room is being made for
  std::map<uint32_t, SessionState> session_state_;
  std::unordered_map<RequestKey, uint32_t, RequestHash> requests_;
  std::vector<RequestKey> grant_request_;               // by grant cell
  std::unordered_map<uint32_t, ReserveResult> answers_;  // by cell of an open reservation: all but its chunks
  std::unordered_map<uint64_t, uint32_t> shared_pins_;  // session << 32 | record, for records several sessions pin
  uint64_t held_bytes_ = 0;
  uint64_t kept_bytes_ = 0;  // of chunks that an administrator keeps
  double widest_session_cap_ = 0, widest_total_cap_ = 0;  // bytes
  std::array<uint64_t, 4> bytes_in_{}, records_in_{};     // by state
  ChangeLog changes_;
  Counters counters_;
};

}  // namespace kvdock
