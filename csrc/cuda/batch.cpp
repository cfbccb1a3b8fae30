#include "cuda/batch.h"

#include <algorithm>

namespace kvdock::cuda {

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

}  // namespace kvdock::cuda
