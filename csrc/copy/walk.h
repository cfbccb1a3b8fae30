// Walks over a part's bytes in the engine's blocks, in the order of a slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/copy.h"

namespace kvdock {

struct Fragment {
  char* paged = nullptr;
  size_t bytes = 0;
  bool skipped = false;
};

// Yields the places of a part's bytes in the engine's blocks, run by run, from any position of the part on.
class Walk {
 public:
  Walk(const PagedLayout& layout, const Part& part, size_t position) : layout_(layout), part_(part) {
    const size_t blocks = part.block_ids.size();
    plane_ = layout.plane_at(position / blocks);
    const Plane& plane = layout.planes()[plane_];
    const size_t inside = position - layout.bytes_before(plane_) * blocks;
    block_ = inside / plane.block_bytes();
    run_ = inside % plane.block_bytes() / plane.run_bytes;
    offset_ = inside % plane.run_bytes;
  }

  // The next fragment; bytes == 0 at the end of the part.
  Fragment next() {
    if (plane_ == layout_.planes().size()) return {};
    const Plane& plane = layout_.planes()[plane_];
    const uintptr_t at = plane.base + size_t(part_.block_ids[block_]) * plane.block_stride + run_ * plane.run_stride;
    const bool skipped = block_ < part_.skip_blocks;
    const Fragment fragment{reinterpret_cast<char*>(at + offset_), plane.run_bytes - offset_, skipped};
    offset_ = 0;
    if (++run_ == plane.run_count) {
      run_ = 0;
      if (++block_ == part_.block_ids.size()) {
        block_ = 0;
        ++plane_;
      }
    }
    return fragment;
  }

 private:
  const PagedLayout& layout_;
  const Part& part_;
  size_t plane_, block_, run_, offset_;
};

}  // namespace kvdock
