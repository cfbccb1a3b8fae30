#include "bindings.h"

namespace kvdock {

void bind_table(pybind11::module_& m) { (void)m; }

}  // namespace kvdock
