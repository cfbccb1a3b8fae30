#include "pack/part.h"

#include <cstring>
#include <string>

#include "base/errors.h"

namespace kvdock {

namespace {

constexpr char kMagic[4] = {'K', 'V', 'P', '1'};
constexpr size_t kBooksAt = 16, kAlignment = 64;

struct Header {
  char magic[4];
  uint16_t planes, units;
  uint64_t unused;
};
static_assert(sizeof(Header) == kBooksAt);

// `book_of`: the book of a plane.
template <class BookOf>
long pack_planes(const PackedShape& shape, const char* part, char* slot, BookOf book_of) {
  PackedWriter writer(shape, slot);
  for (size_t plane = 0; plane < shape.planes().size(); ++plane) {
    const char* const from = part + shape.planes()[plane].raw_at;
    const size_t tiles = shape.planes()[plane].tiles();
    const Book book = book_of(plane);
    writer.put_book(plane, book);
    for (size_t tile = 0; tile < tiles; ++tile) {
      foresee(from + (tile + 1) * kTileBytes, kTileBytes);
      if (!writer.put_tile(plane, tile, book, from + tile * kTileBytes)) return -1;
    }
    writer.put_rest(plane, from + tiles * kTileBytes);
  }
  return writer.finish();
}

}  // namespace

PackedShape::PackedShape(std::span<const size_t> planes, size_t marks, size_t units) : marks_(marks), units_(units) {
  if (planes.empty()) refuse(Refusal::copy, "planes", 0, "at least 1");
  if (planes.size() > UINT16_MAX) refuse(Refusal::copy, "planes", planes.size(), "at most 65535");
  if (!is_reserve(marks)) refuse(Refusal::copy, "marks", marks, "16 more than a multiple of 32, and at most 496");
  if (units > kMostUnits) refuse(Refusal::copy, "units", units, "at most 65535");
  header_bytes_ = (kBooksAt + kBookBytes * planes.size() + kAlignment - 1) / kAlignment * kAlignment;
  size_t at = header_bytes_;
  for (const size_t bytes : planes) {
    const std::string name = "plane " + std::to_string(planes_.size());
    if (bytes % 16 != 0) refuse(Refusal::copy, name + ": bytes", bytes, "a multiple of 16");
    planes_.push_back({bytes, raw_bytes_, at});
    raw_bytes_ += bytes;
    at = rest_at(planes_.size() - 1) + planes_.back().rest_bytes();
  }
  units_at_ = at;
}

PackedWriter::PackedWriter(const PackedShape& shape, char* slot) : shape_(shape), slot_(slot) {
  std::memset(slot, 0, shape.header_bytes());
}

void PackedWriter::put_book(size_t plane, const Book& book) {
  std::memcpy(slot_ + kBooksAt + kBookBytes * plane, book.exponents, kBookBytes);
}

bool PackedWriter::put_tile(size_t plane, size_t tile, const Book& book, const char* from) {
  char* const to = slot_ + shape_.tile_at(plane, tile);
  alignas(64) char more[size_t(kMostUnits) * kUnitBytes];
  const uint8_t units = tile_path().pack(from, book, shape_.marks(), to, more);
  if (units == 0) return true;
  const size_t taken = units == kRawTile ? shape_.raw_units() : units;
  const size_t first = used_.fetch_add(taken, std::memory_order_relaxed);
  if (first + taken > shape_.units()) return false;
  char* const at = slot_ + shape_.unit_at(first);
  Trailer trailer{{}, units, uint16_t(first)};
  if (units == kRawTile) {
    const size_t kept = shape_.kept_bytes(), others = kTileBytes - kept;
    std::memcpy(to, from, kept);
    std::memset(to + kept, 0, shape_.tile_bytes() - kept);
    std::memcpy(at, from + kept, others);
    std::memset(at + others, 0, taken * kUnitBytes - others);
  } else {
    std::memcpy(at, more, taken * kUnitBytes);
    std::memcpy(trailer.spares, to + shape_.tile_bytes() - sizeof trailer, sizeof trailer.spares);
  }
  std::memcpy(to + shape_.tile_bytes() - sizeof trailer, &trailer, sizeof trailer);
  return true;
}

void PackedWriter::put_rest(size_t plane, const char* from) {
  std::memcpy(slot_ + shape_.rest_at(plane), from, shape_.planes()[plane].rest_bytes());
}

long PackedWriter::finish() {
  const size_t used = used_.load(std::memory_order_relaxed);
  if (used > shape_.units()) return -1;
  // No byte of a slot is left as an earlier part had it.
  std::memset(slot_ + shape_.unit_at(used), 0, shape_.packed_bytes() - shape_.unit_at(used));
  const Header header{
      {kMagic[0], kMagic[1], kMagic[2], kMagic[3]}, uint16_t(shape_.planes().size()), uint16_t(used), 0};
  std::memcpy(slot_, &header, sizeof header);
  return long(used);
}

bool is_packed_part(const PackedShape& shape, const char* slot) {
  Header header;
  std::memcpy(&header, slot, sizeof header);
  return std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && header.planes == shape.planes().size();
}

bool unpack_tile(const PackedShape& shape, const char* slot, size_t plane, size_t tile, char* to) {
  const char* const from = slot + shape.tile_at(plane, tile);
  foresee(from + shape.tile_bytes(), shape.tile_bytes());
  Trailer trailer;
  std::memcpy(&trailer, from + shape.tile_bytes() - sizeof trailer, sizeof trailer);
  const bool is_raw = trailer.units == kRawTile;
  if (!is_raw && trailer.units > kMostUnits) return false;
  const size_t taken = is_raw ? shape.raw_units() : trailer.units;
  if (taken != 0 && trailer.first + taken > shape.units()) return false;
  const char* const more = slot + shape.unit_at(taken != 0 ? trailer.first : 0);
  if (is_raw) {
    std::memcpy(to, from, shape.kept_bytes());
    std::memcpy(to + shape.kept_bytes(), more, kTileBytes - shape.kept_bytes());
  } else {
    const auto* book = reinterpret_cast<const uint8_t*>(slot) + kBooksAt + kBookBytes * plane;
    tile_path().unpack(from, book, shape.marks(), more, taken, to);
  }
  return true;
}

long pack_part(const PackedShape& shape, const char* part, char* slot) {
  return pack_planes(shape, part, slot, [&](size_t plane) {
    const PlaneShape& at = shape.planes()[plane];
    return learn_book(part + at.raw_at, at.tiles());
  });
}

long pack_part(const PackedShape& shape, std::span<const Book> books, const char* part, char* slot) {
  const size_t planes = shape.planes().size();
  if (books.size() != planes) refuse(Refusal::copy, "books", books.size(), std::to_string(planes));
  return pack_planes(shape, part, slot, [&](size_t plane) { return books[plane]; });
}

bool unpack_part(const PackedShape& shape, const char* slot, char* part) {
  if (!is_packed_part(shape, slot)) return false;
  for (size_t plane = 0; plane < shape.planes().size(); ++plane) {
    const PlaneShape& at = shape.planes()[plane];
    char* const to = part + at.raw_at;
    for (size_t tile = 0; tile < at.tiles(); ++tile)
      if (!unpack_tile(shape, slot, plane, tile, to + tile * kTileBytes)) return false;
    std::memcpy(to + at.tiles() * kTileBytes, slot + shape.rest_at(plane), at.rest_bytes());
  }
  return true;
}

}  // namespace kvdock
