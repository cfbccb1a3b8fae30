// What the operating system refused.
#pragma once

#include <cerrno>
#include <system_error>

namespace kvdock {

// `what`: the call, or the file, of which errno tells.
[[noreturn]] inline void fail_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace kvdock
