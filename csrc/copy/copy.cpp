#include "copy/copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/errors.h"
#include "base/pause.h"
#include "copy/checksum.h"
#include "copy/threads.h"
#include "copy/walk.h"

namespace kvdock {

namespace {

constexpr size_t kGrain = 16;        // runs, strides and addresses are multiples of it
constexpr size_t kUnitStripes = 64;  // the most stripes that a thread takes at a time

void check_plane(size_t index, const Plane& plane, size_t num_blocks) {
  const std::string name = "plane " + std::to_string(index) + ": ";
  const auto aligned = [&](const char* what, size_t value) {
    if (value % kGrain != 0) refuse(Refusal::layout, name + what, value, "a multiple of 16");
  };
  aligned("base address", plane.base);
  aligned("block stride", plane.block_stride);
  aligned("run bytes", plane.run_bytes);
  if (plane.base == 0) refuse(Refusal::layout, name + "base address", 0, "an address");
  if (plane.run_bytes == 0) refuse(Refusal::layout, name + "run bytes", 0, "at least 16");
  if (plane.run_count == 0) refuse(Refusal::layout, name + "run count", 0, "at least 1");
  const std::string one_run = "at least the run's " + std::to_string(plane.run_bytes);
  if (plane.run_count > 1) {
    aligned("run stride", plane.run_stride);
    if (plane.run_stride < plane.run_bytes)
      refuse(Refusal::layout, name + "run stride", plane.run_stride, one_run);
  }
  if (num_blocks > 1 && plane.block_stride < plane.run_bytes)
    refuse(Refusal::layout, name + "block stride", plane.block_stride, one_run);
}

// Stripes [first, last) of one part, and their share of its checksum.
struct Unit {
  size_t part;
  size_t first, last;
  uint64_t sum = 0;
};

// Copies one unit, stripe by stripe. A stripe may span many fragments and a fragment many stripes.
template <Direction kDirection>
void copy_unit(const PagedLayout& layout, const Part& part, const CpuPath& path, const ChecksumKeys& keys, Unit* unit) {
  const size_t part_bytes = part.block_ids.size() * layout.block_bytes();
  size_t position = unit->first * kChecksumStripeBytes;
  const size_t end = std::min(unit->last * kChecksumStripeBytes, part_bytes);
  char* slot = reinterpret_cast<char*>(part.slot);
  Walk walk(layout, part, position);
  Fragment here = walk.next(), coming = walk.next();
  PartSum total(keys);
  while (position < end) {
    StripeSums sums{};
    const size_t stripe = position / kChecksumStripeBytes;
    const size_t stripe_bytes = std::min(kChecksumStripeBytes, end - position);
    for (size_t done = 0; done < stripe_bytes;) {
      const size_t bytes = std::min(here.bytes, stripe_bytes - done);
      const uint32_t *first = keys.first + done / 4, *second = keys.second + done / 4;
      char* flat = slot + position + done;
      if (kDirection == Direction::gather) {
        const char* ahead = here.bytes > bytes ? here.paged + bytes : coming.paged;
        path.copy(here.paged, flat, bytes, first, second, ahead, &sums);
      } else if (here.skipped) {
        path.hash(flat, nullptr, bytes, first, second, flat + bytes, &sums);
      } else {
        path.copy(flat, here.paged, bytes, first, second, flat + bytes, &sums);
      }
      done += bytes;
      here.paged += bytes;
      here.bytes -= bytes;
      if (here.bytes == 0) {
        here = coming;
        coming = walk.next();
      }
    }
    if (stripe_bytes != kChecksumStripeBytes) hash_padding(path, keys, stripe_bytes, &sums);
    total.add(stripe, sums);
    position += stripe_bytes;
    KVDOCK_PAUSE(kDirection == Direction::gather ? "copy.gathering" : "copy.scattering");
  }
  unit->sum = total.value();
}

template <Direction kDirection>
std::vector<uint64_t> copy_parts(const PagedLayout& layout, std::span<const Part> parts, int threads) {
  if (threads < 1) refuse(Refusal::copy, "threads", threads, "at least 1");
  check_parts(layout, parts);
  size_t all_stripes = 0, most_stripes = 0;
  for (const Part& part : parts) {
    const size_t stripes = stripes_of(part.block_ids.size() * layout.block_bytes());
    all_stripes += stripes;
    most_stripes = std::max(most_stripes, stripes);
  }
  const auto keys = checksum_keys(most_stripes);
  const size_t workers = useful_threads(all_stripes * kChecksumStripeBytes, threads);
  const size_t step = std::clamp<size_t>(all_stripes / (4 * workers), 1, kUnitStripes);
  std::vector<Unit> units;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t stripes = stripes_of(parts[i].block_ids.size() * layout.block_bytes());
    for (size_t first = 0; first < stripes; first += step) units.push_back({i, first, std::min(first + step, stripes)});
  }
  const CpuPath& path = cpu_path();
  run_parallel(units.size(), workers,
               [&](size_t i) { copy_unit<kDirection>(layout, parts[units[i].part], path, *keys, &units[i]); });
  std::vector<uint64_t> checksums(parts.size(), 0);
  for (const Unit& unit : units) checksums[unit.part] = add_mod_p(checksums[unit.part], unit.sum);
  return checksums;
}

}  // namespace

