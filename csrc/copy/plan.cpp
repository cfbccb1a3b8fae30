#include "copy/plan.h"

#include <algorithm>
#include <string>

#include "base/errors.h"

namespace kvdock {

namespace {

// The ids of the blocks to load in a chunk. The others come before them: they are shared, or a window has left them
// behind.
std::vector<int64_t> wanted_in(const LoadColumn& column, size_t chunk) {
  std::vector<int64_t> wanted;
  const size_t first = chunk * column.per_chunk, end = std::min(first + column.per_chunk, column.blocks.size());
  for (size_t at = std::max(first, column.local); at < end; ++at)
    if (column.blocks[at] >= 0) wanted.push_back(column.blocks[at]);
  return wanted;
}

std::string text_of(const std::vector<int64_t>& lengths) {
  std::string text;
  for (const int64_t length : lengths) text += (text.empty() ? "" : " or ") + std::to_string(length);
  return text + " bytes";
}

uintptr_t address_of(const PlannedPart& part, const std::vector<MappedSegment>& segments) {
  for (const MappedSegment& segment : segments)
    if (segment.id == part.segment) {
      if (part.offset > segment.bytes || part.length > segment.bytes - part.offset)
        refuse(Refusal::copy, "end of a part in segment " + std::to_string(part.segment), part.offset + part.length,
               "at most " + std::to_string(segment.bytes));
      return segment.address + part.offset;
    }
  refuse(Refusal::copy, "segment of a part", part.segment, "one that is mapped");
}

}  // namespace

bool LoadPieces::complete() const {
  for (size_t i = 0; i < size(); ++i)
    if (first_part(i) == part_ends[i]) return false;
  return true;
}

LoadPieces LoadPieces::placed(const std::vector<std::span<const int64_t>>& pages, size_t count) const {
  LoadPieces made = *this;
  for (size_t i = 0; i < size(); ++i) {
    const auto group = size_t(groups[i]);
    const std::span<const int64_t> of_group = group < pages.size() ? pages[group] : std::span<const int64_t>();
    for (size_t at = first_id(i) + size_t(skips[i]); at < id_ends[i]; ++at) {
      const int64_t number = block_ids[at] - (int64_t(count) - int64_t(of_group.size()));
      if (number < 0 || size_t(number) >= of_group.size())
        refuse(Refusal::copy, "page of group " + std::to_string(group), block_ids[at],
               "one of the last " + std::to_string(of_group.size()) + " of " + std::to_string(count));
      made.block_ids[at] = of_group[size_t(number)];
    }
  }
  return made;
}

DescribedParts LoadPieces::described(int64_t group, int64_t writer, size_t begin, size_t end, size_t blocks,
                                     const std::vector<int64_t>& lengths, const std::vector<MappedSegment>& segments) const {
  DescribedParts made;
  size_t of_group = 0;
  for (size_t i = 0; i < size(); ++i) {
    if (groups[i] != group || of_group++ < begin) continue;
    if (of_group > end) break;
    const auto last = parts.begin() + ptrdiff_t(part_ends[i]);
    const auto part = std::find_if(parts.begin() + ptrdiff_t(first_part(i)), last,
                                   [&](const PlannedPart& one) { return one.writer == writer; });
    if (part == last || std::find(lengths.begin(), lengths.end(), int64_t(part->length)) == lengths.end())
      refuse(Refusal::copy, "part of group " + std::to_string(group) + " by writer " + std::to_string(writer),
             part == last ? std::string("none") : std::to_string(part->length) + " bytes", text_of(lengths));
    if (id_ends[i] - first_id(i) != blocks)
      refuse(Refusal::copy, "blocks for a part of group " + std::to_string(group), id_ends[i] - first_id(i), blocks);
    made.slots.push_back(address_of(*part, segments));
    made.checksums.push_back(part->checksum);
    made.lengths.push_back(int64_t(part->length));
    made.chunks.push_back(chunks[i]);
    made.skips.push_back(skips[i]);
    made.block_ids.insert(made.block_ids.end(), block_ids.begin() + ptrdiff_t(first_id(i)),
                          block_ids.begin() + ptrdiff_t(id_ends[i]));
    made.starts.push_back(int64_t(made.block_ids.size()));
  }
  return made;
}

LoadPieces pieces_of(const PartTable& table, size_t first_chunk, size_t end_chunk, const std::vector<LoadColumn>& columns) {
  LoadPieces made;
  size_t part = 0;
  for (size_t at = 0; at < table.ends.size() && first_chunk + at < end_chunk; part = table.ends[at++]) {
    const size_t chunk = first_chunk + at;
    for (size_t group = 0; group < columns.size(); ++group) {
      const std::vector<int64_t> wanted = wanted_in(columns[group], chunk);
      if (wanted.empty()) continue;
      const size_t skip = columns[group].per_chunk - wanted.size();
      made.chunks.push_back(int64_t(chunk));
      made.groups.push_back(int64_t(group));
      made.skips.push_back(int64_t(skip));
      made.block_ids.resize(made.block_ids.size() + skip, 0);
      made.block_ids.insert(made.block_ids.end(), wanted.begin(), wanted.end());
      made.id_ends.push_back(made.block_ids.size());
      for (size_t i = part; i < table.ends[at]; ++i)
        if (table.parts[i].group == int64_t(group)) made.parts.push_back(table.parts[i]);
      made.part_ends.push_back(made.parts.size());
    }
  }
  return made;
}

}  // namespace kvdock
