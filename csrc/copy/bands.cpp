#include "copy/bands.h"

#include <string>

#include "base/errors.h"

namespace kvdock {

void check_ends(const PagedLayout& layout, std::span<const size_t> ends) {
  const size_t planes = layout.planes().size();
  size_t before = 0;
  for (const size_t end : ends) {
    if (end <= before || end > planes)
      refuse(Refusal::copy, "end of a band (planes)", end, std::to_string(before + 1) + ".." + std::to_string(planes));
    before = end;
  }
  if (!ends.empty() && before != planes) refuse(Refusal::copy, "end of the last band (planes)", before, planes);
}

std::vector<JoinedBands> join_bands(const PagedLayout& layout, size_t blocks, std::span<const size_t> ends,
                                    size_t least_bytes) {
  std::vector<JoinedBands> joined;
  size_t first = 0, begin_bytes = 0;
  for (size_t band = 0; band < ends.size(); ++band) {
    const size_t end_bytes = layout.bytes_before(ends[band]) * blocks;
    if (band > 0 && band + 1 < ends.size() && end_bytes - begin_bytes < least_bytes) continue;
    joined.push_back({first, band, ends[band]});
    first = band + 1;
    begin_bytes = end_bytes;
  }
  return joined;
}

}  // namespace kvdock
