#include "copy/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "base/errors.h"
#include "base/pause.h"
#include "copy/checksum.h"
#include "copy/threads.h"
#include "copy/walk.h"

namespace kvdock {

namespace {

constexpr size_t kUnitStripes = 64;  // the most stripes that a thread hashes at a time

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
  uint64_t counts[256] = {};
  for (size_t tile = 0; tile < plane.tiles(); tile += kSampledTiles)
    count_exponents(collected(layout, part, plane.raw_at + tile * kTileBytes, kTileBytes, buffer), counts);
  return learn_book(counts);
}

// Hashes the slots of packed parts. Parts for which wanted(i) is false get 0.
template <class Wanted>
std::vector<uint64_t> hash_slots(const PackedShape& shape, std::span<const Part> parts, size_t workers,
                                 const Wanted& wanted) {
  struct Unit {
    size_t part, first, last;
    uint64_t sum;
  };
  const size_t stripes = stripes_of(shape.packed_bytes());
  const size_t step = std::clamp<size_t>(stripes * parts.size() / (4 * workers), 1, kUnitStripes);
  std::vector<Unit> units;
  for (size_t i = 0; i < parts.size(); ++i)
    for (size_t first = 0; wanted(i) && first < stripes; first += step) units.push_back({i, first, first + step, 0});
  run_parallel(units.size(), workers, [&](size_t i) {
    Unit& unit = units[i];
    const char* slot = reinterpret_cast<const char*>(parts[unit.part].slot);
    unit.sum = checksum(slot, shape.packed_bytes(), unit.first, unit.last);
  });
  std::vector<uint64_t> sums(parts.size(), 0);
  for (const Unit& unit : units) sums[unit.part] = add_mod_p(sums[unit.part], unit.sum);
  return sums;
}

// Returns false if a piece names a spill entry that does not exist.
bool scatter_plane(const PagedLayout& layout, const PackedShape& shape, const Part& part, size_t plane) {
  Buffer buffer;
  const PlaneShape& of = shape.planes()[plane];
  const auto* slot = reinterpret_cast<const char*>(part.slot);
  for (size_t piece = 0; piece < of.pieces(); ++piece) {
    const size_t position = of.raw_at + piece * kTileBytes, bytes = of.piece_bytes(piece);
    char* whole = nullptr;  // where the piece lies in one run
    bool is_wanted = false;
    each_fragment(layout, part, position, bytes, [&](const Fragment& here, size_t) {
      is_wanted = is_wanted || !here.skipped;
      if (here.bytes == bytes) whole = here.paged;
    });
    if (!is_wanted) continue;
    if (!unpack_piece(shape, plane, piece, slot, whole != nullptr ? whole : buffer.bytes)) return false;
    if (whole == nullptr)
      each_fragment(layout, part, position, bytes, [&](const Fragment& here, size_t done) {
        if (!here.skipped) std::memcpy(here.paged, buffer.bytes + done, here.bytes);
      });
    KVDOCK_PAUSE("copy.scattering");
  }
  return true;
}

}  // namespace

PackedShape packed_shape(const PagedLayout& layout, size_t blocks, size_t marks, size_t spills) {
  std::vector<PlaneShape> planes;
  for (const Plane& plane : layout.planes()) planes.push_back({plane.block_bytes() * blocks, marks});
  return PackedShape(std::move(planes), spills);
}

std::vector<std::optional<uint64_t>> gather_packed(const PagedLayout& layout, const PackedShape& shape,
                                                   std::span<const Part> parts, int threads) {
  check(layout, shape, parts, threads);
  checksum_keys(stripes_of(shape.packed_bytes()));
  const size_t planes = shape.planes().size(), workers = useful_threads(shape.raw_bytes() * parts.size(), threads);
  std::vector<Book> books(parts.size() * planes);
  std::vector<std::atomic<uint32_t>> spilled(parts.size());
  const auto fits = [&](size_t part) { return spilled[part].load(std::memory_order_relaxed) <= shape.spills(); };
  run_parallel(books.size(), workers, [&](size_t i) {
    Buffer buffer;
    const Part& part = parts[i / planes];
    const PlaneShape& plane = shape.planes()[i % planes];
    auto* slot = reinterpret_cast<char*>(part.slot);
    books[i] = learnt(layout, part, plane, &buffer);
    for (size_t piece = 0; piece < plane.pieces() && fits(i / planes); ++piece) {
      const size_t position = plane.raw_at + piece * kTileBytes;
      const char* from = collected(layout, part, position, plane.piece_bytes(piece), &buffer);
      pack_piece(shape, i % planes, books[i], piece, from, &spilled[i / planes], slot);
      KVDOCK_PAUSE("copy.gathering");
    }
  });
  for (size_t i = 0; i < parts.size(); ++i)
    if (fits(i))
      finish_packed(shape, std::span(books).subspan(i * planes, planes), spilled[i],
                    reinterpret_cast<char*>(parts[i].slot));
  const std::vector<uint64_t> sums = hash_slots(shape, parts, workers, fits);
  std::vector<std::optional<uint64_t>> found(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    if (fits(i)) found[i] = sums[i];
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
    sound[i] = sums[i] != expected[i] || is_packed(shape, reinterpret_cast<const char*>(parts[i].slot));
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
