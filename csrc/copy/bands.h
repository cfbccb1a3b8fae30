// Bands of a load: neighbouring planes of all its parts, which are copied together, one band after the other.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "copy/copy.h"

namespace kvdock {

// Throws Refused{copy} unless `ends` ascends and its last entry is the number of planes. Empty: one band.
void check_ends(const PagedLayout& layout, std::span<const size_t> ends);

// Bands [first, last] of a call, which are copied together. Their planes end before `end`.
struct JoinedBands {
  size_t first, last, end;
};

// Joins bands with the next ones until they have `least_bytes`, because each batch costs a dozen calls of the driver.
// The first band stays alone: a forward pass may start once it has been copied. `blocks`: of all parts together;
// `ends`: for each band, the plane before which it ends. REQUIRES: check_ends() passed.
std::vector<JoinedBands> join_bands(const PagedLayout& layout, size_t blocks, std::span<const size_t> ends,
                                    size_t least_bytes);

}  // namespace kvdock
