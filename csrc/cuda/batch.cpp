// Cuts a call into batches, and each batch into pieces, after every argument was checked.
#include <algorithm>

#include "base/errors.h"
#include "copy/checksum.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

constexpr uint32_t kSmallestPiece = (1u << 20) / kChecksumStripeBytes;

// What all shares of a part have in common.
PartArgs describe(const PagedLayout& layout, const Part& part) {
  const size_t blocks = part.block_ids.size(), bytes = blocks * layout.block_bytes();
  PartArgs args{};
  args.slot = part.slot;
  args.units = uint32_t(bytes / kUnitBytes);
  args.blocks = uint32_t(blocks);
  args.skip_blocks = uint32_t(part.skip_blocks);
  args.plane_units = uint32_t(layout.planes()[0].block_bytes() * blocks / kUnitBytes);
  args.by_plane = divisor(std::max(args.plane_units, 1u));
  return args;
}

// Of a part in its slot.
size_t slot_bytes(const DeviceLayout& layout, size_t blocks) {
  return layout.packing ? layout.packing->shape().packed_bytes() : blocks * layout.layout.block_bytes();
}

}  // namespace

size_t blocks_of(std::span<const Part> parts) {
  size_t blocks = 0;
  for (const Part& part : parts) blocks += part.block_ids.size();
  return blocks;
}

std::vector<Piece> cut_into_pieces(uint32_t stripes, uint32_t piece_stripes, Direction direction, bool shrinks) {
  std::vector<uint32_t> sizes;
  uint32_t left = stripes;
  while (left > 0) {
    uint32_t size = piece_stripes;
    if (shrinks && left < 2 * piece_stripes) size = std::min(size, std::max((left + 1) / 2, kSmallestPiece));
    size = std::min(size, left);
    sizes.push_back(size);
    left -= size;
  }
  if (direction == Direction::gather) std::reverse(sizes.begin(), sizes.end());
  std::vector<Piece> pieces;
  uint32_t at = 0;
  for (const uint32_t size : sizes) pieces.push_back({at, at + size}), at += size;
  return pieces;
}

void check_call(const DeviceLayout& blocks_at, std::span<const Part> parts, const Bands& bands) {
  const PagedLayout& layout = blocks_at.layout;
  check_parts(layout, parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "part " + std::to_string(i) + ": ";
    const size_t blocks = parts[i].block_ids.size(), bytes = slot_bytes(blocks_at, blocks);
    if (bytes >= kMostPartBytes || (blocks + 32) * sizeof(int32_t) > kBatchRingBytes)
      refuse(Refusal::copy, name + "blocks", blocks, "less than 32 GiB and at most 500000");
    if (blocks > blocks_at.part_blocks)
      refuse(Refusal::copy, name + "blocks", blocks, "at most the layout's " + std::to_string(blocks_at.part_blocks));
    if (blocks_at.packing && blocks != blocks_at.part_blocks)
      refuse(Refusal::copy, name + "blocks", blocks, "the layout's " + std::to_string(blocks_at.part_blocks));
    const auto range = find_range(parts[i].slot, bytes);
    if (bytes != 0 && !range)
      refuse(Refusal::copy, name + "slot address", parts[i].slot, "memory registered for copies, in one piece");
    if (bytes != 0 && bands.verified_after > 0 && range->kind == MemoryKind::device)
      refuse(Refusal::copy, name + "slot address", parts[i].slot,
             "host memory, where the CPU hashes the rest of a load");
  }
  check_ends(layout, bands.ends);
  if (bands.verified_after > bands.ends.size())
    refuse(Refusal::copy, "verified_after (bands)", bands.verified_after,
           "at most " + std::to_string(bands.ends.size()));
}

