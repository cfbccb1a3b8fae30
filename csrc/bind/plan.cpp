// Bindings of csrc/copy/plan.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <variant>

#include "bind/bind.h"
#include "bind/part_codec.h"
#include "bind/parts.h"
#include "copy/plan.h"
#include "copy/trusted.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

// Group, writer, segment, offset, length, checksum: an integer, or its hex digits.
using Row = std::tuple<int64_t, int64_t, int64_t, uint64_t, uint64_t, std::variant<uint64_t, std::string>>;
using Rows = std::vector<Row>;

uint64_t checksum_of(const std::variant<uint64_t, std::string>& given) {
  if (const auto* number = std::get_if<uint64_t>(&given)) return *number;
  const std::string& text = std::get<std::string>(given);
  uint64_t checksum = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  if (error != std::errc() || text.empty() || text.size() > 16 || end != text.data() + text.size())
    refuse(Refusal::copy, "checksum", text, "16 hex digits");
  return checksum;
}

PlannedPart part_of(const Row& row) {
  const auto& [group, writer, segment, offset, length, checksum] = row;
  return {group, writer, segment, offset, length, checksum_of(checksum)};
}

Rows rows_of(const std::vector<PlannedPart>& parts, size_t begin, size_t end) {
  Rows rows;
  for (size_t i = begin; i < end; ++i) {
    const PlannedPart& part = parts[i];
    rows.emplace_back(part.group, part.writer, part.segment, part.offset, part.length, part.checksum);
  }
  return rows;
}

PartTable table_of(const std::vector<Rows>& chunks) {
  PartTable table;
  for (const Rows& rows : chunks) {
    for (const Row& row : rows) table.parts.push_back(part_of(row));
    table.ends.push_back(table.parts.size());
  }
  return table;
}

// Without the interpreter lock: the thread that waits for the answer may run meanwhile.
PartTable table_from(const py::bytes& packed) {
  const std::string_view view = packed;
  std::optional<PartTable> table;
  {
    const py::gil_scoped_release released;
    table = parts_from_msgpack(view);
  }
  if (!table) throw py::value_error("parts: found " + std::to_string(view.size()) + " other bytes, wanted MessagePack");
  return std::move(*table);
}

size_t index_of(py::ssize_t at, size_t size) {
  if (at < 0) at += py::ssize_t(size);
  if (at < 0 || size_t(at) >= size) throw py::index_error();
  return size_t(at);
}

Rows chunk_of(const PartTable& self, py::ssize_t at) {
  const size_t i = index_of(at, self.ends.size());
  return rows_of(self.parts, i == 0 ? 0 : self.ends[i - 1], self.ends[i]);
}

LoadPieces pieces_from(const PartTable& self, size_t first_chunk, size_t end_chunk,
                       const std::vector<py::buffer>& columns, const std::vector<size_t>& per_chunk,
                       const std::vector<size_t>& local) {
  if (columns.size() != per_chunk.size() || columns.size() != local.size())
    refuse(Refusal::copy, "columns", columns.size(), per_chunk.size());
  std::vector<Integers<int64_t>> held;
  std::vector<LoadColumn> made;
  held.reserve(columns.size());
  for (size_t group = 0; group < columns.size(); ++group)
    made.push_back({held.emplace_back(columns[group], "column").view(), per_chunk[group], local[group]});
  return pieces_of(self, first_chunk, end_chunk, made);
}

// Chunk, group, parts, block ids, skipped blocks.
using Piece = std::tuple<int64_t, int64_t, Rows, std::vector<int64_t>, int64_t>;

LoadPieces pieces_of_rows(const std::vector<Piece>& rows) {
  LoadPieces made;
  for (const auto& [chunk, group, parts, ids, skip] : rows) {
    made.chunks.push_back(chunk);
    made.groups.push_back(group);
    made.skips.push_back(skip);
    made.block_ids.insert(made.block_ids.end(), ids.begin(), ids.end());
    made.id_ends.push_back(made.block_ids.size());
    for (const Row& row : parts) made.parts.push_back(part_of(row));
    made.part_ends.push_back(made.parts.size());
  }
  return made;
}

