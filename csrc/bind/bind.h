// Each function adds the bindings of one or more folders of csrc/ to the extension module.
#pragma once

#include <pybind11/pybind11.h>

#include "base/histogram.h"

namespace kvdock {

// (upper bounds, counts, sum), as kvdock/_core.pyi has it.
template <size_t N>
pybind11::tuple histogram_of(const Histogram<N>& from) {
  auto list_of = [](const auto& numbers) {
    pybind11::list out;
    for (uint64_t one : numbers) out.append(one);
    return out;
  };
  return pybind11::make_tuple(list_of(from.bounds()), list_of(from.counts()), from.sum());
}

void bind_bytes(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_curve(pybind11::module_& m);
void bind_table(pybind11::module_& m);

}  // namespace kvdock
