#include "cuda/copier.h"

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "copy/checksum.h"
#include "base/errors.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

constexpr size_t kRingBytes = size_t(8) << 20;
constexpr size_t kBatchRingBytes = kRingBytes / 4;  // so that several batches are under way
constexpr size_t kCallsPieces = 1;                  // submitted by the call itself: what it takes to start the GPU
constexpr uint64_t kFastestBytesPerNs = 64;         // PCIe 5.0 x16 carries at most 63 GB/s
constexpr std::chrono::nanoseconds kFirstLook{10'000}, kLastLook{200'000};
constexpr size_t kWideBytes = 128;                  // a granule: see kernels.cu
constexpr uint64_t kMostUnits = uint64_t(1) << 31;  // of a part: what a Divisor divides

[[noreturn]] void refuse(const std::string& what, long long found, const std::string& wanted) {
  throw Refused(Refusal::copy, what + ": found " + std::to_string(found) + ", wanted " + wanted, found, wanted);
}

void require_tuning(bool holds, const char* name, size_t found, const char* wanted) {
  if (!holds) refuse(name, (long long)(found), wanted);
}

Tuning checked(const Tuning& tuning) {
  require_tuning(tuning.buffers >= 2 && tuning.buffers <= 8, "staging buffers", size_t(tuning.buffers), "2..8");
  require_tuning(tuning.piece_bytes >= (1u << 20) && tuning.piece_bytes % kStripeBytes == 0, "piece_bytes",
                 tuning.piece_bytes, "at least 1 MiB, a multiple of 4096");
  for (const int ctas : {tuning.load_ctas, tuning.store_ctas, tuning.direct_ctas})
    require_tuning(ctas >= 1 && ctas <= 1024, "thread blocks", size_t(ctas), "1..1024");
  require_tuning(tuning.hash_threads >= 1 && tuning.hash_threads <= 64, "hash threads", size_t(tuning.hash_threads),
                 "1..64");
  return tuning;
}

bool all_alike(const std::vector<Plane>& planes) {
  return std::all_of(planes.begin(), planes.end(), [&](const Plane& plane) {
    return plane.run_bytes == planes[0].run_bytes && plane.run_count == planes[0].run_count;
  });
}

bool all_wide(const std::vector<Plane>& planes) {
  return std::all_of(planes.begin(), planes.end(),
                     [](const Plane& plane) { return plane.run_bytes % kWideBytes == 0; });
}

size_t extent_bytes(const PagedLayout& layout, const Plane& plane) {
  return (layout.num_blocks() - 1) * plane.block_stride + (plane.run_count - 1) * plane.run_stride + plane.run_bytes;
}

std::vector<PlaneArgs> describe_planes(const PagedLayout& layout) {
  std::vector<PlaneArgs> all;
  for (size_t i = 0; i < layout.planes().size(); ++i) {
    const Plane& plane = layout.planes()[i];
    PlaneArgs args{};
    args.base = plane.base;
    args.block_stride = plane.block_stride;
    args.run_stride = plane.run_stride;
    args.before_units = uint32_t(layout.bytes_before(i) / kUnitBytes);
    args.block_units = uint32_t(plane.block_bytes() / kUnitBytes);
    args.run_units = uint32_t(plane.run_bytes / kUnitBytes);
    args.by_block = divisor(args.block_units);
    args.by_run = divisor(args.run_units);
    all.push_back(args);
  }
  return all;
}

// `hashed`: by the CPU too.
void check_call(const PagedLayout& layout, std::span<const Part> parts, bool hashed) {
  check_parts(layout, parts);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "part " + std::to_string(i) + ": ";
    const size_t blocks = parts[i].block_ids.size(), bytes = blocks * layout.block_bytes();
    if (bytes / kUnitBytes >= kMostUnits || (blocks + 32) * sizeof(int32_t) > kBatchRingBytes)
      refuse(name + "blocks", (long long)(blocks), "less than 32 GiB and at most 500000");
    const auto range = find_range(parts[i].slot, bytes);
    if (bytes != 0 && !range)
      refuse(name + "slot address", (long long)(parts[i].slot), "memory pinned for copies, in one piece");
    if (bytes != 0 && hashed && range->place == Place::device)
      refuse(name + "slot address", (long long)(parts[i].slot), "host memory, where the CPU hashes the rest of a load");
  }
}

