#include "bindings.h"

namespace kvdock {

void bind_bytes(pybind11::module_& m) { (void)m; }

}  // namespace kvdock
