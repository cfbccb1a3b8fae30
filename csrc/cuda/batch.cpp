#include "cuda/batch.h"

#include <algorithm>

#include "copy/checksum.h"

namespace kvdock::cuda {

namespace {
constexpr uint32_t kSmallestPiece = (1u << 20) / kStripeBytes;
}

uint32_t Copier::Batch::part_of(uint32_t stripe) const {
  // The last part that begins at or before the stripe: parts without blocks hold no stripe.
  const auto behind = std::upper_bound(parts.begin(), parts.end(), stripe,
                                       [](uint32_t at, const PartArgs& part) { return at < part.first_stripe; });
  return uint32_t(behind - parts.begin()) - 1;
}

bool DescriptorRing::take(size_t bytes, size_t* begin) {
  if (taken_ == 0) head_ = tail_ = 0;
  if (taken_ == 0 || head_ > tail_) {  // free: [head, end) and [0, tail)
    if (bytes_ - head_ >= bytes) *begin = head_;
    else if (tail_ > bytes) *begin = 0;
    else return false;
  } else {
    if (tail_ - head_ <= bytes) return false;  // head never catches up with tail while something is taken
    *begin = head_;
  }
  head_ = *begin + bytes;
  ++taken_;
  return true;
}

void DescriptorRing::give_back(size_t end) {
  tail_ = end;
  --taken_;
}

std::vector<Piece> cut_into_pieces(uint32_t stripes, uint32_t piece_stripes, bool store) {
  std::vector<uint32_t> sizes;
  uint32_t left = stripes;
  while (left > 0) {
    uint32_t size = piece_stripes;
    if (left < 2 * piece_stripes) size = std::min(size, std::max((left + 1) / 2, kSmallestPiece));
    size = std::min(size, left);
    sizes.push_back(size);
    left -= size;
  }
  if (store) std::reverse(sizes.begin(), sizes.end());
  std::vector<Piece> pieces;
  uint32_t at = 0;
  for (const uint32_t size : sizes) pieces.push_back({at, at + size}), at += size;
  return pieces;
}

}  // namespace kvdock::cuda
