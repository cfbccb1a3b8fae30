// Each function adds the bindings of one or more folders of csrc/ to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace kvdock {

void bind_bytes(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_curve(pybind11::module_& m);
void bind_table(pybind11::module_& m);

}  // namespace kvdock
