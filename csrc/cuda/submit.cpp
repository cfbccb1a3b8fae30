// What a batch is on the GPU: one upload, then pieces, each a transfer and a kernel, and one event at the end.
#include <algorithm>
#include <cstring>

#include "copy/checksum.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

void wait_for(const OwnedStream& stream, Event event) {
  check(driver().cuStreamWaitEvent(stream.get(), event, 0), "cuStreamWaitEvent");
}

void record(Event event, const OwnedStream& stream) {
  check(driver().cuEventRecord(event, stream.get()), "cuEventRecord");
}

void transfer(std::vector<DevicePtr>& to, std::vector<DevicePtr>& from, std::vector<size_t>& sizes, bool to_host,
              const OwnedStream& stream) {
  const Driver& cu = driver();
  if (sizes.size() > 1 && cu.cuMemcpyBatchAsync != nullptr) {
    MemcpyAttributes attributes;
    size_t first = 0, failed = 0;
    check(cu.cuMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &first, 1, &failed,
                                stream.get()),
          "transfers");
    return;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (to_host)
      check(cu.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to[i]), from[i], sizes[i], stream.get()), "transfer");
    else
      check(cu.cuMemcpyHtoDAsync_v2(to[i], reinterpret_cast<const void*>(from[i]), sizes[i], stream.get()), "transfer");
  }
}

}  // namespace

void Copier::submit(Batch& batch, size_t most_pieces) {
  if (!batch.uploaded_ids) {
    upload(batch);
    wait_for(kernels_, batch.uploaded);
    batch.uploaded_ids = true;
  }
  const size_t left = batch.pieces.size() - batch.next_piece;
  for (const size_t end = batch.next_piece + std::min(left, most_pieces); batch.next_piece < end; ++batch.next_piece) {
    const Piece& piece = batch.pieces[batch.next_piece];
    if (batch.direct) {
      launch(batch, piece, 0);
      continue;
    }
    const Staging& staging = buffers_[next_buffer_];
    next_buffer_ = (next_buffer_ + 1) % buffers_.size();
    if (batch.store) store_piece(batch, piece, staging);
    else load_piece(batch, piece, staging);
  }
  if (batch.next_piece < batch.pieces.size()) return;
  record(batch.done, batch.store && !batch.direct && batch.stripes != 0 ? transfers_ : kernels_);
}

void Copier::upload(Batch& batch) {
  char* ring = ring_host_.host() + batch.ring_begin;
  std::memset(ring, 0, batch.sums_bytes());
  std::memcpy(ring + batch.sums_bytes(), batch.parts.data(), batch.parts_bytes());
  std::memcpy(ring + batch.sums_bytes() + batch.parts_bytes(), batch.ids.data(), batch.ids.size() * sizeof(int32_t));
  // Only kernels touch the engine's blocks, and they come behind the upload. Transfers of a load go ahead.
  if (batch.copy->after_ != nullptr) wait_for(uploads_, batch.copy->after_);
  cuda::check(driver().cuMemcpyHtoDAsync_v2(ring_device_.address() + batch.ring_begin, ring, batch.ring_bytes(),
                                            uploads_.get()),
              "upload of block ids");
  record(batch.uploaded, uploads_);
}

void Copier::load_piece(const Batch& batch, const Piece& piece, const Staging& staging) {
  wait_for(transfers_, staging.free.get());
  move_slots(batch, piece, staging.address);
  record(staging.full.get(), transfers_);
  wait_for(kernels_, staging.full.get());
  launch(batch, piece, staging.address);
  record(staging.free.get(), kernels_);
}

void Copier::store_piece(const Batch& batch, const Piece& piece, const Staging& staging) {
  wait_for(kernels_, staging.free.get());
  launch(batch, piece, staging.address);
  record(staging.full.get(), kernels_);
  wait_for(transfers_, staging.full.get());
  move_slots(batch, piece, staging.address);
  record(staging.free.get(), transfers_);
}

// Slots -> staging (load), or staging -> slots (store): one transfer a part, slots that touch in one.
void Copier::move_slots(const Batch& batch, const Piece& piece, uintptr_t staging) {
  std::vector<DevicePtr> slots, stages;
  std::vector<size_t> sizes;
  for (uint32_t i = batch.part_of(piece.first_stripe), last = batch.part_of(piece.last_stripe - 1); i <= last; ++i) {
    const PartArgs& part = batch.parts[i];
    const uint32_t first = std::max(piece.first_stripe, part.first_stripe);
    const uint32_t end = std::min(piece.last_stripe, part.first_stripe + part.stripes);
    if (first >= end) continue;
    const size_t from = size_t(first - part.first_stripe + part.begin) * kStripeBytes;
    const size_t own_end = size_t(end - part.first_stripe + part.begin) * kStripeBytes;
    const size_t to = std::min(own_end, size_t(part.units) * kUnitBytes);
    const uintptr_t slot = part.slot + from, stage = staging + size_t(first - piece.first_stripe) * kStripeBytes;
    const bool touches = !sizes.empty() && slots.back() + sizes.back() == slot && stages.back() + sizes.back() == stage;
    if (touches && find_range(slots.back(), sizes.back() + to - from)) {  // not across two registrations
      sizes.back() += to - from;
    } else {
      slots.push_back(slot);
      stages.push_back(stage);
      sizes.push_back(to - from);
    }
  }
  transfer(batch.store ? slots : stages, batch.store ? stages : slots, sizes, batch.store, transfers_);
}

void Copier::launch(const Batch& batch, const Piece& piece, uintptr_t staging) {
  const uintptr_t ring = ring_device_.address() + batch.ring_begin;
  const Device::Keys keys = device_.keys(1);
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
  const int most = batch.direct ? tuning_.direct_ctas : batch.store ? tuning_.store_ctas : tuning_.load_ctas;
  constexpr uint32_t kWarps = kBlockThreads / 32;
  const uint32_t wanted = (piece.last_stripe - piece.first_stripe + kWarps - 1) / kWarps;
  const unsigned blocks = std::min(unsigned(most), wanted);
  void* parameters[] = {&args};
  const Variant kind{batch.store, batch.layout->alike, batch.layout->wide};
  cuda::check(driver().cuLaunchKernel(device_.kernel(kind), blocks, 1, 1, kBlockThreads, 1, 1, 0, kernels_.get(),
                                      parameters, nullptr),
              "copy kernel");
}

}  // namespace kvdock::cuda
