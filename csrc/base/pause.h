// Named places at which the kill tests stop a process: KVDOCK_PAUSE("operation.step"). Only a target with
// -DKVDOCK_PAUSE_POINTS has them; in all others the macro does nothing.
#pragma once

#ifdef KVDOCK_PAUSE_POINTS

namespace kvdock {

// Holds the calling thread while the page at $KVDOCK_PAUSE_PAGE names this point, after it was passed as often as the
// page says.
void pause_at(const char* point);

}  // namespace kvdock

#define KVDOCK_PAUSE(point) ::kvdock::pause_at(point)
#else
#define KVDOCK_PAUSE(point) static_cast<void>(0)
#endif