void check_bands(const PagedLayout& layout, const Bands& bands) {
  size_t before = 0;
  for (const size_t end : bands.ends) {
    if (end <= before || end > layout.planes().size())
      refuse("end of a band (planes)", (long long)(end),
             std::to_string(before + 1) + ".." + std::to_string(layout.planes().size()));
    before = end;
  }
  if (!bands.ends.empty() && before != layout.planes().size())
    refuse("end of the last band (planes)", (long long)(before), std::to_string(layout.planes().size()));
  if (bands.verified_after > bands.ends.size())
    refuse("verified_after (bands)", (long long)(bands.verified_after), "at most " + std::to_string(bands.ends.size()));
}

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

}  // namespace

DeviceLayout::DeviceLayout(Device& device, const PagedLayout& paged, const OwnedStream& uploads)
    : layout(paged),
      alike(all_alike(paged.planes())),
      wide(all_wide(paged.planes())),
      planes(device, paged.planes().size() * sizeof(PlaneArgs), Place::device) {
  if (paged.block_bytes() / kUnitBytes >= kMostUnits)
    refuse("block bytes", (long long)(paged.block_bytes()), "less than 32 GiB");
  const ContextGuard current(device);
  for (const Plane& plane : paged.planes()) require_on_device(device, plane.base, extent_bytes(paged, plane));
  const auto described = describe_planes(paged);
  check(driver().cuMemcpyHtoDAsync_v2(planes.address(), described.data(), described.size() * sizeof(PlaneArgs),
                                      uploads.get()),
        "upload of a layout");
  check(driver().cuStreamSynchronize(uploads.get()), "upload of a layout");
}

