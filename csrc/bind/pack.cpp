// Bindings of csrc/pack. The sizes of buffers are checked here; the GIL is released around packing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <string>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/contiguous.h"
#include "bind/parts.h"
#include "copy/packed.h"
#include "pack/part.h"

namespace kvdock {

namespace {

using namespace py::literals;

PackedShape make_shape(const std::vector<size_t>& planes, std::optional<size_t> marks, std::optional<size_t> units) {
  size_t tiles = 0;
  for (const size_t bytes : planes) tiles += bytes / kTileBytes;
  return PackedShape(planes, marks.value_or(PackedShape::kMarks), units.value_or(PackedShape::units_for(tiles)));
}

void require_bytes(const char* what, const Contiguous& buffer, size_t wanted) {
  if (buffer.bytes() != wanted) refuse(Refusal::copy, std::string(what) + ": bytes", buffer.bytes(), wanted);
}

std::vector<Book> made(const std::string_view exponents) {
  std::vector<Book> books;
  for (size_t i = 0; i < exponents.size(); i += kBookExponents) {
    const auto* at = reinterpret_cast<const uint8_t*>(exponents.data()) + i;
    books.push_back(make_book(std::span<const uint8_t, kBookExponents>(at, kBookExponents)));
  }
  return books;
}

long pack(const PackedShape& shape, const py::buffer& part, const py::buffer& slot, std::optional<py::bytes> books) {
  const Contiguous from(part), to(slot, PyBUF_WRITABLE);
  require_bytes("part", from, shape.raw_bytes());
  require_bytes("slot", to, shape.packed_bytes());
  if (!books) {
    const py::gil_scoped_release released;
    return pack_part(shape, from.data(), to.data());
  }
  const std::string_view exponents(*books);
  if (exponents.size() != kBookExponents * shape.planes().size())
    refuse(Refusal::copy, "books: bytes", exponents.size(), kBookExponents * shape.planes().size());
  const std::vector<Book> given = made(exponents);
  const py::gil_scoped_release released;
  return pack_part(shape, given, from.data(), to.data());
}

bool unpack(const PackedShape& shape, const py::buffer& slot, const py::buffer& part) {
  const Contiguous from(slot), to(part, PyBUF_WRITABLE);
  require_bytes("slot", from, shape.packed_bytes());
  require_bytes("part", to, shape.raw_bytes());
  const py::gil_scoped_release released;
  return unpack_part(shape, from.data(), to.data());
}

py::bytes learn(const PackedShape& shape, const py::buffer& part) {
  const Contiguous from(part);
  require_bytes("part", from, shape.raw_bytes());
  std::string books;
  for (const PlaneShape& plane : shape.planes()) {
    const Book book = learn_book(from.data() + plane.raw_at, plane.tiles());
    books.append(reinterpret_cast<const char*>(book.exponents), kBookExponents);
  }
  return books;
}

using Sums = std::vector<std::optional<uint64_t>>;

Sums packed_gather(const PagedLayout& layout, const PackedShape& shape, const py::buffer& slots,
                    const py::buffer& block_ids, const py::buffer& starts, int threads) {
  const PartBuffers call(slots, block_ids, starts);
  const py::gil_scoped_release released;
  return gather_packed(layout, shape, call.parts, threads);
}

Sums packed_scatter(const PagedLayout& layout, const PackedShape& shape, const py::buffer& slots,
                     const py::buffer& block_ids, const py::buffer& starts, const py::buffer& skips,
                     const py::buffer& expected, int threads) {
  const PartBuffers call(slots, block_ids, starts, skips);
  const Integers<uint64_t> sums(expected, "expected");
  const py::gil_scoped_release released;
  return scatter_packed(layout, shape, call.parts, sums.view(), threads);
}

void bind_packed_copies(py::module_& m) {
  m.def("packed_shape", [](const PagedLayout& layout, size_t blocks, std::optional<size_t> marks,
                           std::optional<size_t> units) {
    return make_shape(plane_bytes(layout, blocks), marks, units);
  }, "layout"_a, py::kw_only(), "blocks"_a, "marks"_a = py::none(), "units"_a = py::none(),
     "The shape of packed parts of so many blocks; marks, units: as in PackedShape(). Raises CopyError.");
  m.def("gather_packed", packed_gather, "layout"_a, "shape"_a, "slots"_a, "block_ids"_a, "starts"_a, py::kw_only(),
        "threads"_a, "Like gather(), into slots of packed parts. None in place of a checksum: the part does not fit.");
  m.def("scatter_packed", packed_scatter, "layout"_a, "shape"_a, "slots"_a, "block_ids"_a, "starts"_a, "skips"_a,
        "expected"_a, py::kw_only(), "threads"_a,
        "Like scatter(), from slots of packed parts: only those that have the expected checksum are unpacked. None in "
        "place of a checksum: the slot has the expected one, and holds no packed part of the shape.");
}

}  // namespace

void bind_pack(py::module_& m) {
  m.attr("BOOK_EXPONENTS") = kBookExponents;
  m.attr("TILE_BYTES") = kTileBytes;
  py::class_<PackedShape>(m, "PackedShape", "The sizes of a packed part (docs/understand/packing.md).")
      .def(py::init(&make_shape), "planes"_a, "marks"_a = py::none(), "units"_a = py::none(),
           "planes: the bytes of each in the part. marks: how many marks of a tile fit it. units: of the spill. "
           "None: what suits most KV. Raises CopyError.")
      .def_property_readonly("marks", &PackedShape::marks)
      .def_property_readonly("units", &PackedShape::units)
      .def_property_readonly("raw_bytes", &PackedShape::raw_bytes)
      .def_property_readonly("packed_bytes", &PackedShape::packed_bytes);
  m.def("pack_part", pack, "shape"_a, "part"_a, "slot"_a, "books"_a = py::none(),
        "Packs a part in canonical order. books: BOOK_EXPONENTS bytes for each plane; None: learnt. Returns how many "
        "units of the spill are in use; -1: more than there are, so the part is to be stored as it is. Raises "
        "CopyError for sizes that do not fit the shape.");
  m.def("unpack_part", unpack, "shape"_a, "slot"_a, "part"_a,
        "False: the slot holds no packed part of the shape. Raises CopyError for sizes that do not fit the shape.");
  m.def("learn_books", learn, "shape"_a, "part"_a, "The books that pack_part() learns.");
  bind_packed_copies(m);
  m.def("tile_paths", tile_paths, "Names of the code paths that this processor has, fastest first.");
  m.def("use_tile_path", use_tile_path, "name"_a, "''  chooses the fastest. False: the processor lacks the path.");
}

}  // namespace kvdock
