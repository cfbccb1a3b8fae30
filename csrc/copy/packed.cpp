#include "copy/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <string>

#include "base/errors.h"
#include "base/pause.h"
#include "copy/checksum.h"
#include "copy/threads.h"
#include "copy/walk.h"

namespace kvdock {

namespace {

constexpr size_t kHashedStripes = 64;  // the most stripes that a thread hashes at a time

void check(const PagedLayout& layout, const PackedShape& shape, std::span<const Part> parts, int threads) {
  if (threads < 1) refuse(Refusal::copy, "threads", threads, "at least 1");
  check_parts(layout, parts);
  if (shape.planes().size() != layout.planes().size())
    refuse(Refusal::copy, "planes of the packed shape", shape.planes().size(), layout.planes().size());
  for (size_t i = 0; i < parts.size(); ++i)
    for (size_t p = 0; p < layout.planes().size(); ++p)
      if (const size_t bytes = layout.planes()[p].block_bytes() * parts[i].block_ids.size();
          bytes != shape.planes()[p].raw_bytes)
        refuse(Refusal::copy, "part " + std::to_string(i) + ": bytes of plane " + std::to_string(p), bytes,
               shape.planes()[p].raw_bytes);
}

// Calls work(fragment, bytes before it) for each fragment of `bytes` bytes of a part at `position`.
template <class Work>
void each_fragment(const PagedLayout& layout, const Part& part, size_t position, size_t bytes, const Work& work) {
  if (bytes == 0) return;  // there may be no such position
  Walk walk(layout, part, position);
  for (size_t done = 0; done < bytes;) {
    Fragment here = walk.next();
    here.bytes = std::min(here.bytes, bytes - done);
    work(here, done);
    done += here.bytes;
  }
}

struct Buffer {
  alignas(64) char bytes[kTileBytes];
};

// The bytes of a part at `position`: where they are if they lie in one run, else collected in the buffer.
const char* collected(const PagedLayout& layout, const Part& part, size_t position, size_t bytes, Buffer* buffer) {
  const char* at = buffer->bytes;
  each_fragment(layout, part, position, bytes, [&](const Fragment& here, size_t done) {
    if (here.bytes == bytes)
      at = here.paged;
    else
      std::memcpy(buffer->bytes + done, here.paged, here.bytes);
  });
  return at;
}

Book learnt(const PagedLayout& layout, const Part& part, const PlaneShape& plane, Buffer* buffer) {
  ExponentCounts counts;
  for (size_t i = 0; i < sampled_granules(plane.tiles()); ++i) {
    const size_t at = plane.raw_at + sampled_granule(plane.tiles(), i) * kGranuleBytes;
    counts.add(collected(layout, part, at, kGranuleBytes, buffer));
  }
  return counts.book();
}

// Returns false if a unit more is needed than the part has.
bool gather_plane(const PagedLayout& layout, const Part& part, const PlaneShape& of, size_t plane,
                  PackedWriter* writer) {
  Buffer buffer;
  const Book book = learnt(layout, part, of, &buffer);
  writer->put_book(plane, book);
  for (size_t tile = 0; tile < of.tiles(); ++tile) {
    const char* from = collected(layout, part, of.raw_at + tile * kTileBytes, kTileBytes, &buffer);
    if (from != buffer.bytes) foresee(from + kTileBytes, kTileBytes);
    if (!writer->put_tile(plane, tile, book, from)) return false;
    KVDOCK_PAUSE("copy.gathering");
  }
  writer->put_rest(plane, collected(layout, part, of.raw_at + of.tiles() * kTileBytes, of.rest_bytes(), &buffer));
  return true;
}

// Hashes the slots of packed parts. Parts for which wanted(i) is false get 0.
template <class Wanted>
std::vector<uint64_t> hash_slots(const PackedShape& shape, std::span<const Part> parts, size_t workers,
                                 const Wanted& wanted) {
  struct Hashed {
    size_t part, first, last;
    uint64_t sum;
  };
  const size_t stripes = stripes_of(shape.packed_bytes());
  const size_t step = std::clamp<size_t>(stripes * parts.size() / (4 * workers), 1, kHashedStripes);
  std::vector<Hashed> units;
  for (size_t i = 0; i < parts.size(); ++i)
    for (size_t first = 0; wanted(i) && first < stripes; first += step) units.push_back({i, first, first + step, 0});
  run_parallel(units.size(), workers, [&](size_t i) {
    Hashed& unit = units[i];
    const char* slot = reinterpret_cast<const char*>(parts[unit.part].slot);
    unit.sum = checksum(slot, shape.packed_bytes(), unit.first, unit.last);
  });
  std::vector<uint64_t> sums(parts.size(), 0);
  for (const Hashed& unit : units) sums[unit.part] = add_mod_p(sums[unit.part], unit.sum);
  return sums;
}

// Returns false if a tile names units that do not exist.
bool scatter_plane(const PagedLayout& layout, const PackedShape& shape, const Part& part, size_t plane) {
  Buffer buffer;
  const PlaneShape& of = shape.planes()[plane];
  const auto* slot = reinterpret_cast<const char*>(part.slot);
  const auto write = [&](size_t position, const char* from, size_t bytes) {
    each_fragment(layout, part, position, bytes, [&](const Fragment& here, size_t done) {
      if (!here.skipped) std::memcpy(here.paged, from + done, here.bytes);
    });
  };
  for (size_t tile = 0; tile < of.tiles(); ++tile) {
    const size_t position = of.raw_at + tile * kTileBytes;
    char* whole = nullptr;  // where the tile lies in one run
    bool is_wanted = false;
    each_fragment(layout, part, position, kTileBytes, [&](const Fragment& here, size_t) {
      is_wanted = is_wanted || !here.skipped;
      if (here.bytes == kTileBytes) whole = here.paged;
    });
    if (!is_wanted) continue;
    if (!unpack_tile(shape, slot, plane, tile, whole != nullptr ? whole : buffer.bytes)) return false;
    if (whole == nullptr) write(position, buffer.bytes, kTileBytes);
    KVDOCK_PAUSE("copy.scattering");
  }
  write(of.raw_at + of.tiles() * kTileBytes, slot + shape.rest_at(plane), of.rest_bytes());
  return true;
}

}  // namespace

std::vector<size_t> plane_bytes(const PagedLayout& layout, size_t blocks) {
  std::vector<size_t> bytes;
  for (const Plane& plane : layout.planes()) bytes.push_back(plane.block_bytes() * blocks);
  return bytes;
}

std::vector<std::optional<uint64_t>> gather_packed(const PagedLayout& layout, const PackedShape& shape,
                                                   std::span<const Part> parts, int threads) {
  check(layout, shape, parts, threads);
  checksum_keys(stripes_of(shape.packed_bytes()));
  const size_t planes = shape.planes().size(), workers = useful_threads(shape.raw_bytes() * parts.size(), threads);
  std::deque<PackedWriter> writers;
  for (const Part& part : parts) writers.emplace_back(shape, reinterpret_cast<char*>(part.slot));
  std::vector<std::atomic<bool>> unfit(parts.size());
  run_parallel(parts.size() * planes, workers, [&](size_t i) {
    const size_t part = i / planes, plane = i % planes;
    if (unfit[part].load(std::memory_order_relaxed)) return;
    if (!gather_plane(layout, parts[part], shape.planes()[plane], plane, &writers[part])) unfit[part] = true;
  });
  for (size_t i = 0; i < parts.size(); ++i)
    if (!unfit[i]) unfit[i] = writers[i].finish() < 0;
  const std::vector<uint64_t> sums = hash_slots(shape, parts, workers, [&](size_t i) { return !unfit[i].load(); });
  std::vector<std::optional<uint64_t>> found(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    if (!unfit[i]) found[i] = sums[i];
  return found;
}

std::vector<std::optional<uint64_t>> scatter_packed(const PagedLayout& layout, const PackedShape& shape,
                                                    std::span<const Part> parts, std::span<const uint64_t> expected,
                                                    int threads) {
  check(layout, shape, parts, threads);
  if (expected.size() != parts.size()) refuse(Refusal::copy, "expected checksums", expected.size(), parts.size());
  checksum_keys(stripes_of(shape.packed_bytes()));
  const size_t planes = shape.planes().size(), workers = useful_threads(shape.raw_bytes() * parts.size(), threads);
  const std::vector<uint64_t> sums = hash_slots(shape, parts, workers, [](size_t) { return true; });
  std::vector<std::atomic<bool>> sound(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    sound[i] = sums[i] != expected[i] || is_packed_part(shape, reinterpret_cast<const char*>(parts[i].slot));
  run_parallel(parts.size() * planes, workers, [&](size_t i) {
    const size_t part = i / planes;
    if (sums[part] != expected[part] || !sound[part]) return;
    if (!scatter_plane(layout, shape, parts[part], i % planes)) sound[part] = false;
  });
  std::vector<std::optional<uint64_t>> found(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    if (sound[i]) found[i] = sums[i];
  return found;
}

}  // namespace kvdock
