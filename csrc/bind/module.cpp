// The extension module `kvdock._core`. Each bind_*.cpp binds what its room owns: it checks shapes,
// drops the GIL, and decides nothing.
#include <pybind11/pybind11.h>

#include "bind/bind.h"
#include "base/pause.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "kvdock's native core: shared memory, chunk table, checksums and copies.";
  kvdock::bind_bytes(m);
  kvdock::bind_cuda(m);
  kvdock::bind_table(m);
#ifdef KVDOCK_PAUSE_POINTS
  kvdock::bind_pause(m);
#endif
}