std::vector<std::unique_ptr<Batch>> make_batches(const Tuning& tuning, const DeviceLayout& blocks_at,
                                                 std::span<const Part> parts, Direction direction,
                                                 std::span<const JoinedBands> bands) {
  const PagedLayout& layout = blocks_at.layout;
  const size_t call_bytes = blocks_of(parts) * layout.block_bytes();
  const size_t most_direct = direction == Direction::gather ? tuning.direct_store_bytes : tuning.direct_load_bytes;
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<PartArgs> shares;  // of each part, the one that comes next
  std::vector<uint8_t> are_direct;
  for (const Part& part : parts) {
    shares.push_back(describe(layout, part));
    const auto range = find_range(part.slot, part.block_ids.size() * layout.block_bytes());
    are_direct.push_back(call_bytes <= most_direct || (range && range->kind == MemoryKind::device));
  }
  for (const JoinedBands& joined : bands) {
    bool fresh = true;
    for (size_t i = 0; i < parts.size(); ++i) {
      const bool direct = are_direct[i];
      const bool fits =
          !fresh && batches.back()->direct == direct &&
          batches.back()->ring_bytes() + sizeof(PartArgs) + 16 + 4 * parts[i].block_ids.size() <= kBatchRingBytes;
      if (!fits) {
        batches.push_back(std::make_unique<Batch>());
        batches.back()->layout = &blocks_at;
        batches.back()->first_result = i;
        batches.back()->first_band = joined.first;
        batches.back()->band = joined.last;
        batches.back()->direction = direction;
        batches.back()->direct = direct;
        batches.back()->parts.reserve(parts.size() - i);
        fresh = false;
      }
      Batch& batch = *batches.back();
      PartArgs& share = shares[i];
      share.first_stripe = batch.stripes;
      share.first_id = uint32_t(batch.ids.size());
      share.stripes = uint32_t(stripes_of(layout.bytes_before(joined.end) * share.blocks)) - share.begin;
      batch.parts.push_back(share);
      batch.ids.insert(batch.ids.end(), parts[i].block_ids.begin(), parts[i].block_ids.end());
      batch.stripes += share.stripes;
      share.begin += share.stripes;
    }
    if (!batches.empty()) batches.back()->ends_band = true;
  }
  const auto piece_stripes = uint32_t(tuning.piece_bytes / kChecksumStripeBytes);
  for (const auto& batch : batches) {
    const bool is_edge = batch == (direction == Direction::gather ? batches.front() : batches.back());
    if (batch->direct && batch->stripes != 0) batch->pieces = {{0, batch->stripes}};
    else batch->pieces = cut_into_pieces(batch->stripes, piece_stripes, direction, is_edge);
  }
  return batches;
}

namespace {

// Adds planes [first, end) of all parts, as a batch or several.
class PackedBatches {
 public:
  PackedBatches(const Tuning& tuning, const DeviceLayout& layout, std::span<const Part> parts, Direction direction)
      : tuning_(tuning), layout_(layout), packing_(*layout.packing), parts_(parts), direction_(direction) {
    const size_t most_direct = direction == Direction::gather ? tuning.direct_store_bytes : tuning.direct_load_bytes;
    is_small_ = packing_.shape().packed_bytes() * parts.size() <= most_direct;
  }

  // Where the next share of the band ends that begins at `first` and ends at `end`: it fits a staging buffer. If not
  // even one plane does, or nothing is staged, the band is one share.
  size_t share_end(size_t first, size_t end) const {
    if (direction_ == Direction::gather || is_small_) return end;
    const size_t last = packing_.last_within(first, end, tuning_.piece_bytes);
    return last == first ? end : last;
  }

  void add(const JoinedBands& bands, size_t first, size_t end) {
    const bool gathers = direction_ == Direction::gather;
    const size_t stage_bytes = gathers ? packing_.tiles_bytes() : packing_.staged_bytes(first, end);
    const size_t most_parts = gathers ? kMostHeaderBytes / packing_.shape().header_bytes() : SIZE_MAX;
    // Those that the share hashes: it is staged from the stripe before, of which the share before hashed all.
    const size_t before = first == 0 ? 0 : packing_.stripes_before(first);
    const size_t stripes = std::max(packing_.stripes_before(end), before) - before;
    bool fresh = true;
    size_t taken = 0;  // of the stripes that a batch may have
    for (size_t i = 0; i < parts_.size(); ++i) {
      const bool direct = is_direct(parts_[i], stage_bytes);
      if (fresh || taken + stripes > kMostStripes || batches.back()->packed.size() == most_parts ||
          batches.back()->direct != direct ||
          batches.back()->ring_bytes() + sizeof(PackedPart) + 24 + 4 * packing_.blocks() > kBatchRingBytes) {
        batches.push_back(std::make_unique<Batch>());
        batches.back()->layout = &layout_;
        batches.back()->first_result = i;
        batches.back()->first_band = bands.first;
        batches.back()->band = bands.last;
        batches.back()->direction = direction_;
        batches.back()->direct = direct;
        batches.back()->stage_bytes = stage_bytes;
        fresh = false;
        taken = 0;
      }
      Batch& batch = *batches.back();
      PackedPart part =
          gathers ? describe_gather(packing_, parts_[i].slot) : describe_share(packing_, parts_[i].slot, first, end);
      part.first_cell = batch.stripes;
      part.first_stripe = uint32_t(taken - before);  // modulo 2^32: stripes count from the part's first one
      part.first_id = uint32_t(batch.ids.size());
      part.skip_blocks = uint32_t(parts_[i].skip_blocks);
      batch.packed.push_back(part);
      batch.ids.insert(batch.ids.end(), parts_[i].block_ids.begin(), parts_[i].block_ids.end());
      batch.stripes += part.cells;
      taken += stripes;
      if (gathers && !direct) {
        cut_part(batch, part);
        continue;
      }
      const size_t in_piece = batch.direct ? SIZE_MAX : tuning_.piece_bytes / stage_bytes;
      if ((batch.packed.size() - 1) % in_piece == 0) batch.pieces.push_back({part.first_cell, part.first_cell});
      batch.pieces.back().last_stripe = batch.stripes;
    }
  }

