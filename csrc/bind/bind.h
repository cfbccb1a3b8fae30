// Each function adds the bindings of one or more folders of csrc/ to the extension module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include "base/histogram.h"

namespace kvdock {

namespace py = pybind11;

// Upper bounds, counts (one more than bounds), and the sum of the values.
using HistogramTuple = py::typing::Tuple<py::typing::List<py::int_>, py::typing::List<py::int_>, py::int_>;

template <size_t N>
HistogramTuple histogram_of(const Histogram<N>& from) {
  auto list_of = [](const auto& numbers) {
    py::typing::List<py::int_> out;
    for (uint64_t one : numbers) out.append(one);
    return out;
  };
  return py::make_tuple(list_of(from.bounds()), list_of(from.counts()), from.sum());
}

void bind_bytes(py::module_& m);
void bind_cuda(py::module_& m);
void bind_curve(py::module_& m);
void bind_key_filter(py::module_& m);
void bind_keys(py::module_& m);
void bind_pack(py::module_& m);
void bind_part_map(py::module_& m);
void bind_plan(py::module_& m);
void bind_record_heads(py::module_& m);
void bind_table(py::module_& m);

}  // namespace kvdock
