// Bindings of csrc/base/record_head.h, for all records of a run at once. Calls keep the GIL: a head takes some hundred
// nanoseconds.
#include "base/record_head.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/contiguous.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;
using RecordHeads = py::typing::List<py::typing::Tuple<py::bytes, py::int_, py::int_>>;  // key, length, checksum

void require_bytes(const char* what, size_t found, size_t wanted, bool or_more = false) {
  if (found != wanted && !(or_more && found > wanted))
    throw TableError("bad_argument", what, int64_t(found), int64_t(wanted));
}

// Calls `each` with the number of every record, and with its head.
template <class Each>
void for_each_head(const RecordHeads& records, const py::bytes& mark, uint64_t offset, Each each) {
  const std::string_view of_segment = mark;
  require_bytes("a segment's mark", of_segment.size(), RecordHead::kMark);
  size_t number = 0;
  for (const py::handle record : records) {
    const auto fields = py::cast<py::tuple>(record);
    require_bytes("the fields of a record", fields.size(), 3);
    const py::bytes key = py::cast<py::bytes>(fields[0]);
    const std::string_view name = key;
    require_bytes("a part's key", name.size(), RecordHead::kKey);
    const uint64_t length = py::cast<uint64_t>(fields[1]);
    each(number++, RecordHead::of(name.data(), length, py::cast<uint64_t>(fields[2]), of_segment.data(), offset));
    offset += RecordHead::taken(length);
  }
}

}  // namespace

void bind_record_heads(py::module_& m) {
  m.def("write_record_heads", [](const py::buffer& pages, const RecordHeads& records, const py::bytes& mark,
                                 uint64_t offset) {
    const Contiguous to(pages, PyBUF_WRITABLE);
    require_bytes("a page for each record", to.bytes(), records.size() * RecordHead::kPage, true);
    for_each_head(records, mark, offset, [&](size_t number, const auto& head) {
      std::memcpy(to.data() + number * RecordHead::kPage, head.data(), head.size());
    });
  }, "pages"_a, "records"_a, "mark"_a, "offset"_a,
  "Writes the head of each record into its page. The records, each of (key, length, checksum), follow one another in "
  "the segment from `offset` on. Raises TableError.");
  m.def("match_record_heads", [](const py::buffer& pages, const RecordHeads& records, const py::bytes& mark,
                                 uint64_t offset) {
    const Contiguous from(pages);
    require_bytes("a page for each record", from.bytes(), records.size() * RecordHead::kPage, true);
    std::vector<bool> found;
    for_each_head(records, mark, offset, [&](size_t number, const auto& head) {
      found.push_back(std::memcmp(from.data() + number * RecordHead::kPage, head.data(), head.size()) == 0);
    });
    return found;
  }, "pages"_a, "records"_a, "mark"_a, "offset"_a,
  "For each record whether its page begins with what write_record_heads() would write. Raises TableError.");
}

}  // namespace kvdock