Copier::Copier(int device, const Tuning& tuning)
    : device_(Device::get(device)),
      tuning_(checked(tuning)),
      ring_host_(device_, kRingBytes, Place::host),
      ring_device_(device_, kRingBytes, Place::device),
      staging_(device_, staging_bytes(), Place::device),
      uploads_(make_stream(device_)),
      transfers_(make_stream(device_)),
      kernels_(make_stream(device_)),
      shared_(std::make_shared<Copy::Shared>(device_)),
      ring_(std::make_unique<DescriptorRing>(kRingBytes)) {
  for (size_t i = 0; i < size_t(tuning_.buffers); ++i)
    buffers_.push_back({staging_.address() + i * tuning_.piece_bytes, make_event(device_), make_event(device_)});
  ended_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (ended_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  submitter_ = std::thread([this] { run_submitter(); });
  finisher_ = std::thread([this] { run_finisher(); });
}

Copier::~Copier() {
  close();
  if (ended_fd_ >= 0) ::close(ended_fd_);
}

int Copier::ended_fd() const { return ended_fd_; }

bool Copier::closed() const {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return closed_;
}

void Copier::close() {
  {
    const std::lock_guard<std::mutex> guard(shared_->mutex);
    closed_ = true;
    to_submit_.notify_one();
  }
  if (submitter_.joinable()) submitter_.join();
  if (finisher_.joinable()) finisher_.join();
  for (std::thread& hasher : hashers_) hasher.join();
  hashers_.clear();
}

// ------------------------------------------------------------------ a call

size_t Copier::add_layout(const PagedLayout& layout) {
  const OwnedStream uploads = make_stream(device_);
  auto added = std::make_unique<DeviceLayout>(device_, layout, uploads);
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  layouts_.push_back(std::move(added));
  return layouts_.size() - 1;
}

const DeviceLayout& Copier::layout_at(size_t number) {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  if (number >= layouts_.size()) refuse("layout", (long long)(number), "less than " + std::to_string(layouts_.size()));
  return *layouts_[number];
}

std::shared_ptr<Copy> Copier::gather(size_t layout, std::span<const Part> parts, const uintptr_t* after) {
  return enqueue(layout, parts, true, after, {});
}

std::shared_ptr<Copy> Copier::scatter(size_t layout, std::span<const Part> parts, const uintptr_t* after,
                                      const Bands& bands) {
  return enqueue(layout, parts, false, after, bands);
}

std::vector<std::unique_ptr<Copier::Batch>> Copier::make_batches(const DeviceLayout& blocks_at,
                                                                 std::span<const Part> parts, bool store,
                                                                 std::span<const size_t> bands) const {
  const PagedLayout& layout = blocks_at.layout;
  uint64_t call_bytes = 0;
  for (const Part& part : parts) call_bytes += part.block_ids.size() * layout.block_bytes();
  const bool small = call_bytes <= (store ? tuning_.direct_store_bytes : tuning_.direct_load_bytes);
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<uint32_t> begins(parts.size(), 0);
  for (size_t band = 0; band < bands.size(); ++band) {
    bool fresh = true;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto range = find_range(parts[i].slot, parts[i].block_ids.size() * layout.block_bytes());
      const bool direct = small || (range && range->place == Place::device);
      const bool fits =
          !fresh && batches.back()->direct == direct &&
          batches.back()->ring_bytes() + sizeof(PartArgs) + 16 + 4 * parts[i].block_ids.size() <= kBatchRingBytes;
      if (!fits) {
        batches.push_back(std::make_unique<Batch>());
        batches.back()->layout = &blocks_at;
        batches.back()->first_result = i;
        batches.back()->band = band;
        batches.back()->store = store;
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
  const auto piece_stripes = uint32_t(tuning_.piece_bytes / kStripeBytes);
  for (const auto& batch : batches) {
    if (batch->direct && batch->stripes != 0) batch->pieces = {{0, batch->stripes}};
    else batch->pieces = cut_into_pieces(batch->stripes, piece_stripes, store);
  }
  return batches;
}

std::shared_ptr<Copy> Copier::enqueue(size_t number, std::span<const Part> parts, bool store, const uintptr_t* after,
                                      const Bands& bands) {
  const DeviceLayout& layout = layout_at(number);
  check_call(layout.layout, parts, bands.verified_after > 0);
  check_bands(layout.layout, bands);
  const size_t all[] = {layout.layout.planes().size()};
  const std::span<const size_t> ends = bands.ends.empty() ? all : bands.ends;
  auto batches = make_batches(layout, parts, store, ends);
  auto copy = std::make_shared<Copy>();
  copy->shared_ = shared_;
  copy->sums_.resize(parts.size());
  if (batches.empty()) return copy;
  copy->bands_.resize(ends.size());
  uint32_t most_stripes = 0;
  for (const auto& batch : batches)
    for (const PartArgs& part : batch->parts) most_stripes = std::max(most_stripes, part.begin + part.stripes);
  device_.keys(most_stripes);

  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (closed_)
    throw Refused(Refusal::copy, "copier: found closed, wanted open", std::string("closed"), std::string("open"));
  if (bands.verified_after > 0) start_hashers();
  if (after != nullptr) {
    const ContextGuard current(device_);
    copy->after_ = take_event();
    cuda::check(driver().cuEventRecord(copy->after_, reinterpret_cast<Stream>(*after)), "cuEventRecord");
  }
  copy->copier_ = this;
  copy->batches_left_ = batches.size();
  if (bands.verified_after > 0) hash_the_rest(copy, layout.layout, parts, bands);
  for (auto& batch : batches) {
    batch->copy = copy;
    copy->first_batches_left_ += batch->band < bands.verified_after;
    backlog_.push_back(std::move(batch));
  }
  // Behind other batches, or beside a thread that submits, there is no hurry.
  if (backlog_.size() == batches.size() && can_advance()) advance(lock, kCallsPieces);
  if (!backlog_.empty()) to_submit_.notify_one();
  return copy;
}

// ------------------------------------------------------------------ threads

bool Copier::can_advance() {
  if (submitting_ || backlog_.empty()) return false;
  Batch& front = *backlog_.front();
  if (!front.has_ring) front.has_ring = ring_->take(front.ring_bytes(), &front.ring_begin);
  return front.has_ring;
}

void Copier::advance(std::unique_lock<std::mutex>& lock, size_t most_pieces) {
  submitting_ = true;
  Batch& front = *backlog_.front();
  try {
    if (front.done == nullptr) {
      front.uploaded = take_event();
      front.done = take_event();
    }
    lock.unlock();
    const ContextGuard current(device_);
    submit(front, most_pieces);
  } catch (const Refused& refused) {
    front.error = refused.what();
    wait_for_streams();  // what was enqueued must not outlive the copy's end
  }
  if (!lock.owns_lock()) lock.lock();
  submitting_ = false;
  if (!front.error.empty() || front.next_piece == front.pieces.size()) {
    Copy& copy = *front.copy;
    if (front.ends_band) {
      copy.bands_[front.band] = front.done;
      ++copy.bands_submitted_;
    }
    in_flight_.push_back(std::move(backlog_.front()));
    backlog_.pop_front();
    to_finish_.notify_one();
    shared_->changed.notify_all();
  }
  if (!backlog_.empty()) to_submit_.notify_one();
}

void Copier::run_submitter() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    to_submit_.wait(lock, [&] { return can_advance() || (closed_ && backlog_.empty()); });
    if (backlog_.empty()) break;
    advance(lock, SIZE_MAX);
  }
  drained_ = true;
  to_finish_.notify_one();
  to_hash_.notify_all();
}

void Copier::run_finisher() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the usual 50 us would be most of a small copy
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    to_finish_.wait(lock, [&] { return !in_flight_.empty() || drained_; });
    if (in_flight_.empty()) return;
    Batch& batch = *in_flight_.front();
    lock.unlock();
    try {
      if (batch.error.empty()) wait_for_end(batch);
    } catch (const Refused& refused) {
      batch.error = refused.what();
    }
    lock.lock();
    const auto ended = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (ended->copy->batches_left_ == 1) let_go_of_slots(lock, *ended->copy);
    finish(*ended);
    to_submit_.notify_one();  // the ring has room
    shared_->changed.notify_all();
  }
}

