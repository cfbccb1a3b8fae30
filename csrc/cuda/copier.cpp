#include "cuda/copier.h"

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/errors.h"
#include "copy/checksum.h"

namespace kvdock::cuda {

namespace {

constexpr size_t kCallsPieces = 1;  // pieces that a call submits itself: enough to start the GPU
constexpr uint64_t kFastestBytesPerNs = 64;  // PCIe 5.0 x16 carries at most 63 GB/s
constexpr std::chrono::nanoseconds kFirstLook{10'000}, kLastLook{200'000};

Tuning checked(const Tuning& tuning) {
  const auto require = [](bool holds, const char* name, auto found, const char* wanted) {
    if (!holds) refuse(Refusal::copy, name, found, wanted);
  };
  require(tuning.buffers >= 1 && tuning.buffers <= 8, "staging buffers", tuning.buffers, "1..8");
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
      pipeline_(device_, tuning_),
      shared_(std::make_shared<Copy::Shared>(device_)),
      events_(device_),
      hashers_(*shared_, tuning_.hash_threads) {
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
  hashers_.join();
}

// ------------------------------------------------------------------ a call

size_t Copier::add_layout(const PagedLayout& layout, size_t part_blocks, const std::optional<Packed>& pack) {
  auto added = std::make_unique<DeviceLayout>(device_, layout, part_blocks, pack);
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  if (pack) pipeline_.make_room_to_pack();
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
  const size_t verified_after = bands.verified_after;
  const size_t least_bytes = verified_after == 0 ? tuning_.least_band_bytes : 0;
  const auto joined = join_bands(layout.layout, blocks_of(parts), ends, least_bytes);
  auto batches = layout.packing ? make_packed_batches(tuning_, layout, parts, direction, joined)
                                : make_batches(tuning_, layout, parts, direction, joined);
  auto copy = std::make_shared<Copy>();
  copy->shared_ = shared_;
  copy->sums_.resize(parts.size());
  copy->fit_.resize(parts.size(), true);
  if (batches.empty()) return copy;
  for (const JoinedBands& one : joined) copy->bands_.resize(one.last + 1, {nullptr, one.last});

  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (closed_) refuse(Refusal::copy, "copier", "closed", "open");
  if (verified_after > 0) hashers_.start();
  if (after) {
    const ContextGuard cu(device_);
    refuse_captured(cu, reinterpret_cast<Stream>(*after));
    copy->after_ = events_.take();
    check(cu->cuEventRecord(copy->after_, reinterpret_cast<Stream>(*after)), "cuEventRecord");
  }
  copy->copier_ = this;
  copy->batches_left_ = batches.size();
  if (verified_after > 0) hashers_.hash_the_rest(copy, layout, parts, bands);
  for (auto& batch : batches) {
    batch->copy = copy;
    batch->after = copy->after_;
    copy->first_batches_left_ += batch->band < verified_after;
    queue_.push(std::move(batch));
  }
  // If other batches are waiting, or another thread submits, the GPU has work already.
  if (queue_.backlog() == batches.size() && can_advance()) advance(lock, kCallsPieces);
  if (queue_.backlog() > 0) to_submit_.notify_one();
  return copy;
}

// ------------------------------------------------------------------ submission

void Copier::advance(std::unique_lock<std::mutex>& lock, size_t most_pieces) {
  Batch& front = queue_.start_submitting();
  try {
    if (front.done == nullptr) {
      front.uploaded = events_.take();
      front.done = events_.take();
    }
    lock.unlock();
    const ContextGuard cu(device_);
    pipeline_.submit(cu, front, most_pieces);
  } catch (const Refused& refused) {
    front.error = refused.what();
    pipeline_.wait_for_streams();  // the GPU's work must not outlast the copy
  }
  if (!lock.owns_lock()) lock.lock();
  queue_.stop_submitting();
  if (!front.error.empty() || front.next_piece == front.pieces.size()) {
    Copy& copy = *front.copy;
    if (front.ends_band) {
      for (size_t band = front.first_band; band <= front.band; ++band) copy.bands_[band].done = front.done;
      copy.bands_submitted_ = front.band + 1;
    }
    queue_.submitted_front();
    to_finish_.notify_one();
    shared_->changed.notify_all();
  }
  if (queue_.backlog() > 0) to_submit_.notify_one();
}

void Copier::run_submitter() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    to_submit_.wait(lock, [&] { return can_advance() || (closed_ && queue_.backlog() == 0); });
    if (queue_.backlog() == 0) break;
    advance(lock, SIZE_MAX);
  }
  drained_ = true;
  to_finish_.notify_one();
  hashers_.stop();
}

// ------------------------------------------------------------------ the end of copies

void Copier::run_finisher() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the default, 50 us, is longer than a small copy takes
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    to_finish_.wait(lock, [&] { return queue_.has_in_flight() || drained_; });
    if (!queue_.has_in_flight()) return;
    Batch& batch = queue_.first_in_flight();
    lock.unlock();
    try {
      if (batch.error.empty()) wait_for_end(batch);
    } catch (const Refused& refused) {
      batch.error = refused.what();
    }
    lock.lock();
    const auto ended = queue_.take_first_in_flight();
    if (ended->copy->batches_left_ == 1) hashers_.release_slots(lock, *ended->copy);
    finish(*ended);
    to_submit_.notify_one();  // the ring has free memory now
    shared_->changed.notify_all();
  }
}

