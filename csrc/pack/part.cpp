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

bool pack_piece(const PackedShape& shape, size_t plane, const Book& book, size_t piece, const char* from,
                std::atomic<uint32_t>* spilled, char* slot) {
  const PlaneShape& of = shape.planes()[plane];
  char* const to = slot + of.at + piece * of.tile_bytes();
  if (piece == of.tiles()) {
    std::memcpy(to, from, of.rest_bytes());
    return true;
  }
  if (tile_path().pack(from, book, of.marks, to)) return true;
  const uint32_t entry = spilled->fetch_add(1, std::memory_order_relaxed);
  if (entry >= shape.spills()) return false;
  const size_t kept = of.kept_bytes();
  const auto number = uint16_t(entry + 1);
  std::memcpy(to, from, kept);
  std::memset(to + kept, 0, of.tile_bytes() - kept - sizeof number);
  std::memcpy(to + of.tile_bytes() - sizeof number, &number, sizeof number);
  char* const end = slot + shape.spill_at(entry);
  std::memcpy(end, from + kept, kTileBytes - kept);
  std::memset(end + kTileBytes - kept, 0, shape.spill_at(1) - shape.spill_at(0) - (kTileBytes - kept));
  return true;
}

void finish_packed(const PackedShape& shape, std::span<const Book> books, uint32_t spilled, char* slot) {
  std::memset(slot, 0, shape.header_bytes());
  const Header header{{kMagic[0], kMagic[1], kMagic[2], kMagic[3]}, uint16_t(books.size()), uint16_t(spilled), 0};
  std::memcpy(slot, &header, sizeof header);
  for (size_t i = 0; i < books.size(); ++i)
    std::memcpy(slot + kBooksAt + kBookBytes * i, books[i].exponents, kBookBytes);
  // No byte of a slot is left as an earlier part had it.
  std::memset(slot + shape.spill_at(spilled), 0, shape.packed_bytes() - shape.spill_at(spilled));
}

bool is_packed(const PackedShape& shape, const char* slot) {
  Header header;
  std::memcpy(&header, slot, sizeof header);
  return std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && header.planes == shape.planes().size();
}

bool unpack_piece(const PackedShape& shape, size_t plane, size_t piece, const char* slot, char* to) {
  const PlaneShape& of = shape.planes()[plane];
  const char* const from = slot + of.at + piece * of.tile_bytes();
  if (piece == of.tiles()) {
    std::memcpy(to, from, of.rest_bytes());
    return true;
  }
  const size_t number = spill_number(from, of);
  if (number == 0) {
    tile_path().unpack(from, reinterpret_cast<const uint8_t*>(slot) + kBooksAt + kBookBytes * plane, of.marks, to);
    return true;
  }
  if (number > shape.spills()) return false;
  std::memcpy(to, from, of.kept_bytes());
  std::memcpy(to + of.kept_bytes(), slot + shape.spill_at(number - 1), kTileBytes - of.kept_bytes());
  return true;
}

long pack_part(const PackedShape& shape, std::span<const Book> books, const char* part, char* slot) {
  const auto& planes = shape.planes();
  if (books.size() != planes.size()) refuse(Refusal::copy, "books", books.size(), std::to_string(planes.size()));
  std::atomic<uint32_t> spilled{0};
  for (size_t i = 0; i < planes.size(); ++i)
    for (size_t piece = 0; piece < planes[i].pieces(); ++piece)
      if (!pack_piece(shape, i, books[i], piece, part + planes[i].raw_at + piece * kTileBytes, &spilled, slot))
        return -1;
  finish_packed(shape, books, spilled, slot);
  return spilled;
}

bool unpack_part(const PackedShape& shape, const char* slot, char* part) {
  if (!is_packed(shape, slot)) return false;
  const auto& planes = shape.planes();
  for (size_t i = 0; i < planes.size(); ++i)
    for (size_t piece = 0; piece < planes[i].pieces(); ++piece)
      if (!unpack_piece(shape, i, piece, slot, part + planes[i].raw_at + piece * kTileBytes)) return false;
  return true;
}

}  // namespace kvdock
