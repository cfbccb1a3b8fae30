// Bindings of csrc/pack. The sizes of buffers are checked here; the GIL is released around packing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <string>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/contiguous.h"
#include "pack/part.h"

namespace kvdock {

namespace {

using namespace py::literals;

PackedShape make_shape(const std::vector<std::pair<size_t, size_t>>& planes, size_t spills) {
  std::vector<PlaneShape> shapes;
  for (const auto& [raw_bytes, marks] : planes) shapes.push_back({raw_bytes, marks});
  return PackedShape(std::move(shapes), spills);
}

void require_bytes(const char* what, const Contiguous& buffer, size_t wanted) {
  if (buffer.bytes() != wanted) refuse(Refusal::copy, std::string(what) + ": bytes", buffer.bytes(), wanted);
}

long pack(const PackedShape& shape, const py::bytes& books, const py::buffer& part, const py::buffer& slot) {
  const std::string_view exponents(books);
  const Contiguous from(part), to(slot, PyBUF_WRITABLE);
  require_bytes("part", from, shape.raw_bytes());
  require_bytes("slot", to, shape.packed_bytes());
  if (exponents.size() != kBookExponents * shape.planes().size())
    refuse(Refusal::copy, "books: bytes", exponents.size(), kBookExponents * shape.planes().size());
  std::vector<Book> made;
  for (size_t i = 0; i < exponents.size(); i += kBookExponents) {
    const auto* at = reinterpret_cast<const uint8_t*>(exponents.data()) + i;
    made.push_back(make_book(std::span<const uint8_t, kBookExponents>(at, kBookExponents)));
  }
  const py::gil_scoped_release released;
  return pack_part(shape, made, from.data(), to.data());
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
    uint64_t counts[256] = {};
    for (size_t tile = 0; tile < plane.tiles(); ++tile)
      count_exponents(from.data() + plane.raw_at + tile * kTileBytes, counts);
    const Book book = learn_book(counts);
    books.append(reinterpret_cast<const char*>(book.exponents), kBookExponents);
  }
  return books;
}

}  // namespace

void bind_pack(py::module_& m) {
  m.attr("BOOK_EXPONENTS") = kBookExponents;
  m.attr("TILE_BYTES") = kTileBytes;
  py::class_<PackedShape>(m, "PackedShape", "The sizes of a packed part (docs/understand/packing.md).")
      .def(py::init(&make_shape), "planes"_a, "spills"_a,
           "planes: (bytes in the part, marks of a tile) each. Raises CopyError.")
      .def_property_readonly("raw_bytes", &PackedShape::raw_bytes)
      .def_property_readonly("packed_bytes", &PackedShape::packed_bytes);
  m.def("pack_part", pack, "shape"_a, "books"_a, "part"_a, "slot"_a,
        "Packs a part in canonical order. books: BOOK_EXPONENTS bytes for each plane. Returns how many tiles spilled; "
        "-1: too many, so the part is to be stored as it is. Raises CopyError for sizes that do not fit the shape.");
  m.def("unpack_part", unpack, "shape"_a, "slot"_a, "part"_a,
        "False: the slot holds no packed part of the shape. Raises CopyError for sizes that do not fit the shape.");
  m.def("learn_books", learn, "shape"_a, "part"_a, "Books for a part like this one, as pack_part() takes them.");
  m.def("tile_paths", tile_paths, "Names of the code paths that this processor has, fastest first.");
  m.def("use_tile_path", use_tile_path, "name"_a, "''  chooses the fastest. False: the processor lacks the path.");
}

}  // namespace kvdock
