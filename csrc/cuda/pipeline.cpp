#include "cuda/pipeline.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "copy/checksum.h"

namespace kvdock::cuda {

namespace {

void wait_for(const ContextGuard& cu, const OwnedStream& stream, Event event) {
  check(cu->cuStreamWaitEvent(stream.get(), event, 0), "cuStreamWaitEvent");
}

void record(const ContextGuard& cu, Event event, const OwnedStream& stream) {
  check(cu->cuEventRecord(event, stream.get()), "cuEventRecord");
}

void transfer(const ContextGuard& cu, std::vector<DevicePtr>& to, std::vector<DevicePtr>& from,
              std::vector<size_t>& sizes, Direction direction, const OwnedStream& stream) {
  if (sizes.size() > 1 && cu->cuMemcpyBatchAsync != nullptr) {
    MemcpyAttributes attributes;
    size_t first = 0, failed = 0;
    check(cu->cuMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &first, 1, &failed,
                                 stream.get()),
          "transfers");
    return;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (direction == Direction::gather)
      check(cu->cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to[i]), from[i], sizes[i], stream.get()), "transfer");
    else
      check(cu->cuMemcpyHtoDAsync_v2(to[i], reinterpret_cast<const void*>(from[i]), sizes[i], stream.get()),
            "transfer");
  }
}

}  // namespace

Event EventPool::take() {
  if (idle_.empty()) {
    all_.push_back(make_event(device_, kEventWithTime));
    return all_.back().get();
  }
  const Event event = idle_.back();
  idle_.pop_back();
  return event;
}

Pipeline::Pipeline(Device& device, const Tuning& tuning)
    : device_(device),
      tuning_(tuning),
      ring_host_(device_, kRingBytes, MemoryKind::host),
      ring_device_(device_, kRingBytes, MemoryKind::device),
      staging_(device_, tuning.piece_bytes * size_t(tuning.buffers), MemoryKind::device),
      uploads_(make_stream(device_)),
      transfers_(make_stream(device_)),
      kernels_(make_stream(device_)) {
  for (size_t i = 0; i < size_t(tuning_.buffers); ++i)
    buffers_.push_back({staging_.address() + i * tuning_.piece_bytes, make_event(device_), make_event(device_)});
}

void Pipeline::submit(const ContextGuard& cu, Batch& batch, size_t most_pieces) {
  if (!batch.uploaded_ids) {
    upload(cu, batch);
    wait_for(cu, kernels_, batch.uploaded);
    batch.uploaded_ids = true;
  }
  const size_t left = batch.pieces.size() - batch.next_piece;
  for (const size_t end = batch.next_piece + std::min(left, most_pieces); batch.next_piece < end; ++batch.next_piece) {
    const Piece& piece = batch.pieces[batch.next_piece];
    if (batch.direct) {
      launch(cu, batch, piece, 0);
      continue;
    }
    const Staging& staging = buffers_[next_buffer_];
    next_buffer_ = (next_buffer_ + 1) % buffers_.size();
    move_piece(cu, batch, piece, staging);
  }
  if (batch.next_piece < batch.pieces.size()) return;
  const bool ends_with_transfer = batch.direction == Direction::gather && !batch.direct && batch.stripes != 0;
  record(cu, batch.done, ends_with_transfer ? transfers_ : kernels_);
}

void Pipeline::upload(const ContextGuard& cu, Batch& batch) {
  char* ring = ring_host_.host() + batch.ring_begin;
  std::memset(ring, 0, batch.sums_bytes());
  if (!batch.parts.empty()) std::memcpy(ring + batch.sums_bytes(), batch.parts.data(), batch.parts_bytes());
  if (!batch.packed.empty()) std::memcpy(ring + batch.sums_bytes(), batch.packed.data(), batch.parts_bytes());
  std::memcpy(ring + batch.sums_bytes() + batch.parts_bytes(), batch.ids.data(), batch.ids.size() * sizeof(int32_t));
  // Only kernels touch the engine's blocks, and kernels run after the upload. Transfers of a load need not wait for
  // `after`.
  if (batch.after != nullptr) wait_for(cu, uploads_, batch.after);
  cuda::check(cu->cuMemcpyHtoDAsync_v2(ring_device_.address() + batch.ring_begin, ring, batch.ring_bytes(),
                                       uploads_.get()),
              "upload of block ids");
  record(cu, batch.uploaded, uploads_);
}

// A piece passes through a staging buffer: by the kernel, then the transfer (gather), or the other way round (scatter).
void Pipeline::move_piece(const ContextGuard& cu, const Batch& batch, const Piece& piece, const Staging& staging) {
  const bool gathers = batch.direction == Direction::gather;
  const OwnedStream& in = gathers ? kernels_ : transfers_;
  const OwnedStream& out = gathers ? transfers_ : kernels_;
  wait_for(cu, in, staging.free.get());
  if (gathers) launch(cu, batch, piece, staging.address);
  else move_slots(cu, batch, piece, staging.address);
  record(cu, staging.full.get(), in);
  wait_for(cu, out, staging.full.get());
  if (gathers) move_slots(cu, batch, piece, staging.address);
  else launch(cu, batch, piece, staging.address);
  record(cu, staging.free.get(), out);
}

