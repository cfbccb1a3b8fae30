// Copies between paged KV and slots that hold packed parts (docs/understand/packing.md), on the CPU.
//
//   gather: a plane's book from a sample of its tiles, then tile by tile: blocks -> buffer -> slot; last the checksum
//   scatter: the checksum of all parts first, then tile by tile: slot -> buffer -> blocks
//
// Ownership and thread safety: as in copy.h. A part is packed by several threads at a time, a plane by one.
// Invariants: nothing is read or written before every argument was checked. No byte of a part is unpacked unless its
//   slot has the expected checksum. A skipped block is never written. Nothing outside of the slot is read, whatever its
//   bytes are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "copy/copy.h"
#include "pack/part.h"

namespace kvdock {

// The bytes of each plane in parts of so many blocks, for their PackedShape.
std::vector<size_t> plane_bytes(const PagedLayout& layout, size_t blocks);

// Both throw Refused{copy} for a wrong argument: also for a part that is not of the shape.
// Each part's checksum over its slot; nullopt: more units are needed than the shape has, and the slot's bytes are of no
// use.
std::vector<std::optional<uint64_t>> gather_packed(const PagedLayout& layout, const PackedShape& shape,
                                                   std::span<const Part> parts, int threads);
// Each part's checksum as it was found; only those that have the expected one were unpacked. nullopt: a part that has
// it is no packed part of the shape, and its blocks may hold anything.
std::vector<std::optional<uint64_t>> scatter_packed(const PagedLayout& layout, const PackedShape& shape,
                                                    std::span<const Part> parts, std::span<const uint64_t> expected,
                                                    int threads);

}  // namespace kvdock
