// How a call becomes batches, and a batch pieces. First every argument is checked.
#include <algorithm>

#include "base/errors.h"
#include "copy/checksum.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

constexpr uint32_t kSmallestPiece = (1u << 20) / kChecksumStripeBytes;

// The share of a part that reaches to plane `end` and begins where the share before it ended, at stripe `begin`.
PartArgs describe(const PagedLayout& layout, const Part& part, uint32_t first_stripe, size_t first_id, uint32_t begin,
                  size_t end) {
  const size_t blocks = part.block_ids.size(), bytes = blocks * layout.block_bytes();
  PartArgs args{};
  args.slot = part.slot;
  args.first_stripe = first_stripe;
  args.begin = begin;
  args.stripes = uint32_t(stripes_of(layout.bytes_before(end) * blocks)) - begin;
  args.units = uint32_t(bytes / kUnitBytes);
  args.first_id = uint32_t(first_id);
  args.blocks = uint32_t(blocks);
  args.skip_blocks = uint32_t(part.skip_blocks);
  args.plane_units = uint32_t(layout.planes()[0].block_bytes() * blocks / kUnitBytes);
  args.by_plane = divisor(std::max(args.plane_units, 1u));
  return args;
}

// Pieces shrink towards the end of a scatter, and grow from the start of a gather.
std::vector<Piece> cut_into_pieces(uint32_t stripes, uint32_t piece_stripes, Direction direction) {
  std::vector<uint32_t> sizes;
  uint32_t left = stripes;
  while (left > 0) {
    uint32_t size = piece_stripes;
    if (left < 2 * piece_stripes) size = std::min(size, std::max((left + 1) / 2, kSmallestPiece));
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

}  // namespace

void check_call(const DeviceLayout& blocks_at, std::span<const Part> parts, const Bands& bands) {
  const PagedLayout& layout = blocks_at.layout;
  check_parts(layout, parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "part " + std::to_string(i) + ": ";
    const size_t blocks = parts[i].block_ids.size(), bytes = blocks * layout.block_bytes();
    if (bytes >= kMostPartBytes || (blocks + 32) * sizeof(int32_t) > kBatchRingBytes)
      refuse(Refusal::copy, name + "blocks", blocks, "less than 32 GiB and at most 500000");
    if (blocks > blocks_at.part_blocks)
      refuse(Refusal::copy, name + "blocks", blocks, "at most the layout's " + std::to_string(blocks_at.part_blocks));
    const auto range = find_range(parts[i].slot, bytes);
    if (bytes != 0 && !range)
      refuse(Refusal::copy, name + "slot address", parts[i].slot, "memory registered for copies, in one piece");
    if (bytes != 0 && bands.verified_after > 0 && range->kind == MemoryKind::device)
      refuse(Refusal::copy, name + "slot address", parts[i].slot,
             "host memory, where the CPU hashes the rest of a load");
  }
  size_t before = 0;
  for (const size_t end : bands.ends) {
    if (end <= before || end > layout.planes().size())
      refuse(Refusal::copy, "end of a band (planes)", end,
             std::to_string(before + 1) + ".." + std::to_string(layout.planes().size()));
    before = end;
  }
  if (!bands.ends.empty() && before != layout.planes().size())
    refuse(Refusal::copy, "end of the last band (planes)", before, std::to_string(layout.planes().size()));
  if (bands.verified_after > bands.ends.size())
    refuse(Refusal::copy, "verified_after (bands)", bands.verified_after,
           "at most " + std::to_string(bands.ends.size()));
}

std::vector<std::unique_ptr<Copier::Batch>> Copier::make_batches(const DeviceLayout& blocks_at,
                                                                 std::span<const Part> parts, Direction direction,
                                                                 std::span<const size_t> bands) const {
  const PagedLayout& layout = blocks_at.layout;
  uint64_t call_bytes = 0;
  for (const Part& part : parts) call_bytes += part.block_ids.size() * layout.block_bytes();
  const size_t most_direct = direction == Direction::gather ? tuning_.direct_store_bytes : tuning_.direct_load_bytes;
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<uint32_t> begins(parts.size(), 0);
  for (size_t band = 0; band < bands.size(); ++band) {
    bool fresh = true;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto range = find_range(parts[i].slot, parts[i].block_ids.size() * layout.block_bytes());
      const bool direct = call_bytes <= most_direct || (range && range->kind == MemoryKind::device);
      const bool fits =
          !fresh && batches.back()->direct == direct &&
          batches.back()->ring_bytes() + sizeof(PartArgs) + 16 + 4 * parts[i].block_ids.size() <= kBatchRingBytes;
      if (!fits) {
        batches.push_back(std::make_unique<Batch>());
        batches.back()->layout = &blocks_at;
        batches.back()->first_result = i;
        batches.back()->band = band;
        batches.back()->direction = direction;
        batches.back()->direct = direct;
        fresh = false;
      }
      Batch& batch = *batches.back();
      batch.parts.push_back(describe(layout, parts[i], batch.stripes, batch.ids.size(), begins[i], bands[band]));
      batch.ids.insert(batch.ids.end(), parts[i].block_ids.begin(), parts[i].block_ids.end());
      batch.stripes += batch.parts.back().stripes;
      begins[i] += batch.parts.back().stripes;
    }
    if (!batches.empty()) batches.back()->ends_band = true;
  }
  const auto piece_stripes = uint32_t(tuning_.piece_bytes / kChecksumStripeBytes);
  for (const auto& batch : batches) {
    if (batch->direct && batch->stripes != 0) batch->pieces = {{0, batch->stripes}};
    else batch->pieces = cut_into_pieces(batch->stripes, piece_stripes, direction);
  }
  return batches;
}

}  // namespace kvdock::cuda
