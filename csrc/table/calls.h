// Arguments and results of the chunk table's calls: plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "table/layout.h"

namespace kvdock {

struct TableOptions {
  uint64_t pool_id, lock_inode, incarnation, limit_bytes;
  uint64_t max_records, max_grants;
  uint64_t ask_ms, settle_ms, suspect_ms;
  double session_cap, total_cap;  // shares of limit_bytes that grants may pin
  uint64_t grace_ms;  // the time from when a namespace is left until its chunks are evicted first
};

// A segment as the table names it, or as the server that adopts it found it in memory.
struct SegmentFacts {
  uint32_t segment;
  SegmentState state;
  uint64_t data_offset, data_bytes;
};
struct Adoption {  // what a server found when it adopted a pool
  uint64_t clock_ms = 0;  // the earlier server's clock, from which the new one continues
  uint32_t chunks = 0, dropped = 0, aborted = 0, replaced = 0, cleared = 0;
  uint32_t leases = 0, reservations = 0, sessions = 0, members = 0;
};

// The reason why an answer is shorter than it could have been.
enum class Limit { none, held_bytes, no_space, pinning, quota };

struct PartAt {
  uint32_t group, writer, segment;
  uint64_t offset, length, checksum;
};
struct LookupCall {
  Id16 request;
  uint32_t epoch;
  std::vector<Key> keys;
  uint32_t readers;
  uint64_t skip_tokens;
  bool computes;  // the request computes what is not found, and stores it
  bool is_apart;  // of a benchmark, which is in no figure
};
struct LookupResult {
  uint64_t hit_tokens = 0, lease = 0;
  // How many tokens the stored prefix will have once other sessions have stored what they store or promise now, and how
  // many it has already, whatever limits the hit; 0: no other session stores more of it.
  uint64_t being_stored = 0, committed = 0;
  uint32_t first_chunk = 0;
  Limit limited = Limit::none;
  uint64_t unpinned_tokens = 0;     // by how much Limit::pinning shortened the hit
  std::vector<PartAt> parts;        // of all chunks, one after the other
  std::vector<uint32_t> part_ends;  // per chunk: where its parts end
};
using LeasedPart = std::pair<uint32_t, PartAt>;  // with the index of its chunk, counted from token 0
// Chunks of one namespace whose bytes a reader found damaged.
struct Damaged {
  uint32_t space = 0;
  std::vector<Key> keys;
};
struct ReserveCall {
  Id16 store;
  Key parent;
  std::vector<Key> keys;
  uint32_t groups;  // bit mask
  bool temporary;
  uint64_t deadline_ms;
  // How many chunks may be evicted to begin with. If that is not enough, the call grants nothing, and the next one has
  // `goes_on`.
  uint32_t most_evicted = UINT32_MAX;
  bool goes_on = false;  // the call is repeated, because its last answer had more
};
struct ReserveResult {
  uint64_t grant = 0;
  std::vector<std::pair<uint32_t, std::vector<PartAt>>> chunks;
  std::vector<uint32_t> present, busy;
  Limit limited = Limit::none;
  bool has_more = false;  // nothing is granted yet: more chunks are to be evicted
};
struct RetainResult {
  uint32_t chunks = 0, refused = 0;  // how many are retained now, and how many exceeded the limit
};
struct LowerResult {
  uint32_t chunks = 0;
  bool shared = false;  // it ended at a chunk that another chain continues too
};
using PartCommit = std::tuple<uint32_t, uint32_t, uint64_t>;  // index into the store's keys, group, checksum
// Parts of a reservation that have slots for raw bytes now, with the index of their chunk in the call.
struct RawResult {
  std::vector<std::pair<uint32_t, PartAt>> parts;
  Limit limited = Limit::none;
};
// How many chunks of the reservation are READY, and the ranks that have not finished.
using CommitResult = std::pair<uint32_t, std::vector<uint32_t>>;
// How many chunks were taken out, and the `start` of the next call; -1: every place was looked at.
using Cleared = std::pair<uint32_t, int64_t>;

struct Ready {  // a chunk that lookups find
  uint32_t space;
  Key key, parent;
};
// A grant and the ranks that are asked whether they still need it; none: the member that asked for the grant is asked.
using Question = std::pair<uint64_t, std::vector<uint32_t>>;

struct SpaceInfo {
  uint32_t space;
  Key digest, base;
  Id16 tenant;
  uint32_t chunks;
  std::optional<uint64_t> left_ms;  // nullopt: it was not left
};
struct GrantInfo {
  uint64_t grant;
  GrantKind kind;
  uint64_t session;
  Id16 request;
  uint32_t epoch, readers;
  std::vector<uint32_t> remaining;
  uint64_t chunks, bytes, opened_ms;
  uint64_t place;  // rises from the oldest grant to the youngest; ids do not, because cells are reused
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

}  // namespace kvdock
