// The table as Python holds it: shared by csrc/bind/table.cpp and csrc/bind/adopt.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "segment/mapping.h"
#include "table/table.h"

namespace kvdock {

// Keeps the mapping alive under the table.
struct BoundTable {
  pybind11::object region;
  std::unique_ptr<Table> table;
};

void bind_adoption(pybind11::class_<BoundTable>& c);

}  // namespace kvdock
