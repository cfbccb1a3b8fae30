// Bindings of csrc/base/part_map.h. Calls keep the GIL: each looks at one part, or at those of one segment.
#include "base/part_map.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

// Place, length, checksum, used, uses.
using PartTuple = py::typing::Tuple<py::int_, py::int_, py::int_, py::int_, py::int_>;
using NamedPlaces = py::typing::List<py::typing::Tuple<py::bytes, py::int_>>;
using NamedParts = py::typing::List<py::typing::Tuple<py::bytes, PartTuple>>;

const char* name_in(const py::bytes& name) {
  const std::string_view bytes = name;
  if (bytes.size() != PartMap::kName)
    throw TableError("bad_argument", "a part's name", int64_t(bytes.size()), int64_t{PartMap::kName});
  return bytes.data();
}

PartTuple tuple_of(const PartMap::Part& part) {
  return py::make_tuple(part.place, part.length, part.checksum, part.used, part.uses);
}

}  // namespace

void bind_part_map(py::module_& m) {
  py::class_<PartMap>(m, "PartMap",
          "Where the tier on disk has each part, in about 100 bytes a part, and which to evict "
          "(csrc/base/part_map.h). A place is the sequence of a segment, and below it 20 bits for the page there. "
          "`used`: the moment of the last use, or of the store if there was none. `uses`: how many there were, at "
          "most 3. Not thread-safe. Raises TableError for a name of another length.")
      .def(py::init<>())
      .def("put", [](PartMap& map, const py::bytes& name, uint64_t place, uint32_t length, uint64_t checksum) {
        map.put(name_in(name), place, length, checksum);
      }, "name"_a, "place"_a, "length"_a, "checksum"_a,
           "A part that is stored now, in place of one that has this name.")
      .def("put_back", [](PartMap& map, const py::bytes& name, uint64_t place, uint32_t length, uint64_t checksum,
                          uint64_t used, uint8_t uses) {
        map.put(name_in(name), {place, checksum, used, length, uses});
      }, "name"_a, "place"_a, "length"_a, "checksum"_a, "used"_a, "uses"_a,
           "A part of a former map. `used`: below FIRST_MOMENT, and the higher, the later it was.")
      .def("get", [](const PartMap& map, const py::bytes& name) -> std::optional<PartTuple> {
        const std::optional<PartMap::Part> part = map.get(name_in(name));
        return part ? std::optional(tuple_of(*part)) : std::nullopt;
      }, "name"_a, "(place, length, checksum, used, uses).")
      .def("drop", [](PartMap& map, const py::bytes& name) { return map.drop(name_in(name)); }, "name"_a,
           "False: there was none.")
      .def("evict", [](PartMap& map, const py::bytes& name) { return map.evict(name_in(name)); }, "name"_a,
           "As drop(), for want of space: the map remembers the part's uses.")
      .def("use", [](PartMap& map, const py::bytes& name) { return map.use(name_in(name)); }, "name"_a,
           "It was asked for. False: there is none.")
      .def("__contains__", [](const PartMap& map, const py::bytes& name) { return map.has(name_in(name)); }, "name"_a)
      .def("of_segment", [](const PartMap& map, uint64_t sequence) {
        NamedParts found;
        map.for_each(sequence, [&](const auto& name, const PartMap::Part& part) {
          found.append(py::make_tuple(py::bytes(name.data(), name.size()), tuple_of(part)));
        });
        return found;
      }, "sequence"_a, "The name of each part of the segment, and what get() returns for it.")
      .def("turn", [](PartMap& map, uint64_t sequence, uint64_t size, double kept, uint64_t left, uint64_t least) {
        const PartMap::Turn turn = map.turn(sequence, size, kept, left, least);
        NamedPlaces gone;
        for (const auto& [name, part] : turn.gone)
          gone.append(py::make_tuple(py::bytes(name.data(), name.size()), part.place));
        return py::typing::Tuple<NamedPlaces, std::vector<std::pair<uint64_t, uint64_t>>, py::float_>(
            py::make_tuple(gone, turn.gaps, turn.age));
      }, "sequence"_a, "size"_a, "kept"_a, "left"_a, "least"_a,
           "What goes when room is made in a segment of `size` bytes: name and place of each part, those first that "
           "should go first. All go that are so old that the share `kept` of all segments' is younger, and as many "
           "more that the rest weighs at most `left` bytes. A part weighs what it takes in a segment, but at least "
           "`least` bytes. Then (begin, end) of each gap that is there when they are gone, and the age of the "
           "youngest part that goes: above 1 it should go anyway.")
      .def("size_of", &PartMap::size_of, "sequence"_a, "How many parts the segment has.")
      .def("reserve", &PartMap::reserve, "parts"_a,
           "Makes room for so many parts. Until there are more, no put() takes long.")
      .def("__len__", &PartMap::size)
      .def_property_readonly("bytes", &PartMap::bytes, "The memory that it takes.");
  m.attr("FIRST_MOMENT") = PartMap::kFirstMoment;
}

}  // namespace kvdock
