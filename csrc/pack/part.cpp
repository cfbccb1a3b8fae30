#include "pack/part.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/errors.h"

namespace kvdock {

namespace {

constexpr char kMagic[4] = {'K', 'V', 'P', '1'};
constexpr size_t kBooksAt = 16, kAlignment = 64;

struct Header {
  char magic[4];
  uint16_t planes, spilled;
  uint64_t unused;
};
static_assert(sizeof(Header) == kBooksAt);

uint16_t spill_number(const char* tile, const PlaneShape& plane) {
  uint16_t number;
  std::memcpy(&number, tile + plane.tile_bytes() - sizeof number, sizeof number);
  return number;
}

}  // namespace

PackedShape::PackedShape(std::vector<PlaneShape> planes, size_t spills) : planes_(std::move(planes)), spills_(spills) {
  if (planes_.empty()) refuse(Refusal::copy, "planes", 0, "at least 1");
  if (planes_.size() > UINT16_MAX) refuse(Refusal::copy, "planes", planes_.size(), "at most 65535");
  if (spills > kMostSpills) refuse(Refusal::copy, "spills", spills, "at most 65535");
  header_bytes_ = (kBooksAt + kBookBytes * planes_.size() + kAlignment - 1) / kAlignment * kAlignment;
  size_t at = header_bytes_;
  for (size_t i = 0; i < planes_.size(); ++i) {
    PlaneShape& plane = planes_[i];
    const std::string name = "plane " + std::to_string(i);
    if (plane.raw_bytes % 16 != 0) refuse(Refusal::copy, name + ": bytes", plane.raw_bytes, "a multiple of 16");
    if (!is_reserve(plane.marks))
      refuse(Refusal::copy, name + ": marks", plane.marks, "16 more than a multiple of 32, and at most 496");
    plane.raw_at = raw_bytes_;
    plane.at = at;
    raw_bytes_ += plane.raw_bytes;
    at += plane.packed_bytes();
    spill_bytes_ = std::max(spill_bytes_, kTileBytes - plane.kept_bytes());
  }
  spills_at_ = at;
}

long pack_part(const PackedShape& shape, std::span<const Book> books, const char* part, char* slot) {
  const auto& planes = shape.planes();
  if (books.size() != planes.size()) refuse(Refusal::copy, "books", books.size(), std::to_string(planes.size()));
  const TilePath& path = tile_path();
  std::memset(slot, 0, shape.header_bytes());
  uint16_t spilled = 0;
  for (size_t i = 0; i < planes.size(); ++i) {
    const PlaneShape& plane = planes[i];
    std::memcpy(slot + kBooksAt + kBookBytes * i, books[i].exponents, kBookBytes);
    const char* from = part + plane.raw_at;
    char* to = slot + plane.at;
    for (size_t tile = 0; tile < plane.tiles(); ++tile, from += kTileBytes, to += plane.tile_bytes()) {
      if (path.pack(from, books[i], plane.marks, to)) continue;
      if (spilled == shape.spills()) return -1;
      char* const entry = slot + shape.spill_at(spilled++);
      std::memset(to + plane.kept_bytes(), 0, plane.tile_bytes() - plane.kept_bytes());
      std::memcpy(to, from, plane.kept_bytes());
      std::memcpy(entry, from + plane.kept_bytes(), kTileBytes - plane.kept_bytes());
      std::memcpy(to + plane.tile_bytes() - sizeof spilled, &spilled, sizeof spilled);
    }
    std::memcpy(to, from, plane.rest_bytes());
  }
  // No byte of a slot is left as an earlier part had it.
  std::memset(slot + shape.spill_at(spilled), 0, shape.packed_bytes() - shape.spill_at(spilled));
  const Header header{{kMagic[0], kMagic[1], kMagic[2], kMagic[3]}, uint16_t(planes.size()), spilled, 0};
  std::memcpy(slot, &header, sizeof header);
  return spilled;
}

bool unpack_part(const PackedShape& shape, const char* slot, char* part) {
  const auto& planes = shape.planes();
  Header header;
  std::memcpy(&header, slot, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.planes != planes.size()) return false;
  const TilePath& path = tile_path();
  for (size_t i = 0; i < planes.size(); ++i) {
    const PlaneShape& plane = planes[i];
    const auto* book = reinterpret_cast<const uint8_t*>(slot) + kBooksAt + kBookBytes * i;
    const char* from = slot + plane.at;
    char* to = part + plane.raw_at;
    for (size_t tile = 0; tile < plane.tiles(); ++tile, from += plane.tile_bytes(), to += kTileBytes) {
      const size_t number = spill_number(from, plane);
      if (number == 0) {
        path.unpack(from, book, plane.marks, to);
        continue;
      }
      if (number > shape.spills()) return false;
      std::memcpy(to, from, plane.kept_bytes());
      std::memcpy(to + plane.kept_bytes(), slot + shape.spill_at(number - 1), kTileBytes - plane.kept_bytes());
    }
    std::memcpy(to, from, plane.rest_bytes());
  }
  return true;
}

}  // namespace kvdock
