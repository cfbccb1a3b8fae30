// A batch: parts of one call, or shares of parts, whose descriptors a Copier uploads together. Internal to the Copier.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "copy/bands.h"
#include "copy/copy.h"
#include "cuda/device_layout.h"
#include "cuda/handle.h"
#include "cuda/kernel_args.h"

namespace kvdock::cuda {

inline constexpr size_t kRingBytes = size_t(8) << 20;
inline constexpr size_t kBatchRingBytes = kRingBytes / 4;  // so that several batches are under way

// Of all parts together.
size_t blocks_of(std::span<const Part> parts);

// Checks all arguments of a call. Throws Refused{copy}.
void check_call(const DeviceLayout& layout, std::span<const Part> parts, const Bands& bands);

// Stripes of a batch that pass through a staging buffer together.
struct Piece {
  uint32_t first_stripe, last_stripe;  // the last one excluded
};

// Shared by a Copier and its Copies; the last of them frees it.
struct Copy::Shared {
  explicit Shared(Device& device_used) : device(device_used) {}
  Device& device;
  std::mutex mutex;
  std::condition_variable changed;  // a batch was submitted or has ended, or all hashes of a copy are done
};

struct Batch {
  const DeviceLayout* layout = nullptr;
  std::shared_ptr<Copy> copy;
  size_t first_result = 0;  // parts[i] is part first_result + i of the call, or its share of a band
  size_t first_band = 0, band = 0;  // it has shares of the bands from the first to the last
  std::vector<PartArgs> parts;
  std::vector<PackedPart> packed;  // in place of `parts` where the layout packs; its cells are `stripes`
  std::vector<int32_t> ids;
  uint32_t stripes = 0;
  size_t stage_bytes = 0;            // of a packed part's share in staging
  uint64_t bytes() const {
    if (packed.empty()) return uint64_t(stripes) * kStripeUnits * kUnitBytes;
    return packed.size() * uint64_t(packed[0].end_unit - packed[0].stage_unit) * kUnitBytes;
  }
  Direction direction = Direction::gather;
  bool direct = false, ends_band = false;
  std::vector<Piece> pieces;
  size_t next_piece = 0;  // the first piece that is not submitted yet
  bool has_ring = false, uploaded_ids = false;
  size_t ring_begin = 0;
  std::string error;  // why the submission or the copy failed; empty: it has not
  Event after = nullptr;  // the end of the work before the copy: the upload waits for it
  Event uploaded = nullptr, done = nullptr;

  // The batch's memory in the ring holds the sums and a counter, all zero at first, then descriptors, then block ids.
  size_t count() const { return parts.size() + packed.size(); }
  size_t sums_each() const { return packed.empty() ? 2 : 3; }
  size_t sums_bytes() const { return (count() * sums_each() + 2) * sizeof(uint64_t); }
  size_t parts_bytes() const { return parts.size() * sizeof(PartArgs) + packed.size() * sizeof(PackedPart); }
  size_t ring_bytes() const {
    const size_t all = sums_bytes() + parts_bytes() + ids.size() * sizeof(int32_t);
    return (all + 255) / 256 * 256;
  }
  // The index of the part to which a stripe belongs.
  uint32_t part_of(uint32_t stripe) const;
  uint32_t packed_part_of(uint32_t cell) const;
  // In bytes, where a cell of a packed part begins in its slot.
  size_t in_slot(uint32_t cell, const PackedPart& part) const;
};

// Allocates memory for descriptors from a ring: it must be given back in the order in which it was taken.
class DescriptorRing {
 public:
  explicit DescriptorRing(size_t bytes) : bytes_(bytes) {}
  bool take(size_t bytes, size_t* begin);
  void give_back(size_t end);

 private:
  size_t bytes_, head_ = 0, tail_ = 0, taken_ = 0;
};

// Pieces of at most `piece_stripes`. `shrinks`: they become smaller towards the end of a scatter, and larger from the
// start of a gather.
std::vector<Piece> cut_into_pieces(uint32_t stripes, uint32_t piece_stripes, Direction direction, bool shrinks);

// Cuts a call into batches, and each of them into pieces. REQUIRES: check_call() passed.
std::vector<std::unique_ptr<Batch>> make_batches(const Tuning& tuning, const DeviceLayout& layout,
                                                 std::span<const Part> parts, Direction direction,
                                                 std::span<const JoinedBands> bands);

// The same for a layout that packs. A gather has one band.
std::vector<std::unique_ptr<Batch>> make_packed_batches(const Tuning& tuning, const DeviceLayout& layout,
                                                        std::span<const Part> parts, Direction direction,
                                                        std::span<const JoinedBands> bands);

// A Copier's batches in the order of their calls: first in the backlog, then, once all their pieces are submitted, in
// flight. The Copier's mutex guards it.
class BatchQueue {
 public:
  void push(std::unique_ptr<Batch> batch) { backlog_.push_back(std::move(batch)); }
  size_t backlog() const { return backlog_.size(); }
  // Whether pieces of the backlog's front can be submitted. Takes the front's memory for descriptors, if there is
  // enough.
  bool can_advance();
  Batch& start_submitting() {
    submitting_ = true;
    return *backlog_.front();
  }
  void stop_submitting() { submitting_ = false; }
  void submitted_front();  // moves the front from the backlog to those in flight

  bool has_in_flight() const { return !in_flight_.empty(); }
  Batch& first_in_flight() { return *in_flight_.front(); }
  std::unique_ptr<Batch> take_first_in_flight();
  void free_descriptors(const Batch& batch) { ring_.give_back(batch.ring_begin + batch.ring_bytes()); }

 private:
  DescriptorRing ring_{kRingBytes};
  std::deque<std::unique_ptr<Batch>> backlog_, in_flight_;
  bool submitting_ = false;  // a thread is submitting the front of the backlog, so no other may
};

}  // namespace kvdock::cuda
