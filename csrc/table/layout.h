// The layout of the chunk table's region: this file alone describes it.
//
// Ownership: only the server maps the region. It holds primary state only; what can be computed from that (key index,
//   pins, children, free lists, eviction order, byte sums) lives on the heap.
// Crash safety: a body is written first, with a CRC-32C over body and generation; then one 64-bit store makes it live.
//   Every transition is one such store. Fields named "mutable" may change while the word is live; the CRC leaves them
//   out. The next server checks everything before it trusts any of it (csrc/table/adopt.cpp): a word contains a check
//   of itself, and the holders of a grant are written twice.
// There are no pointers: cells are named by index; 0 is a valid index, kNone means none.
#pragma once

#include <algorithm>
#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "base/limits.h"
#include "segment/header.h"

namespace kvdock {

constexpr uint32_t kNone = 0xffffffffu;
constexpr uint64_t kTableMagic = 0x31656c6261746b76ull;  // "vktable1"
constexpr uint32_t kTableVersion = 6;
constexpr uint32_t kMaxNamespaces = 1024;
constexpr uint32_t kMaxSessions = 16384;
constexpr uint32_t kMaxMembers = 65536;
// An engine has a process for each rank, and some without ranks. Some calls look at all members of a session.
constexpr uint32_t kMaxSessionMembers = 2 * kMaxRanks;
constexpr uint32_t kMaxSlabs = 1u << 18;
constexpr uint32_t kPageBytes = 64 * 1024;  // records of one size share a page
constexpr uint32_t kPageRecords = 512;      // record id = page * kPageRecords + index
constexpr uint32_t kEntriesPerBlock = 15;

template <uint32_t kBytes>
struct Digest {
  uint8_t bytes[kBytes];
  bool operator==(const Digest& o) const { return std::memcmp(bytes, o.bytes, kBytes) == 0; }
  std::strong_ordering operator<=>(const Digest& o) const {
    uint64_t first, of_other;
    std::memcpy(&first, bytes, 8);
    std::memcpy(&of_other, o.bytes, 8);
    if (first != of_other) return __builtin_bswap64(first) <=> __builtin_bswap64(of_other);  // as memcmp orders them
    return std::memcmp(bytes, o.bytes, kBytes) <=> 0;
  }
  bool names_chunk() const { return !(*this == Digest{}) && !is_unknown(); }
  bool is_unknown() const {
    return std::all_of(bytes, bytes + kBytes, [](uint8_t b) { return b == 0xff; });
  }
};
// The key of a chunk. All zeros: the root, which is the parent of chunks that start a sequence. All ones: a parent that
// the engine did not know.
using Key = Digest<kKeyBytes>;
using Id16 = Digest<kIdBytes>;

// Makes a transition happen, with one store. The only other reader is the next server, when it adopts the region after
// this process has ended: it sees every store that this process made. So only the order of the stores matters: release
// keeps earlier stores before the transition, the fence keeps later ones after it.
template <class Word>
void publish(Word& word, std::type_identity_t<Word> value) {
  std::atomic_ref<Word>(word).store(value, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// State words use 48 bits; the top 16 are a check of them, so that a word that was overwritten is detected. If a cell
// is given (its index + 1), it is part of the check, so that a word copied from another cell, or zero, is invalid.
// Without one, zero is valid.
constexpr uint64_t kWordMask = (1ull << 48) - 1;
constexpr uint64_t sealed(uint64_t value, uint64_t cell = 0) {
  return value | ((value + (cell << 48 | cell)) * 0x9e3779b97f4a7c15ull >> 48) << 48;
}
constexpr bool whole(uint64_t word, uint64_t cell = 0) { return word == sealed(word & kWordMask, cell); }

// ---- records -----------------------------------------------------------------------------------
//
//      FREE ──reserve──► RESERVED ──last commit──► READY ──evict, delete, replace──► QUARANTINED
//        ▲                   └────── abort, deadline, death ────────────────────────────►│
//        └───────────────────────────── pins = 0 ────────────────────────────────────────┘
enum class RecordState : uint64_t { kFree = 0, kReserved = 1, kReady = 2, kQuarantined = 3 };

struct StoredPart {  // one writer's bytes of one group
  uint32_t slab;
  uint32_t segment;  // id
  uint32_t length;
  uint8_t group;
  uint8_t writer;
  uint16_t spare;
  uint64_t offset;
  uint64_t committed;  // mutable: kCommitted | checksum once its writer is done
};
constexpr uint64_t kCommitted = 1ull << 63;

struct Record {
  Key key;
  Key parent;
  uint64_t temp_seen;      // mutable, temporary records: 0: unread, else a hash of its reader; kTempKept: two readers
  uint64_t kept_until_ms;  // mutable: an administrator keeps it until then, on the server clock
  // A lookup or release touches no more than the 64 bytes from here to the end of the first part.
  uint64_t word;  // record_word()
  uint32_t crc;
  uint16_t space;  // namespace
  uint16_t part_count;
  uint32_t groups;
  uint32_t temporary;
  uint64_t last_used;  // mutable: use tick
  StoredPart parts[0];

  RecordState state() const { return static_cast<RecordState>(word & 7); }
  uint64_t generation() const { return (word & kWordMask) >> 3; }
};
constexpr uint64_t kTempKept = ~0ull;
constexpr uint32_t kMaxParts = (kPageBytes - sizeof(Record)) / sizeof(StoredPart);  // a record fits its page
constexpr uint64_t kGenerations = 1ull << 45;  // a record's word holds generations below it

constexpr uint64_t record_word(uint64_t generation, RecordState state) {
  return state == RecordState::kFree ? 0 : sealed(generation << 3 | static_cast<uint64_t>(state));
}

// ---- grants ------------------------------------------------------------------------------------
enum class GrantState : uint64_t { kAbsent = 0, kOpen = 1, kClosed = 2 };
enum class GrantKind : uint32_t { kLease = 1, kReservation = 2 };

struct GrantEntry {  // one chunk that a grant lets its holders touch
  uint64_t generation;
  uint32_t record;
  uint16_t groups;
  uint16_t index;  // lease: chunk index from token 0; reservation: index into the store's keys
};

struct EntryBlock {
  uint32_t next;
  uint32_t spare[3];
  GrantEntry entries[kEntriesPerBlock];
};

struct Grant {
  uint64_t word;  // grant_word(): use << 2 | state; `id` is incarnation << 40 | (use * capacity + cell)
  uint32_t crc;
  GrantKind kind;
  uint64_t id;
  uint32_t session;  // session cell
  uint32_t asker;    // member cell
  uint32_t readers;  // holders: ranks 0..readers-1
  uint32_t epoch;
  Id16 request;        // request or store id
  uint64_t body_hash;  // reservation: of its keys and options
  uint64_t session_use;  // the session's use(): a session cell is used by one session after another
  uint64_t opened_ms;
  uint64_t holders[2];   // mutable: the bits of ranks that are not discharged
  uint64_t released[2];  // mutable: the bits of ranks that are; set just after the bit in `holders` is cleared
  uint64_t deadline_ms;  // mutable, reservation
  uint64_t asked_ms;     // mutable, lease: opened or last kept
  uint32_t entry_count;   // mutable: stored after the entry itself
  uint32_t first_block;  // mutable
  uint32_t last_block;   // mutable
  uint32_t asker_done;   // mutable
  uint32_t key_count;    // mutable, lease: how many keys its last lookup asked for
  uint32_t completed;    // mutable, reservation: every holder committed all its parts
  Key last_key;          // mutable, lease: the last of these keys

  GrantState state() const { return static_cast<GrantState>(word & 3); }
  uint64_t use() const { return (word & kWordMask) >> 2; }
  bool live_holders() const { return (holders[0] | holders[1]) != 0; }
  bool holds(uint32_t rank) const { return holders[rank / 64] >> (rank % 64) & 1; }
};

// The check includes the cell, in every cell from the start: if a word is lost, adoption must not take its cell for
// empty.
constexpr uint64_t grant_word(uint32_t cell, uint64_t use, GrantState state) {
  return sealed(use << 2 | static_cast<uint64_t>(state), cell + 1);
}

// ---- identity, sessions, members ----------------------------------------------------------------------------
enum class GroupKind : uint32_t { kFull = 0, kWindow = 1 };

struct Group {
  GroupKind kind;
  uint32_t window_tokens;
  uint64_t part_bytes;    // of a raw part
  uint64_t packed_bytes;  // of a packed part; 0: the group's parts are raw

  // What a part gets unless its writer asks for room for a raw one.
  uint64_t slot_bytes() const { return packed_bytes ? packed_bytes : part_bytes; }
  bool may_have(uint64_t length) const { return length == part_bytes || length == slot_bytes(); }
};

constexpr uint64_t kMostGeneration = (1ull << 48) - 2;  // of a namespace: the most that a sealed word holds

struct Namespace {
  uint64_t word;  // sealed: 1 = live
  uint32_t crc;
  uint32_t chunk_tokens;
  uint32_t block_tokens;
  uint32_t writers;
  uint32_t group_count;
  uint32_t spare;
  Key digest;
  Key base;     // the digest without weights; equal to `digest` where the weights are those that engines start with
  Id16 tenant;  // its owner; zeros: the server's own user
  Group groups[kMaxGroups];
  uint64_t left_ms;  // mutable, server clock: when it was last left (Namespaces::leave_session); 0: it was not
  // mutable, sealed with the cell: how often it was cleared, counted over all pools and tiers that share its chunks;
  // and the highest generation of records that were cleared.
  uint64_t generation;
  uint64_t cleared_through;
};

struct Session {
  uint64_t word;  // sealed: use << 1 | live
  uint32_t crc;
  uint32_t spare;
  Id16 nonce;
  uint64_t opened_ms;
  uint64_t filed;  // mutable: filed_word(): the namespace that its lookups and stores are filed in
  uint32_t rank_member[kMaxRanks];  // mutable: member cell or kNone

  bool live() const { return word & 1; }
  uint64_t use() const { return (word & kWordMask) >> 1; }
  uint32_t space() const { return static_cast<uint32_t>(filed & kWordMask); }
};
constexpr uint64_t filed_word(uint32_t cell, uint32_t space) { return sealed(space, cell + 1); }

enum class MemberState : uint64_t { kFree = 0, kLive = 1, kSuspect = 2, kDead = 3, kGone = 4 };
constexpr const char* name_of(MemberState state) {
  constexpr const char* names[] = {"free", "live", "suspect", "dead", "gone"};
  return names[static_cast<size_t>(state)];
}

struct Member {
  uint64_t word;  // sealed: use << 3 | state
  uint32_t crc;
  uint32_t session;
  Id16 nonce;
  uint32_t scheduler;
  uint32_t spare;
  uint64_t ranks[2];
  uint64_t lock_offset;   // the byte of the lock file that it holds while it lives
  uint64_t heartbeat_ms;  // mutable
  uint64_t dead_ms;       // mutable
  uint32_t pinned_through;  // mutable: it has page-locked all segments with ids below; kNone: it locks none
  uint32_t spare_end;

  MemberState state() const { return static_cast<MemberState>(word & 7); }
  uint64_t use() const { return (word & kWordMask) >> 3; }
};

enum class SegmentState : uint64_t { kNever = 0, kLive = 1, kRetiring = 2, kGone = 3 };
constexpr const char* name_of(SegmentState state) {
  constexpr const char* names[] = {"never", "live", "retiring", "gone"};
  return names[static_cast<size_t>(state)];
}

// The entry of a segment that is gone is used again, by a segment with a higher id. So the highest id of all entries is
// the highest that was ever given.
struct SegmentEntry {
  uint64_t word;  // 0, or segment_word()
  uint64_t data_offset;
  uint64_t data_bytes;

  SegmentState state() const { return static_cast<SegmentState>(word & 3); }
  uint32_t id() const { return static_cast<uint32_t>((word & kWordMask) >> 2); }
  bool in_use() const { return state() == SegmentState::kLive || state() == SegmentState::kRetiring; }
};

constexpr uint64_t segment_word(uint32_t cell, uint32_t id, SegmentState state) {
  return sealed(uint64_t{id} << 2 | static_cast<uint64_t>(state), cell + 1);
}

struct Slab {     // slots of one size, side by side in a segment
  uint64_t word;  // 0, or slab_word(): live
  uint32_t segment;
  uint32_t count;
  uint64_t offset;
  uint64_t slot_bytes;
};

// ---- the region --------------------------------------------------------------------------------
// A part that gets another slot. It is written before the record is, so that adoption can end what a killed server
// began: a record has its old slot or its new one, never a mix.
struct Move {
  uint64_t word;  // 0, or move_word()
  uint32_t slab;
  uint32_t segment;
  uint64_t offset;
  uint32_t length;
  uint32_t crc;  // of the record, with the new slot
};
constexpr uint64_t move_word(uint32_t record, uint32_t part) { return sealed((uint64_t{record} << 8 | part) + 1); }
constexpr std::pair<uint32_t, uint32_t> move_of(uint64_t word) {  // record and part
  const uint64_t both = (word & kWordMask) - 1;
  return {static_cast<uint32_t>(both >> 8), static_cast<uint32_t>(both & 0xff)};
}

struct TableHeader {
  uint64_t magic;      // `magic` and `version` never move: other builds read them
  uint32_t version;    // stored last
  uint32_t crc;        // of the constant fields below
  uint64_t geometry;   // a hash of the sizes of all structures: builds that disagree refuse each other's regions
  uint64_t pool_id;
  uint64_t region_bytes;
  uint64_t lock_inode;  // inode of the lock file whose bytes the members hold
  uint32_t max_grants;
  uint32_t max_entry_blocks;
  uint32_t max_pages;
  uint32_t first_incarnation;  // of the pool's first server
  uint64_t incarnation;        // mutable, sealed: of the present server
  uint64_t last_generation;    // mutable: the highest generation that was given to a record
  uint64_t use_tick;           // mutable
  uint64_t limit_bytes;        // mutable
  uint64_t clock_ms;           // mutable: the server clock at the last tick
  Move move;
};

static_assert(sizeof(Key) == 32 && sizeof(Id16) == 16);
static_assert(sizeof(StoredPart) == 32 && offsetof(StoredPart, committed) == 24);
static_assert(sizeof(Record) == 112 && offsetof(Record, word) == 80 && offsetof(Record, last_used) == 104);
static_assert(sizeof(GrantEntry) == 16 && sizeof(EntryBlock) == 256);
static_assert(sizeof(Grant) == 184 && offsetof(Grant, holders) == 80);
static_assert(sizeof(Group) == 24 && sizeof(Namespace) == 520);
static_assert(sizeof(Session) == 560 && sizeof(Member) == 88);
static_assert(sizeof(SegmentEntry) == 24 && sizeof(Slab) == 32 && sizeof(Move) == 32 && sizeof(TableHeader) == 136);
static_assert(offsetof(TableHeader, magic) == 0 && offsetof(TableHeader, version) == 8);

constexpr uint64_t round_slot(uint64_t bytes) { return (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign; }

constexpr uint64_t fold(uint64_t h, uint64_t v) { return (h ^ v) * 0x9e3779b97f4a7c15ull; }
constexpr uint64_t table_geometry() {
  uint64_t h = kTableVersion;
  for (uint64_t v :
       {sizeof(Record), sizeof(StoredPart), sizeof(GrantEntry), sizeof(EntryBlock), sizeof(Grant), sizeof(Namespace),
        sizeof(Session), sizeof(Member), sizeof(SegmentEntry), sizeof(Slab), size_t{kPageBytes}, size_t{kPageRecords},
        size_t{kMaxSlabs}, size_t{kMaxSessions}, size_t{kMaxMembers}})
    h = fold(h, v);
  return h;
}

// Where each array begins, given the capacities; page-aligned.
struct RegionMap {
  uint64_t namespaces, segments, slabs, sessions, members, grants, entry_blocks, page_sizes, pages, end;

  RegionMap(uint32_t max_grants, uint32_t max_entry_blocks, uint32_t max_pages) {
    uint64_t at = kSlotAlign;
    auto take = [&at](uint64_t bytes) {
      uint64_t start = at;
      at = (at + bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
      return start;
    };
    namespaces = take(uint64_t{kMaxNamespaces} * sizeof(Namespace));
    segments = take(uint64_t{kMaxSegments} * sizeof(SegmentEntry));
    slabs = take(uint64_t{kMaxSlabs} * sizeof(Slab));
    sessions = take(uint64_t{kMaxSessions} * sizeof(Session));
    members = take(uint64_t{kMaxMembers} * sizeof(Member));
    grants = take(uint64_t{max_grants} * sizeof(Grant));
    entry_blocks = take(uint64_t{max_entry_blocks} * sizeof(EntryBlock));
    page_sizes = take(uint64_t{max_pages} * sizeof(uint32_t));
    pages = take(uint64_t{max_pages} * kPageBytes);
    end = at;
  }
};

}  // namespace kvdock
