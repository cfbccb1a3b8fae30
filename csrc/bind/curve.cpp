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

Curve& whole(Curve& curve) {
  curve.finish();
  return curve;
}

void bind_sums(py::module_& m) {
  py::class_<CurveSums>(m, "CurveSums",
          "Sums over lookups. `+=` adds those of another namespace.")
      .def(py::init<>())
      .def("__iadd__", [](CurveSums& s, const CurveSums& other) {
        s.add(other);
        return s;
      }, "other"_a)
      .def_readonly("lookups", &CurveSums::lookups)
      .def_readonly("samples", &CurveSums::samples, "Sampled chunks.")
      .def_readonly("asked", &CurveSums::asked, "Tokens.")
      .def_readonly("missed", &CurveSums::missed, "Tokens, by the real pool.")
      .def_property_readonly("found_at", [](const CurveSums& s) {
        std::vector<double> out;
        for (size_t i = 0; s.asked && i < kPoolFactors.size(); ++i) out.push_back(s.found_at(i));
        return out;
      }, "Shares of `asked`, by POOL_FACTORS; empty if nothing was asked for.")
      .def_property_readonly("found_ever", [](const CurveSums& s) {
        return s.asked ? std::optional(s.found_ever()) : std::nullopt;
      }, "Without bound.");
}

}  // namespace

void bind_curve(py::module_& m) {
  m.attr("POOL_FACTORS") = py::cast(kPoolFactors);
  bind_sums(m);
  py::class_<Curve>(m, "Curve",
          "Simulated pools of other sizes (csrc/curve/curve.h). Keeps the GIL; not thread-safe. Raises TableError.")
      .def(py::init([](const std::string& policy, uint64_t pool_bytes, uint64_t salt, double most_share,
                       size_t most_entries, double most_work, const py::bytes& kept) {
        CurveOptions options{salt, most_share, most_entries, most_work};
        std::string_view bytes = kept;
        return bytes.empty() ? Curve(policy, pool_bytes, options) : Curve(policy, pool_bytes, options, bytes);
      }), "policy"_a, "pool_bytes"_a, py::kw_only(), "salt"_a, "most_share"_a, "most_entries"_a, "most_work"_a,
           "kept"_a = py::bytes(),
           "`kept`: what keep() of one with the same policy, pool_bytes and salt has returned; else empty.")
      .def("keep", [](Curve& c) { return py::bytes(whole(c).keep()); })
      .def("set_space", [](Curve& c, uint32_t space, uint32_t chunk_tokens, uint64_t chunk_bytes) {
        whole(c).set_space(space, chunk_tokens, chunk_bytes);
      }, "space"_a, "chunk_tokens"_a, "chunk_bytes"_a)
      .def("looked_up", [](Curve& c, uint32_t space, const py::bytes& keys, size_t found) {
        Keys k = keys_of(keys);
        c.looked_up(space, k.at, k.count, found);
      }, "space"_a, "keys"_a, "found"_a, "`found`: chunks.")
      .def("stored", [](Curve& c, uint32_t space, const py::bytes& keys) {
        Keys k = keys_of(keys);
        c.stored(space, k.at, k.count);
      }, "space"_a, "keys"_a)
      .def("go_on", &Curve::go_on,
           "Shows the latest lookup or store to one more simulated pool. Returns whether there are more; every other "
           "call shows it to all of these first.")
      .def("age", [](Curve& c, double kept) { whole(c).age(kept); }, "kept"_a,
           "Multiplies the present counts by that share.")
      .def_property_readonly("share", [](Curve& c) { return whole(c).share(); },
                             "The share of all chunks that is sampled now.")
      .def_property_readonly("entries", [](Curve& c) { return whole(c).entries(); }, "Chunks in all simulated pools.")
      .def_property_readonly("remembered", [](Curve& c) { return whole(c).remembered(); },
                             "Chunks that are remembered as asked for.")
      .def_property_readonly("distances", [](Curve& c) { return histogram_of(whole(c).distances()); },
                             "Reuse distances of samples in bytes: upper bounds, counts, sum.")
      .def_property_readonly("capacities", [](Curve& c) { return whole(c).capacities(); },
                             "Sampled chunks of its present mean size that each pool holds; None: it is empty.")
      .def_property_readonly("all", [](Curve& c) { return whole(c).all(); })
      .def("of_space", [](Curve& c, uint32_t space) { return whole(c).of_space(space); }, "space"_a)
      .def("check", [](Curve& c) { whole(c).check(); });
}

}  // namespace kvdock