// Shares of packed parts, in their slots -> staging (scatter), or tiles in staging -> slots (gather).
void Pipeline::move_packed_slots(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging) {
  const bool gathers = batch.direction == Direction::gather;
  std::vector<DevicePtr> slots, stages;
  std::vector<size_t> sizes;
  const uint32_t first = batch.packed_part_of(piece.first_stripe), last = batch.packed_part_of(piece.last_stripe - 1);
  for (uint32_t i = first; i <= last; ++i) {
    const PackedPart& part = batch.packed[i];
    if (gathers) {
      const size_t from = batch.in_slot(std::max(piece.first_stripe, part.first_cell), part);
      const size_t to = batch.in_slot(std::min(piece.last_stripe, part.first_cell + part.cells), part);
      slots.push_back(part.slot + from);
      stages.push_back(stages.empty() ? staging : stages.back() + sizes.back());
      sizes.push_back(to - from);
      continue;
    }
    slots.push_back(part.slot + size_t(part.stage_unit) * kUnitBytes);
    stages.push_back(staging + (i - first) * batch.stage_bytes);
    sizes.push_back(size_t(part.end_unit - part.stage_unit) * kUnitBytes);
  }
  transfer(cu, gathers ? slots : stages, gathers ? stages : slots, sizes, batch.direction, transfers_);
}

// Slots -> staging (scatter), or staging -> slots (gather): one transfer for each part, or for slots that touch.
void Pipeline::move_slots(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging) {
  if (!batch.packed.empty()) return move_packed_slots(cu, batch, piece, staging);
  std::vector<DevicePtr> slots, stages;
  std::vector<size_t> sizes;
  for (uint32_t i = batch.part_of(piece.first_stripe), last = batch.part_of(piece.last_stripe - 1); i <= last; ++i) {
    const PartArgs& part = batch.parts[i];
    const uint32_t first = std::max(piece.first_stripe, part.first_stripe);
    const uint32_t end = std::min(piece.last_stripe, part.first_stripe + part.stripes);
    if (first >= end) continue;
    const size_t from = size_t(first - part.first_stripe + part.begin) * kChecksumStripeBytes;
    const size_t own_end = size_t(end - part.first_stripe + part.begin) * kChecksumStripeBytes;
    const size_t to = std::min(own_end, size_t(part.units) * kUnitBytes);
    const uintptr_t slot = part.slot + from;
    const uintptr_t stage = staging + size_t(first - piece.first_stripe) * kChecksumStripeBytes;
    const bool touches = !sizes.empty() && slots.back() + sizes.back() == slot && stages.back() + sizes.back() == stage;
    if (touches && find_range(slots.back(), sizes.back() + to - from)) {  // a transfer must not span two registrations
      sizes.back() += to - from;
    } else {
      slots.push_back(slot);
      stages.push_back(stage);
      sizes.push_back(to - from);
    }
  }
  const bool gathers = batch.direction == Direction::gather;
  transfer(cu, gathers ? slots : stages, gathers ? stages : slots, sizes, batch.direction, transfers_);
}

void Pipeline::launch(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging) {
  if (!batch.packed.empty()) return pack(cu, batch, piece, staging);
  const uintptr_t ring = ring_device_.address() + batch.ring_begin;
  const Device::Keys keys = device_.keys();
  CopyArgs args{};
  args.planes = reinterpret_cast<const PlaneArgs*>(batch.layout->planes.address());
  args.sums = reinterpret_cast<unsigned long long*>(ring);
  args.finished_blocks = reinterpret_cast<unsigned int*>(args.sums + 2 * batch.parts.size());
  args.parts = reinterpret_cast<const PartArgs*>(ring + batch.sums_bytes());
  args.ids = reinterpret_cast<const int32_t*>(ring + batch.sums_bytes() + batch.parts_bytes());
  args.nh_keys = reinterpret_cast<const uint32_t*>(keys.nh);
  args.level2 = reinterpret_cast<const uint64_t*>(keys.level2);
  const bool reports = piece.last_stripe == batch.stripes;
  args.report = reports ? reinterpret_cast<unsigned long long*>(ring_host_.address() + batch.ring_begin) : nullptr;
  args.stage = staging;
  args.num_planes = uint32_t(batch.layout->layout.planes().size());
  args.num_parts = uint32_t(batch.parts.size());
  args.first_stripe = piece.first_stripe;
  args.last_stripe = piece.last_stripe;
  args.first_part = batch.part_of(piece.first_stripe);
  args.last_part = batch.part_of(piece.last_stripe - 1);
  const int staged = batch.direction == Direction::gather ? tuning_.store_ctas : tuning_.load_ctas;
  const int most = batch.direct ? tuning_.direct_ctas : staged;
  constexpr uint32_t kWarps = kBlockThreads / 32;
  const uint32_t wanted = (piece.last_stripe - piece.first_stripe + kWarps - 1) / kWarps;
  const unsigned ctas = std::min(unsigned(most), wanted);
  void* parameters[] = {&args};
  const Variant kind{batch.direction, batch.layout->alike, batch.layout->wide};
  cuda::check(cu->cuLaunchKernel(device_.kernel(kind), ctas, 1, 1, kBlockThreads, 1, 1, 0, kernels_.get(),
                                 parameters, nullptr),
              "copy kernel");
}

