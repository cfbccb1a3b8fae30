#include "cuda/copier.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <system_error>

#include "base/errors.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

constexpr size_t kCallsPieces = 1;  // that a call submits itself: enough to start the GPU

Tuning checked(const Tuning& tuning) {
  const auto require = [](bool holds, const char* name, auto found, const char* wanted) {
    if (!holds) refuse(Refusal::copy, name, found, wanted);
  };
  require(tuning.buffers >= 2 && tuning.buffers <= 8, "staging buffers", tuning.buffers, "2..8");
  require(tuning.piece_bytes >= (1u << 20) && tuning.piece_bytes % kChecksumStripeBytes == 0, "piece_bytes",
          tuning.piece_bytes, "at least 1 MiB, a multiple of 4096");
  for (const int ctas : {tuning.load_ctas, tuning.store_ctas, tuning.direct_ctas})
    require(ctas >= 1 && ctas <= 1024, "thread blocks", ctas, "1..1024");
  require(tuning.hash_threads >= 1 && tuning.hash_threads <= 64, "hash threads", tuning.hash_threads, "1..64");
  return tuning;
}

}  // namespace

Copier::Copier(int device, const Tuning& tuning)
    : device_(Device::get(device)),
      tuning_(checked(tuning)),
      ring_host_(device_, kRingBytes, MemoryKind::host),
      ring_device_(device_, kRingBytes, MemoryKind::device),
      staging_(device_, staging_bytes(), MemoryKind::device),
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

size_t Copier::add_layout(const PagedLayout& layout, size_t part_blocks) {
  auto added = std::make_unique<DeviceLayout>(device_, layout, part_blocks);
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  layouts_.push_back(std::move(added));
  return layouts_.size() - 1;
}

const DeviceLayout& Copier::layout_at(size_t number) {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  const size_t count = layouts_.size();
  if (number >= count) refuse(Refusal::copy, "layout", number, "less than " + std::to_string(count));
  return *layouts_[number];
}

std::shared_ptr<Copy> Copier::copy(size_t number, std::span<const Part> parts, Direction direction,
                                   std::optional<uintptr_t> after, const Bands& bands) {
  const DeviceLayout& layout = layout_at(number);
  check_call(layout, parts, bands);
  const size_t all[] = {layout.layout.planes().size()};
  const std::span<const size_t> ends = bands.ends.empty() ? all : bands.ends;
  auto batches = make_batches(layout, parts, direction, ends);
  auto copy = std::make_shared<Copy>();
  copy->shared_ = shared_;
  copy->sums_.resize(parts.size());
  if (batches.empty()) return copy;
  copy->bands_.resize(ends.size());

  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (closed_) refuse(Refusal::copy, "copier", "closed", "open");
  if (bands.verified_after > 0) start_hashers();
  if (after) {
    const ContextGuard cu(device_);
    refuse_captured(cu, reinterpret_cast<Stream>(*after));
    copy->after_ = take_event();
    check(cu->cuEventRecord(copy->after_, reinterpret_cast<Stream>(*after)), "cuEventRecord");
  }
  copy->copier_ = this;
  copy->batches_left_ = batches.size();
  if (bands.verified_after > 0) hash_the_rest(copy, layout.layout, parts, bands);
  for (auto& batch : batches) {
    batch->copy = copy;
    copy->first_batches_left_ += batch->band < bands.verified_after;
    backlog_.push_back(std::move(batch));
  }
  // Behind other batches, or while another thread submits, the GPU has work already.
  if (backlog_.size() == batches.size() && can_advance()) advance(lock, kCallsPieces);
  if (!backlog_.empty()) to_submit_.notify_one();
  return copy;
}

Event Copier::take_event() {
  if (idle_events_.empty()) {
    all_events_.push_back(make_event(device_, kEventWithTime));
    return all_events_.back().get();
  }
  const Event event = idle_events_.back();
  idle_events_.pop_back();
  return event;
}

}  // namespace kvdock::cuda
