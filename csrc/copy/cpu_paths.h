// The span loops this processor can run. See checksum.h for what a span loop does.
#pragma once

#include <vector>

#include "copy/checksum.h"

namespace kvdock {

// Fastest first; the scalar path, which runs anywhere, is last.
const std::vector<const CpuPath*>& available_cpu_paths();

}  // namespace kvdock