Piece piece_of(const LoadPieces& self, py::ssize_t at) {
  const size_t i = index_of(at, self.size());
  return {self.chunks[i], self.groups[i], rows_of(self.parts, self.first_part(i), self.part_ends[i]),
          std::vector<int64_t>(self.block_ids.begin() + ptrdiff_t(self.first_id(i)),
                               self.block_ids.begin() + ptrdiff_t(self.id_ends[i])),
          self.skips[i]};
}

LoadPieces placed(const LoadPieces& self, const std::vector<py::buffer>& pages, size_t count) {
  std::vector<Integers<int64_t>> held;
  std::vector<std::span<const int64_t>> views;
  held.reserve(pages.size());
  for (const py::buffer& of_group : pages) views.push_back(held.emplace_back(of_group, "pages").view());
  const py::gil_scoped_release released;
  return self.placed(views, count);
}

template <class T>
py::bytes as_bytes(const std::vector<T>& from) {
  return py::bytes(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(T));
}

// Slots, block ids, starts, skips, checksums, lengths, chunks: integers of 8 bytes each.
using Described = py::typing::Tuple<py::bytes, py::bytes, py::bytes, py::bytes, py::bytes, py::bytes, py::bytes>;

Described described(const LoadPieces& self, int64_t group, int64_t writer, size_t begin, size_t end, size_t blocks,
                    const std::vector<int64_t>& lengths, const std::vector<std::array<uint64_t, 3>>& segments) {
  std::vector<MappedSegment> mapped;
  for (const auto& [id, address, bytes] : segments) mapped.push_back({int64_t(id), uintptr_t(address), size_t(bytes)});
  DescribedParts made;
  {
    const py::gil_scoped_release released;
    made = self.described(group, writer, begin, end, blocks, lengths, mapped);
  }
  return py::make_tuple(as_bytes(made.slots), as_bytes(made.block_ids), as_bytes(made.starts), as_bytes(made.skips),
                        as_bytes(made.checksums), as_bytes(made.lengths), as_bytes(made.chunks));
}

template <class T>
std::vector<T> vector_of(const py::bytes& from) {
  const std::string_view view = from;
  std::vector<T> made(view.size() / sizeof(T));
  std::memcpy(made.data(), view.data(), made.size() * sizeof(T));
  return made;
}

using State = py::typing::Tuple<py::bytes, py::bytes, py::bytes, py::bytes, py::bytes, py::bytes, py::bytes>;

State state_of(const LoadPieces& self) {
  return py::make_tuple(as_bytes(self.parts), as_bytes(self.part_ends), as_bytes(self.id_ends), as_bytes(self.chunks),
                        as_bytes(self.groups), as_bytes(self.skips), as_bytes(self.block_ids));
}

LoadPieces of_state(const State& from) {
  return {vector_of<PlannedPart>(from[0]), vector_of<size_t>(from[1]), vector_of<size_t>(from[2]),
          vector_of<int64_t>(from[3]), vector_of<int64_t>(from[4]), vector_of<int64_t>(from[5]),
          vector_of<int64_t>(from[6])};
}