// Sleeps for as long as the bytes need at the least, then looks often: an event that interrupts would tell
// later (0.1 to 0.4 ms in a virtual machine), and spinning would take a core from the engine.
void Copier::wait_for_end(const Batch& batch) {
  using std::chrono::nanoseconds;
  const ContextGuard current(device_);
  if (!batch.direct) std::this_thread::sleep_for(nanoseconds(batch.bytes() / kFastestBytesPerNs));
  nanoseconds pause = kFirstLook;
  while (true) {
    const Result result = driver().cuEventQuery(batch.done);
    if (result != kNotReady) return cuda::check(result, "the copy");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 5 / 4, kLastLook);
  }
}

void Copier::wait_for_streams() {
  try {
    const ContextGuard current(device_);
    for (const OwnedStream* stream : {&uploads_, &transfers_, &kernels_}) driver().cuStreamSynchronize(stream->get());
  } catch (const Refused&) {  // no context: nothing runs in it
  }
}

void Copier::finish(Batch& batch) {
  Copy& copy = *batch.copy;
  if (batch.error.empty()) {
    const auto* sums = reinterpret_cast<const uint64_t*>(ring_host_.host() + batch.ring_begin);
    for (size_t i = 0; i < batch.parts.size(); ++i) {
      const unsigned __int128 total = sums[2 * i] + ((unsigned __int128)(sums[2 * i + 1]) << 32);
      const auto moved = uint64_t(total % kPrime);
      uint64_t& sum = copy.sums_[batch.first_result + i];
      sum = add_mod_p(sum, moved);
      if (batch.band >= copy.verified_after_) continue;
      uint64_t& verified = copy.verified_sums_[batch.first_result + i];
      verified = add_mod_p(verified, moved);
    }
  } else if (copy.error_.empty()) {
    copy.error_ = batch.error;
  }
  ring_->give_back(batch.ring_begin + batch.ring_bytes());
  if (batch.uploaded != nullptr) idle_events_.push_back(batch.uploaded);
  if (batch.done != nullptr) idle_events_.push_back(batch.done);
  if (batch.ends_band) copy.bands_[batch.band] = nullptr;  // it is over, and its event may serve another copy
  if (batch.band < copy.verified_after_) --copy.first_batches_left_;
  if (--copy.batches_left_ > 0) return;
  if (copy.after_ != nullptr) idle_events_.push_back(copy.after_);
  copy.after_ = nullptr;
  const uint64_t one = 1;
  if (::write(ended_fd_, &one, sizeof one) < 0) return;  // a full counter is readable all the same
}

Event Copier::take_event() {
  if (idle_events_.empty()) {
    all_events_.push_back(make_event(device_));
    return all_events_.back().get();
  }
  const Event event = idle_events_.back();
  idle_events_.pop_back();
  return event;
}

}  // namespace kvdock::cuda
