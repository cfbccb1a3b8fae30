// Bindings of csrc/base/part_map.h. Calls keep the GIL: each looks at one part, or at those of one segment.
#include "base/part_map.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string_view>

#include "base/errors.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

// Place, length, checksum, used, is_copy.
using PartTuple = py::typing::Tuple<py::int_, py::int_, py::int_, py::int_, py::bool_>;

const char* name_in(const py::bytes& name) {
  const std::string_view bytes = name;
  if (bytes.size() != PartMap::kName)
    throw TableError("bad_argument", "a part's name", int64_t(bytes.size()), int64_t{PartMap::kName});
  return bytes.data();
}

PartTuple tuple_of(const PartMap::Part& part) {
  return py::make_tuple(part.place, part.length, part.checksum, part.used, part.is_copy);
}

}  // namespace

void bind_part_map(py::module_& m) {
  py::class_<PartMap>(m, "PartMap",
          "Where the tier on disk has each part, in about 90 bytes a part (csrc/base/part_map.h). A place is the "
          "sequence of a segment, and below it 20 bits for the page there. `used`: the number of the last use; 0: "
          "none. `is_copy`: it was given a second chance. Not thread-safe. Raises TableError for a name of another "
          "length.")
      .def(py::init<>())
      .def("put", [](PartMap& map, const py::bytes& name, uint64_t place, uint32_t length, uint64_t checksum,
                     uint64_t used, bool is_copy) { map.put(name_in(name), {place, checksum, used, length, is_copy}); },
           "name"_a, "place"_a, "length"_a, "checksum"_a, "used"_a = 0, "is_copy"_a = false,
           "In place of the part that has this name, if there is one.")
      .def("get", [](const PartMap& map, const py::bytes& name) -> std::optional<PartTuple> {
        const std::optional<PartMap::Part> part = map.get(name_in(name));
        return part ? std::optional(tuple_of(*part)) : std::nullopt;
      }, "name"_a, "(place, length, checksum, used, is_copy).")
      .def("drop", [](PartMap& map, const py::bytes& name) { return map.drop(name_in(name)); }, "name"_a,
           "False: there was none.")
      .def("use", [](PartMap& map, const py::bytes& name, uint64_t used) {
        return map.use(name_in(name), used);
      }, "name"_a, "used"_a, "False: there is none.")
      .def("__contains__", [](const PartMap& map, const py::bytes& name) { return map.has(name_in(name)); }, "name"_a)
      .def("of_segment", [](const PartMap& map, uint64_t sequence) {
        py::typing::List<py::typing::Tuple<py::bytes, PartTuple>> found;
        map.for_each(sequence, [&](const auto& name, const PartMap::Part& part) {
          found.append(py::make_tuple(py::bytes(name.data(), name.size()), tuple_of(part)));
        });
        return found;
      }, "sequence"_a, "The name of each part of the segment, and what get() returns for it.")
      .def("size_of", &PartMap::size_of, "sequence"_a, "How many parts the segment has.")
      .def("reserve", &PartMap::reserve, "parts"_a,
           "Makes room for so many parts. Until there are more, no put() takes long.")
      .def("__len__", &PartMap::size)
      .def_property_readonly("bytes", &PartMap::bytes, "The memory that it takes.");
}

}  // namespace kvdock
