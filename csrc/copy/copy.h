// Copies between paged KV and slots, on the CPU.
//
// A slot holds a part in canonical order: plane after plane (layer, then K before V), inside a plane the part's blocks
// in order, inside a block its runs. Layouts with the same order of elements in a block have equal slot bytes.
//
// Ownership: none. Until the call returns, addresses must stay valid and nothing else may write the blocks and slots.
// Thread safety: calls are independent. One call splits its parts at stripes over `threads` threads.
// Invariants: nothing is read or written before every argument was checked. A block is stored from the registers that
//   were hashed. A skipped block is read from the slot and hashed, never written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/direction.h"

namespace kvdock {

// K or V (or one latent for both) of one layer: block i begins at base + i * block_stride and consists of
// run_count runs of run_bytes, run_stride apart. `base`, the strides and run_bytes are multiples of 16.
struct Plane {
  uintptr_t base;
  size_t block_stride;
  size_t run_bytes;
  size_t run_count;
  size_t run_stride;

  size_t block_bytes() const { return run_bytes * run_count; }
};

class PagedLayout {
 public:
  // Throws Refused{layout} unless the planes satisfy the rules above.
  PagedLayout(std::vector<Plane> planes, size_t num_blocks, size_t block_tokens);

  const std::vector<Plane>& planes() const { return planes_; }
  size_t num_blocks() const { return num_blocks_; }
  size_t block_tokens() const { return block_tokens_; }
  size_t block_bytes() const { return bytes_before_.back(); }
  // Bytes of one block in the planes before `plane`.
  size_t bytes_before(size_t plane) const { return bytes_before_[plane]; }
  size_t plane_at(size_t block_byte) const;

 private:
  std::vector<Plane> planes_;
  std::vector<size_t> bytes_before_;  // planes + 1 entries
  size_t num_blocks_, block_tokens_;
};

struct Part {
  uintptr_t slot;                  // 16-byte aligned
  std::span<const int64_t> block_ids;
  size_t skip_blocks = 0;          // scatter only
};

// Throws Refused{copy} unless every slot is aligned, every block exists and no part skips more blocks than it has.
void check_parts(const PagedLayout& layout, std::span<const Part> parts);

// Both return each part's checksum, and throw Refused{copy} for a wrong argument. After a scatter that names a block
// twice, the block may have a mix of the two contents.
std::vector<uint64_t> gather(const PagedLayout& layout, std::span<const Part> parts, int threads);
std::vector<uint64_t> scatter(const PagedLayout& layout, std::span<const Part> parts, int threads);

// The baseline of bench/copy.py: libc memcpy of pieces of equal size, piece i from from[i] to to[i].
void memcpy_pieces(std::span<const uint64_t> to, std::span<const uint64_t> from, size_t bytes, int threads);

}  // namespace kvdock
