// Counts the contents of the pool for people: by namespace, and by prefix. A prefix is a first chunk with all its
// descendants; all of it shares the part up to the chunk where the tree of chunks forks. A census may instead count
// what goes on from one chunk: each of its children is then the first chunk of a prefix.
//
// Chunks are counted and ranked some at a time, while the pool changes, so that no call takes long. A chunk that is
// stored or removed meanwhile may be counted or left out. A prefix whose first chunk is removed is left out; lookups do
// not find its other chunks, which then belong to no prefix.
// Ownership: derived data of one count. After the count only the figures and the most used prefixes remain.
// Thread safety: the caller holds the table's mutex.
#pragma once

#include <memory>
#include <vector>

#include "table/records.h"

namespace kvdock {

struct SpaceCount {
  uint64_t chunks = 0, bytes = 0;
  uint64_t oldest = UINT64_MAX, newest = 0;  // ticks of last uses
};

// A prefix as it was counted.
struct PrefixCount {
  uint32_t space;
  Key first;
  uint64_t chunks, bytes;
  uint64_t born_ms, used_ms;  // on the server clock; 0: not known
  uint32_t uses;              // lookups that found the first chunk
  // The deepest chunk that at least half of those lookups also found, and the number of chunks from the first one to
  // it, including both.
  Key last;
  uint32_t last_chunks;
  // The last chunk before the prefix branches, the number and bytes of the chunks from the first one to it, and the
  // number of branches.
  Key fork;
  uint32_t shared_chunks, branches;
  uint64_t shared_bytes;
  bool kept;  // an administrator keeps one of its chunks
  uint32_t record, stamp;  // the first chunk's, as Census has them
};

// What a census counts, and which prefixes it ranks.
struct Survey {
  uint32_t space = kNone;  // kNone: all namespaces, from the first chunks on; else what goes on from the chunk `below`
  Key below{};
  std::vector<std::pair<uint32_t, Key>> named;  // chunks to find the prefixes of, each given once
  bool is_search = false;  // ranks only prefixes in `spaces`, and those that hold a chunk that is sought:
  std::vector<uint32_t> spaces;
  uint32_t sought = 0;  // the first ones of `named`,
  Key from{}, to{};     // and keys from `from` to `to`; none, if `to` is less
};

// Where a named chunk is.
struct NamedChunk {
  uint32_t name;   // its index in Survey::named
  Key first;       // its prefix's
  uint32_t depth;  // how many chunks there are from the first one to it, including both
};

class Census {
 public:
  explicit Census(const Records& records, Survey survey = {});

  // Does `budget` more pieces of work, each of about the cost of looking at one chunk. Returns whether all is counted.
  bool step(uint32_t budget);

  // Namespaces that have chunks. Here `oldest` and `newest` are milliseconds of the server clock; 0: not known.
  std::vector<std::pair<uint32_t, SpaceCount>> spaces() const;
  struct Page {
    std::vector<PrefixCount> found;
    uint64_t all = 0;   // the number of all prefixes
    uint32_t next = 0;  // the place where the next page begins; 0: there is none
  };
  // The `most` prefixes of those namespaces that were used most often, at most kMostListed, from that place on. Of
  // equally often used ones the larger comes first. Prefixes that were removed since are left out; where these are
  // many, fewer are returned. REQUIRES: all is counted; each namespace is named once.
  Page prefixes(const std::vector<uint32_t>& spaces, size_t most, uint32_t start) const;
  // The named chunks that have a prefix. REQUIRES: all is counted.
  std::vector<NamedChunk> named() const;

 private:
  static constexpr size_t kMostListed = 256;
  enum class Phase { link, name, add, share, rank, sort, free, done };
  // Identifies the chunk in a record: the low bits of its generation, which no two chunks of a record share in a count.
  uint32_t stamp(uint32_t id) const { return static_cast<uint32_t>(records_.at(id).generation()); }
  struct Node {
    uint32_t above = kNone;  // the record of an ancestor; for a first chunk, its own; kNone: not counted
    uint32_t up = 0;         // the distance to that ancestor, in chunks; for a first chunk, the index of its prefix
    uint32_t stamp = 0, above_stamp = 0;
    uint32_t children = 0;  // READY ones
    uint32_t name = kNone;  // its index in Survey::named
    void move(uint32_t to, uint32_t by, uint32_t of_chunk, uint32_t of_above) {
      above = to, up = by, stamp = of_chunk, above_stamp = of_above;
    }
  };
  struct Prefix {
    uint64_t bytes, used;  // `used`: tick
    uint32_t first, stamp, chunks, last, last_stamp, last_chunks;
    uint32_t fork, fork_stamp, fork_chunks, branches;  // fork_chunks kNone: no fork and no end has been found
    uint64_t shared_bytes;
    bool kept, is_sought;
    // A circle has neither fork nor end: it counts as a fork at its first chunk.
    uint32_t shared_chunks() const { return fork_chunks == kNone ? 1 : fork_chunks; }
  };
  struct Place {  // of a named chunk
    uint32_t first = kNone, stamp = 0, depth = 0;
  };
  struct Ranking {
    uint64_t count = 0;
    std::vector<PrefixCount> top;  // until all are ranked, a heap with the least used in front; then sorted
  };
  // An array in blocks: each is allocated when it is first used, and they are freed one by one, so that no step is
  // long.
  template <class T>
  class Blocks {
   public:
    T& at(uint32_t i) {
      uint32_t block = i / kBlock;
      if (block >= blocks_.size()) blocks_.resize(block + 1);
      if (!blocks_[block]) blocks_[block] = std::make_unique<T[]>(kBlock);
      return blocks_[block][i % kBlock];
    }
    bool drop_last() {
      if (blocks_.empty()) return false;
      blocks_.pop_back();
      return true;
    }

   private:
    static constexpr uint32_t kBlock = 1024;
    std::vector<std::unique_ptr<T[]>> blocks_;
  };

  bool is_ready(uint32_t id) const;
  bool is_there(uint32_t id, uint32_t stamp) const;
  void enter(Phase phase) { phase_ = phase, at_ = 0; }
  uint32_t work();
  uint32_t look();
  void link(uint32_t id);
  bool is_first(uint32_t id, const KeyEntry* before) const;
  uint32_t new_prefix(uint32_t id);
  void name(uint32_t index);
  bool climb();
  void add(uint32_t id, Prefix& to, uint32_t depth);
  void find(uint32_t id, Prefix& in, uint32_t depth);
  uint32_t rank(const Prefix& prefix);
  uint32_t sort(Ranking& ranking);

  const Records& records_;
  Survey of_;
  size_t most_ranked_;  // of one namespace
  uint32_t end_, at_ = 0;
  Phase phase_ = Phase::link;
  uint32_t walk_ = kNone, walked_ = 0;  // the ancestor of chunk at_ that climb() has reached, and how far up it is
  Blocks<Node> nodes_;                  // by record
  Blocks<Prefix> prefixes_;
  uint32_t prefix_count_ = 0;
  std::vector<SpaceCount> spaces_;
  std::vector<Ranking> rankings_;  // by namespace
  std::vector<Place> places_;      // by index in Survey::named
  std::vector<bool> is_sought_;    // by namespace: all its prefixes are
};

}  // namespace kvdock
