// Bindings of csrc/curve. Calls keep the GIL, since each takes microseconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string_view>

#include "base/errors.h"
#include "base/limits.h"
#include "bind/bind.h"
#include "curve/curve.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

struct Keys {
  const uint8_t* at;
  size_t count;
};

Keys keys_of(const py::bytes& keys) {
  std::string_view raw = keys;
  if (raw.size() % kKeyBytes)
    throw TableError("bad_argument", "keys are 32 bytes each", int64_t(raw.size()), "a multiple of 32");
  return {reinterpret_cast<const uint8_t*>(raw.data()), raw.size() / kKeyBytes};
}

}  // namespace

void bind_curve(py::module_& m) {
  m.attr("POOL_FACTORS") = py::cast(kPoolFactors);
  py::class_<CurveSums>(m, "CurveSums")
      .def(py::init<>())
      .def("__iadd__", [](CurveSums& s, const CurveSums& other) {
        s.add(other);
        return s;
      }, "other"_a)
      .def_readonly("lookups", &CurveSums::lookups)
      .def_readonly("samples", &CurveSums::samples)
      .def_readonly("asked", &CurveSums::asked)
      .def_readonly("missed", &CurveSums::missed)
      .def_property_readonly("found_at", [](const CurveSums& s) {
        std::vector<double> out;
        for (size_t i = 0; s.asked && i < kPoolFactors.size(); ++i) out.push_back(s.found_at(i));
        return out;
      })
      .def_property_readonly("found_ever", [](const CurveSums& s) {
        return s.asked ? std::optional(s.found_ever()) : std::nullopt;
      });
  py::class_<Curve>(m, "Curve")
      .def(py::init([](const std::string& policy, uint64_t pool_bytes, uint64_t salt, double most_share,
                       size_t most_entries, double most_work) {
        return Curve(policy, pool_bytes, {salt, most_share, most_entries, most_work});
      }), "policy"_a, "pool_bytes"_a, py::kw_only(), "salt"_a, "most_share"_a, "most_entries"_a, "most_work"_a)
      .def("set_space", &Curve::set_space, "space"_a, "chunk_tokens"_a, "chunk_bytes"_a)
      .def("looked_up", [](Curve& c, uint32_t space, const py::bytes& keys, size_t found) {
        Keys k = keys_of(keys);
        c.looked_up(space, k.at, k.count, found);
      }, "space"_a, "keys"_a, "found"_a)
      .def("stored", [](Curve& c, uint32_t space, const py::bytes& keys) {
        Keys k = keys_of(keys);
        c.stored(space, k.at, k.count);
      }, "space"_a, "keys"_a)
      .def("age", &Curve::age, "kept"_a)
      .def_property_readonly("share", &Curve::share)
      .def_property_readonly("entries", &Curve::entries)
      .def_property_readonly("remembered", &Curve::remembered)
      .def_property_readonly("distances", [](const Curve& c) { return histogram_of(c.distances()); })
      .def_property_readonly("capacities", &Curve::capacities)
      .def_property_readonly("all", [](const Curve& c) { return c.all(); })
      .def("of_space", [](const Curve& c, uint32_t space) { return c.of_space(space); }, "space"_a)
      .def("check", &Curve::check);
}

}  // namespace kvdock
