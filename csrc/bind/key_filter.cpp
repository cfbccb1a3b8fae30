// Bindings of csrc/base/key_filter.h. Calls keep the GIL: a thousand keys take some tens of microseconds.
#include "base/key_filter.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

uint64_t beginning(const char* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Calls `each` with the position of every key, and with the key mixed with its namespace.
template <class Each>
void for_each_key(std::string_view space, std::string_view keys, size_t step, Each each) {
  if (space.size() < sizeof(uint64_t))
    throw TableError("bad_argument", "namespaces of at least 8 bytes", int64_t(space.size()), "at least 8");
  if (step < sizeof(uint64_t) || keys.size() % step)
    throw TableError("bad_argument", "keys of `step` bytes, at least 8", int64_t(keys.size()), "a multiple of `step`");
  const uint64_t of_space = beginning(space.data()) * 0x9e3779b97f4a7c15;
  for (size_t at = 0; at < keys.size(); at += step) each(at, beginning(keys.data() + at) ^ of_space);
}

}  // namespace

void bind_key_filter(py::module_& m) {
  py::class_<KeyFilter>(m, "KeyFilter",
          "A set of keys of namespaces that takes 2 to 5 bytes a key (csrc/base/key_filter.h). At most once in a "
          "thousand times it seems to have a key that it lacks. It reads the first 8 bytes of a namespace and of each "
          "key. Not thread-safe. Raises TableError.")
      .def(py::init<uint64_t, size_t>(), py::kw_only(), "salt"_a, "most_keys"_a,
           "`salt`: random, so that nobody can choose keys that collide. `most_keys`: about how many fit.")
      .def("add", [](KeyFilter& f, const py::bytes& space, const py::bytes& keys, size_t step) {
        bool all = true;
        for_each_key(space, keys, step, [&](size_t, uint64_t key) { all &= f.add(key); });
        return all;
      }, "space"_a, "keys"_a, "step"_a, "`keys`: in a row, `step` bytes each. False: some did not fit.")
      .def("remove", [](KeyFilter& f, const py::bytes& space, const py::bytes& keys, size_t step) {
        for_each_key(space, keys, step, [&](size_t, uint64_t key) { f.remove(key); });
      }, "space"_a, "keys"_a, "step"_a)
      .def("missing", [](const KeyFilter& f, const py::bytes& space, const py::bytes& keys, size_t step) {
        std::string missing;
        const std::string_view all = keys;
        for_each_key(space, all, step, [&](size_t at, uint64_t key) {
          if (!f.has(key)) missing.append(all.substr(at, step));
        });
        return py::bytes(missing);
      }, "space"_a, "keys"_a, "step"_a, "Those of `keys` that it certainly lacks, in a row.")
      .def_property_readonly("size", &KeyFilter::size, "How many keys it has.")
      .def_property_readonly("bytes", &KeyFilter::bytes, "The memory that it takes.");
}

}  // namespace kvdock