// Sleeps for the least time that the bytes need, then polls often: an interrupt would come later (by 0.1 to 0.4 ms in a
// virtual machine), and spinning would take a core from the engine.
void Copier::wait_for_end(const Batch& batch) {
  using std::chrono::nanoseconds;
  const ContextGuard cu(device_);
  if (!batch.direct) std::this_thread::sleep_for(nanoseconds(batch.bytes() / kFastestBytesPerNs));
  nanoseconds pause = kFirstLook;
  while (true) {
    const Result result = cu->cuEventQuery(batch.done);
    if (result != kNotReady) return cuda::check(result, "the copy");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 5 / 4, kLastLook);
  }
}

void Copier::note_time(Copy& copy, Event done) {
  if (copy.after_ == nullptr) {
    copy.took_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - copy.called_).count();
    return;
  }
  float ms = 0;
  unless_gone(device_, [&](const Calls& cu) {
    if (cu->cuEventElapsedTime(&ms, copy.after_, done) == kSuccess) copy.took_s_ = ms / 1e3;
  });
}

void Copier::finish(Batch& batch) {
  Copy& copy = *batch.copy;
  if (batch.error.empty()) {
    const uint64_t* sums = pipeline_.sums_of(batch);
    for (size_t i = 0; i < batch.count(); ++i, sums += batch.sums_each()) {
      if (!batch.packed.empty() && sums[2] > (batch.direction == Direction::gather ? batch.packed[i].pool : 0))
        copy.fit_[batch.first_result + i] = false;
      const unsigned __int128 total = sums[0] + ((unsigned __int128)(sums[1]) << 32);
      const auto moved = uint64_t(total % kChecksumPrime);
      uint64_t& sum = copy.sums_[batch.first_result + i];
      sum = add_mod_p(sum, moved);
      if (batch.band >= copy.verified_after_) continue;
      uint64_t& verified = copy.verified_sums_[batch.first_result + i];
      verified = add_mod_p(verified, moved);
    }
  } else if (copy.error_.empty()) {
    copy.error_ = batch.error;
  }
  queue_.free_descriptors(batch);
  if (batch.uploaded != nullptr) events_.give_back(batch.uploaded);
  if (batch.done != nullptr) events_.give_back(batch.done);
  if (batch.ends_band)  // its bands have ended, and another copy may use their event
    for (size_t band = batch.first_band; band <= batch.band; ++band) copy.bands_[band].done = nullptr;
  if (batch.band < copy.verified_after_) --copy.first_batches_left_;
  if (--copy.batches_left_ > 0) return;
  if (copy.error_.empty()) note_time(copy, batch.done);
  if (copy.after_ != nullptr) events_.give_back(copy.after_);
  copy.after_ = nullptr;
  const uint64_t one = 1;
  if (::write(ended_fd_, &one, sizeof one) < 0) return;  // the counter is full, so it is readable all the same
}

// ------------------------------------------------------------------ what the caller holds

bool Copy::done() const {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return batches_left_ == 0;
}

template <typename Condition>
bool Copy::wait_until(double timeout_s, Condition holds) const {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (timeout_s < 0) {
    shared_->changed.wait(lock, holds);
    return true;
  }
  return shared_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), holds);
}

bool Copy::wait(double timeout_s) const {
  return wait_until(timeout_s, [&] { return batches_left_ == 0; });
}

bool Copy::is_verified() const {
  return batches_left_ == 0 || (verified_after_ > 0 && first_batches_left_ == 0 && hashes_left_ == 0);
}

bool Copy::wait_verified(double timeout_s) const {
  return wait_until(timeout_s, [&] { return is_verified(); });
}

std::vector<uint64_t> Copy::verified_checksums() const {
  wait_verified(-1);
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  if (!error_.empty()) throw Refused(Refusal::cuda, error_, "a failed copy", "a copy");
  return batches_left_ == 0 ? sums_ : verified_sums_;
}

std::vector<uint64_t> Copy::checksums() const {
  wait(-1);
  return verified_checksums();
}

std::vector<bool> Copy::fit() const {
  verified_checksums();
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return fit_;
}

std::optional<double> Copy::took_s() const {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return took_s_;
}

size_t Copy::order(uintptr_t stream, std::optional<size_t> which) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (bands_.empty()) return which.value_or(0);  // a copy of nothing
  const size_t band = which.value_or(bands_.size() - 1);
  if (band >= bands_.size()) refuse(Refusal::copy, "band", band, "less than " + std::to_string(bands_.size()));
  while (bands_submitted_ <= band) {
    if (copier_->can_advance()) copier_->advance(lock, SIZE_MAX);
    else shared_->changed.wait(lock);
  }
  if (bands_[band].done == nullptr) return bands_[band].last;  // the band has ended
  const ContextGuard cu(shared_->device);
  refuse_captured(cu, reinterpret_cast<Stream>(stream));
  check(cu->cuStreamWaitEvent(reinterpret_cast<Stream>(stream), bands_[band].done, 0), "cuStreamWaitEvent");
  return bands_[band].last;
}

}  // namespace kvdock::cuda
