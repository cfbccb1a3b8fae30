// A batch: the parts of one call, or some of them, whose descriptors a Copier uploads together. Internal to the Copier.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cuda/copier.h"
#include "cuda/kernel_args.h"

namespace kvdock::cuda {

inline constexpr size_t kRingBytes = size_t(8) << 20;
inline constexpr size_t kBatchRingBytes = kRingBytes / 4;  // so that several batches are under way

// Throws Refused{copy}.
void check_call(const DeviceLayout& layout, std::span<const Part> parts, const Bands& bands);

// Stripes of a batch that pass through a staging buffer together.
struct Piece {
  uint32_t first_stripe, last_stripe;  // the last one excluded
};

// Shared by a Copier and its Copies: whichever goes last frees it.
struct Copy::Shared {
  explicit Shared(Device& device_used) : device(device_used) {}
  Device& device;
  std::mutex mutex;
  std::condition_variable changed;  // a batch was submitted, a copy ended
};

// A staging buffer. Event `full`: the bytes are in it; `free`: they have been copied out. A wait for one of them means
// its latest record before the wait.
struct Copier::Staging {
  uintptr_t address;
  OwnedEvent full, free;
};

struct Copier::Batch {
  const DeviceLayout* layout = nullptr;
  std::shared_ptr<Copy> copy;
  size_t first_result = 0;  // parts[i] is the call's part first_result + i, or that part's share of a band
  size_t band = 0;
  std::vector<PartArgs> parts;
  std::vector<int32_t> ids;
  uint32_t stripes = 0;
  uint64_t bytes() const { return uint64_t(stripes) * kStripeUnits * kUnitBytes; }
  Direction direction = Direction::gather;
  bool direct = false, ends_band = false;
  std::vector<Piece> pieces;
  size_t next_piece = 0;  // the first that is not submitted yet
  bool has_ring = false, uploaded_ids = false;
  size_t ring_begin = 0;
  std::string error;  // submission failed
  Event uploaded = nullptr, done = nullptr;

  // In the ring: the sums and a counter, all zero at first, then descriptors, then block ids.
  size_t sums_bytes() const { return (parts.size() * 2 + 2) * sizeof(uint64_t); }
  size_t parts_bytes() const { return parts.size() * sizeof(PartArgs); }
  size_t ring_bytes() const {
    const size_t all = sums_bytes() + parts_bytes() + ids.size() * sizeof(int32_t);
    return (all + 255) / 256 * 256;
  }
  // Index of the part that a stripe belongs to.
  uint32_t part_of(uint32_t stripe) const;
};

// Memory for descriptors, given back in the order in which it was taken.
class DescriptorRing {
 public:
  explicit DescriptorRing(size_t bytes) : bytes_(bytes) {}
  bool take(size_t bytes, size_t* begin);
  void give_back(size_t end);

 private:
  size_t bytes_, head_ = 0, tail_ = 0, taken_ = 0;
};

}  // namespace kvdock::cuda