void Pipeline::make_room_to_pack() {
  if (!pack_memory_) pack_memory_ = std::make_unique<const PackMemory>(device_);
}

// All kernels of a piece that is packed or unpacked. The first piece of a gather learns the books of all parts; the
// last one stores their headers.
void Pipeline::pack(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging) {
  const uintptr_t ring = ring_device_.address() + batch.ring_begin;
  const Device::Keys keys = device_.keys();
  const PackedShape& shape = batch.layout->packing->shape();
  PackArgs args{};
  args.planes = reinterpret_cast<const PlaneArgs*>(batch.layout->planes.address());
  args.sums = reinterpret_cast<unsigned long long*>(ring);
  args.finished_blocks = reinterpret_cast<unsigned int*>(args.sums + batch.sums_each() * batch.count());
  args.parts = reinterpret_cast<const PackedPart*>(ring + batch.sums_bytes());
  args.ids = reinterpret_cast<const int32_t*>(ring + batch.sums_bytes() + batch.parts_bytes());
  args.nh_keys = reinterpret_cast<const uint32_t*>(keys.nh);
  args.level2 = reinterpret_cast<const uint64_t*>(keys.level2);
  args.shares = reinterpret_cast<StripeShare*>(pack_memory_->shares.address());
  args.headers = reinterpret_cast<unsigned char*>(pack_memory_->headers.address());
  args.num_planes = uint32_t(shape.planes().size());
  args.stage = staging;
  args.stage_bytes = batch.stage_bytes;
  args.first_cell = piece.first_stripe;
  args.last_cell = piece.last_stripe;
  args.num_parts = uint32_t(batch.packed.size());
  args.first_part = batch.packed_part_of(piece.first_stripe);
  args.last_part = batch.packed_part_of(piece.last_stripe - 1);
  args.tile_units = uint32_t(shape.tile_bytes() / kUnitBytes);
  args.marks = uint32_t(shape.marks());
  args.header_units = uint32_t(shape.header_bytes() / kUnitBytes);
  const bool gathers = batch.direction == Direction::gather, ends = piece.last_stripe == batch.stripes;
  const uint32_t cells = piece.last_stripe - piece.first_stripe;
  if (gathers) {
    if (staging != 0) {
      const PackedPart& first = batch.packed[args.first_part];
      args.stage -= batch.in_slot(piece.first_stripe, first) - batch.in_slot(first.first_cell, first);
    }
    if (piece.first_stripe == 0)
      launch_packed(cu, batch, args, PackStep::learn, size_t(args.num_parts) * args.num_planes);
    launch_packed(cu, batch, args, PackStep::pack, cells);
  }
  if (ends) args.report = reinterpret_cast<unsigned long long*>(ring_host_.address() + batch.ring_begin);
  const size_t warps = device_.pack_threads(PackStep::finish) / 32;
  if (!gathers) launch_packed(cu, batch, args, PackStep::unpack, cells);
  else if (ends) launch_packed(cu, batch, args, PackStep::finish, args.num_parts * warps);
}

// `warps`: how many have something to do.
void Pipeline::launch_packed(const ContextGuard& cu, const Batch& batch, const PackArgs& args, PackStep step,
                             size_t warps) {
  const unsigned threads = device_.pack_threads(step);
  const int staged = batch.direction == Direction::gather ? tuning_.store_ctas : tuning_.load_ctas;
  const int most = batch.direct ? tuning_.direct_ctas : staged;
  const auto ctas = unsigned(std::min(size_t(most), (warps * 32 + threads - 1) / threads));
  PackArgs passed = args;
  void* parameters[] = {&passed};
  cuda::check(cu->cuLaunchKernel(device_.kernel(step, batch.layout->wide), ctas, 1, 1, threads, 1, 1,
                                 device_.pack_shared_bytes(), kernels_.get(), parameters, nullptr),
              "packing kernel");
}

void Pipeline::wait_for_streams() {
  for (const OwnedStream* stream : {&uploads_, &transfers_, &kernels_})
    unless_gone(device_, [&](const Calls& cu) { cu->cuStreamSynchronize(stream->get()); });
}

}  // namespace kvdock::cuda