  std::vector<std::unique_ptr<Batch>> batches;

 private:
  bool is_direct(const Part& part, size_t stage_bytes) const {
    const auto range = find_range(part.slot, packing_.shape().packed_bytes());
    const bool fits = direction_ == Direction::gather || stage_bytes <= tuning_.piece_bytes;
    return is_small_ || !fits || (range && range->kind == MemoryKind::device);
  }

  // Divides the cells of the part that was added last among pieces. A piece takes what fits a staging buffer; it may
  // begin in the part before.
  void cut_part(Batch& batch, const PackedPart& part) {
    const uint32_t end = part.begin + part.cells;
    const auto bytes = [&](uint32_t from, uint32_t to) {
      return size_t(packing_.unit_of(to) - packing_.unit_of(from)) * kUnitBytes;
    };
    if (batch.packed.size() == 1) left_ = 0;
    for (uint32_t cell = part.begin; cell < end;) {
      uint32_t low = cell, high = end + 1;  // the last cell up to which the piece has room
      while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (bytes(cell, middle) <= left_) low = middle;
        else high = middle;
      }
      if (low == cell) {
        const uint32_t at = part.first_cell + cell - part.begin;
        batch.pieces.push_back({at, at});
        left_ = tuning_.piece_bytes;
        continue;
      }
      left_ -= bytes(cell, low);
      cell = low;
      batch.pieces.back().last_stripe = part.first_cell + cell - part.begin;
    }
  }

  const Tuning& tuning_;
  const DeviceLayout& layout_;
  const DevicePacking& packing_;
  const std::span<const Part> parts_;
  const Direction direction_;
  bool is_small_;
  size_t left_ = 0;  // of a gather's last piece
};

}  // namespace

std::vector<std::unique_ptr<Batch>> make_packed_batches(const Tuning& tuning, const DeviceLayout& layout,
                                                        std::span<const Part> parts, Direction direction,
                                                        std::span<const JoinedBands> bands) {
  PackedBatches made(tuning, layout, parts, direction);
  size_t first = 0;
  for (const JoinedBands& joined : bands) {
    for (size_t end; first < joined.end; first = end) {
      end = made.share_end(first, joined.end);
      made.add(joined, first, end);
    }
    if (!made.batches.empty()) made.batches.back()->ends_band = true;
  }
  return std::move(made.batches);
}

uint32_t Batch::part_of(uint32_t stripe) const {
  // The last part that begins at or before the stripe, since parts without blocks have no stripe.
  const auto behind = std::upper_bound(parts.begin(), parts.end(), stripe,
                                       [](uint32_t at, const PartArgs& part) { return at < part.first_stripe; });
  return uint32_t(behind - parts.begin()) - 1;
}

uint32_t Batch::packed_part_of(uint32_t cell) const {
  const auto behind = std::upper_bound(packed.begin(), packed.end(), cell,
                                       [](uint32_t at, const PackedPart& part) { return at < part.first_cell; });
  return uint32_t(behind - packed.begin()) - 1;
}

size_t Batch::in_slot(uint32_t cell, const PackedPart& part) const {
  return size_t(layout->packing->unit_of(cell - part.first_cell + part.begin)) * kUnitBytes;
}

bool DescriptorRing::take(size_t bytes, size_t* begin) {
  if (taken_ == 0) head_ = tail_ = 0;
  if (taken_ == 0 || head_ > tail_) {  // free: [head, end) and [0, tail)
    if (bytes_ - head_ >= bytes) *begin = head_;
    else if (tail_ > bytes) *begin = 0;
    else return false;
  } else {
    if (tail_ - head_ <= bytes) return false;  // while memory is taken, head must not reach tail
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

// ------------------------------------------------------------------ the order of batches

bool BatchQueue::can_advance() {
  if (submitting_ || backlog_.empty()) return false;
  Batch& front = *backlog_.front();
  if (!front.has_ring) front.has_ring = ring_.take(front.ring_bytes(), &front.ring_begin);
  return front.has_ring;
}

void BatchQueue::submitted_front() {
  in_flight_.push_back(std::move(backlog_.front()));
  backlog_.pop_front();
}

std::unique_ptr<Batch> BatchQueue::take_first_in_flight() {
  auto first = std::move(in_flight_.front());
  in_flight_.pop_front();
  return first;
}

}  // namespace kvdock::cuda