PagedLayout::PagedLayout(std::vector<Plane> planes, size_t num_blocks, size_t block_tokens)
    : planes_(std::move(planes)), bytes_before_{0}, num_blocks_(num_blocks), block_tokens_(block_tokens) {
  if (planes_.empty()) refuse(Refusal::layout, "planes", 0, "at least 1");
  if (num_blocks == 0) refuse(Refusal::layout, "num_blocks", 0, "at least 1");
  if (block_tokens == 0) refuse(Refusal::layout, "block_tokens", 0, "at least 1");
  for (size_t i = 0; i < planes_.size(); ++i) {
    Plane& plane = planes_[i];
    check_plane(i, plane, num_blocks);
    if (plane.run_stride == plane.run_bytes) {  // adjacent runs are merged
      plane.run_bytes *= plane.run_count;
      plane.run_count = 1;
    }
    bytes_before_.push_back(bytes_before_.back() + plane.block_bytes());
  }
}

size_t PagedLayout::plane_at(size_t block_byte) const {
  return size_t(std::upper_bound(bytes_before_.begin(), bytes_before_.end(), block_byte) - bytes_before_.begin()) - 1;
}

void check_parts(const PagedLayout& layout, std::span<const Part> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "part " + std::to_string(i) + ": ";
    if (parts[i].slot == 0 || parts[i].slot % kGrain != 0)
      refuse(Refusal::copy, name + "slot address", parts[i].slot, "a multiple of 16");
    if (parts[i].skip_blocks > parts[i].block_ids.size())
      refuse(Refusal::copy, name + "skipped blocks", parts[i].skip_blocks,
             "at most the part's " + std::to_string(parts[i].block_ids.size()));
    for (const int64_t id : parts[i].block_ids) {
      if (id < 0 || size_t(id) >= layout.num_blocks())
        refuse(Refusal::copy, name + "block id", id, "0.." + std::to_string(layout.num_blocks() - 1));
    }
  }
}

std::vector<uint64_t> gather(const PagedLayout& layout, std::span<const Part> parts, int threads) {
  return copy_parts<Direction::gather>(layout, parts, threads);
}

std::vector<uint64_t> scatter(const PagedLayout& layout, std::span<const Part> parts, int threads) {
  return copy_parts<Direction::scatter>(layout, parts, threads);
}

void memcpy_pieces(std::span<const uint64_t> to, std::span<const uint64_t> from, size_t bytes, int threads) {
  const size_t group = std::max<size_t>(1, kUnitStripes * kChecksumStripeBytes / std::max<size_t>(bytes, 1));
  const size_t groups = (to.size() + group - 1) / group;
  run_parallel(groups, size_t(std::max(threads, 1)), [&](size_t g) {
    for (size_t i = g * group; i < std::min(to.size(), (g + 1) * group); ++i)
      std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), bytes);
  });
}

}  // namespace kvdock