void bind_trusted(py::module_& m) {
  py::class_<TrustedParts>(m, "TrustedParts",
          "Parts whose bytes were found right, by their place and checksum, with the time: the latest ones, at "
          "most `most_parts` of at most `most_bytes`. Times are seconds of one clock. Not thread-safe.")
      .def(py::init<uint64_t, size_t>(), "most_bytes"_a, "most_parts"_a)
      .def("add", [](TrustedParts& self, const std::vector<Row>& parts, double now_s) {
        for (const Row& row : parts) self.add(part_of(row), now_s);
      }, "parts"_a, "now_s"_a, "A part is as in LoadPieces.")
      .def("add_pieces", [](TrustedParts& self, const LoadPieces& pieces, double now_s) {
        for (const PlannedPart& part : pieces.parts) self.add(part, now_s);
      }, "pieces"_a, "now_s"_a)
      .def("has", [](const TrustedParts& self, const Row& part, double since_s) {
        return self.has(part_of(part), since_s);
      }, "part"_a, "since_s"_a, "Whether the part was added after `since_s`.")
      .def("has_all", [](const TrustedParts& self, const PartTable& table, double since_s) {
        return std::all_of(table.parts.begin(), table.parts.end(),
                           [&](const PlannedPart& part) { return self.has(part, since_s); });
      }, "table"_a, "since_s"_a, "Whether all parts were added after `since_s`.")
      .def("others", [](const TrustedParts& self, const PartTable& table, double since_s) {
        std::vector<std::pair<size_t, Row>> found;
        for (size_t chunk = 0, at = 0; chunk < table.ends.size(); ++chunk)
          for (; at < table.ends[chunk]; ++at)
            if (!self.has(table.parts[at], since_s)) found.emplace_back(chunk, rows_of(table.parts, at, at + 1)[0]);
        return found;
      }, "table"_a, "since_s"_a, "The parts that were not added after `since_s`, each with the index of its chunk.")
      .def("__len__", &TrustedParts::size)
      .def("clear", &TrustedParts::clear);
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<LoadPieces>(m, "LoadPieces",
          "The pieces of a load as arrays. A piece is (chunk, group, parts, block ids, skipped blocks), and a part "
          "(group, writer, segment, offset, length, checksum). Immutable.")
      .def(py::init(&pieces_of_rows), "pieces"_a)
      .def("__len__", &LoadPieces::size)
      .def("piece", &piece_of, "at"_a, "Raises IndexError.")
      .def("complete", &LoadPieces::complete, "Whether each piece has a part.")
      .def("counts", [](const LoadPieces& self, size_t groups) {
        std::vector<size_t> counts(groups);
        for (const int64_t group : self.groups) counts.at(size_t(group))++;
        return counts;
      }, "groups"_a, "How many pieces each group has.")
      .def("segments", [](const LoadPieces& self, int64_t group, int64_t writer) {
        std::vector<int64_t> found;
        for (const PlannedPart& part : self.parts)
          if (part.group == group && part.writer == writer &&
              std::find(found.begin(), found.end(), part.segment) == found.end())
            found.push_back(part.segment);
        return found;
      }, "group"_a, "writer"_a, "The segments of the parts by `writer` in a group, each once.")
      .def("placed", &placed, "pages"_a, "count"_a,
           "The same pieces with blocks in place of the numbers of the load's `count` pages. pages[g]: int64, the "
           "blocks of the last pages of group g. Raises CopyError for a number that is not among them.")
      .def("described", &described, "group"_a, "writer"_a, "begin"_a, "end"_a, "blocks"_a, "lengths"_a, "segments"_a,
           "The parts by `writer` of the pieces [begin, end) among those of `group`: bytes of 8-byte integers, namely "
           "slots, block ids, starts, skips, checksums, lengths and chunks. Each part must have `blocks` blocks, one "
           "of `lengths` bytes, and lie within one of `segments` (id, address, bytes). Raises CopyError.")
      .def("state", &state_of, "Bytes, for of_state().")
      .def_static("of_state", &of_state, "state"_a);
  py::class_<PartTable>(m, "PartTable", "The parts of consecutive chunks as arrays; a part is as in LoadPieces.")
      .def(py::init(&table_of), "chunks"_a)
      .def_static("of_msgpack", &table_from, "packed"_a,
                  "From the `chunks` of the answer to a lookup, an array for each chunk. Raises ValueError.")
      .def("__len__", [](const PartTable& self) { return self.ends.size(); })
      .def("chunk", &chunk_of, "at"_a, "The parts of a chunk. Raises IndexError.")
      .def("pieces", &pieces_from, "first_chunk"_a, "end_chunk"_a, "columns"_a, "per_chunk"_a, "local"_a,
           "The pieces of a load of all chunks before `end_chunk` that have a block to load; the table begins with "
           "`first_chunk`. For each KV group, `columns` has int64, the engine's blocks from token 0 on, -1 where "
           "nothing is loaded; `per_chunk` the blocks of a chunk; `local` how many blocks are not loaded.");
  bind_trusted(m);
}

}  // namespace kvdock
