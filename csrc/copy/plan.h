// The parts of a load as arrays: from the answer to a lookup to what a copier takes, without an object for each part.
//
// Ownership: values. Thread safety: a value that nobody changes may be used by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvdock {

// Where the part of one writer in a chunk of a KV group is stored.
struct PlannedPart {
  int64_t group, writer, segment;
  uint64_t offset, length, checksum;
};

// The parts of consecutive chunks: those of chunk i are parts[ends[i - 1], ends[i]).
struct PartTable {
  std::vector<PlannedPart> parts;
  std::vector<size_t> ends;
};

// The blocks that a load fills in one KV group: `blocks` are the engine's blocks from token 0 on, below 0 where nothing
// is loaded. A chunk has `per_chunk` blocks; the first `local` blocks are not loaded.
struct LoadColumn {
  std::span<const int64_t> blocks;
  size_t per_chunk, local;
};

struct MappedSegment {
  int64_t id;
  uintptr_t address;
  size_t bytes;
};

// What a copier takes: part i has blocks block_ids[starts[i], starts[i + 1]).
struct DescribedParts {
  std::vector<uint64_t> slots, checksums;
  std::vector<int64_t> block_ids, starts{0}, skips, lengths, chunks;
};

// A piece is one chunk of one KV group. Piece i has parts[part_ends[i - 1], part_ends[i]) and
// block_ids[id_ends[i - 1], id_ends[i]). Its first skips[i] block ids have no meaning.
struct LoadPieces {
  std::vector<PlannedPart> parts;
  std::vector<size_t> part_ends, id_ends;
  std::vector<int64_t> chunks, groups, skips, block_ids;

  size_t size() const { return chunks.size(); }
  size_t first_part(size_t piece) const { return piece == 0 ? 0 : part_ends[piece - 1]; }
  size_t first_id(size_t piece) const { return piece == 0 ? 0 : id_ends[piece - 1]; }
  // Whether each piece has a part.
  bool complete() const;
  // Pieces with blocks in place of the numbers of the load's `count` pages. pages[g]: the last pages of group g.
  // Throws Refused{copy} for a number that is not among them.
  LoadPieces placed(const std::vector<std::span<const int64_t>>& pages, size_t count) const;
  // The parts by `writer` of the pieces [begin, end) among those of `group`. Each must have `blocks` blocks, one of
  // `lengths` bytes, and lie within one of `segments`; throws Refused{copy}.
  DescribedParts described(int64_t group, int64_t writer, size_t begin, size_t end, size_t blocks,
                           const std::vector<int64_t>& lengths, const std::vector<MappedSegment>& segments) const;
};

// The pieces of a load of all chunks of `table` before chunk `end_chunk` that have a block to load; the first chunk of
// the table is `first_chunk`.
LoadPieces pieces_of(const PartTable& table, size_t first_chunk, size_t end_chunk,
                     const std::vector<LoadColumn>& columns);

}  // namespace kvdock
