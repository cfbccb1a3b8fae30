// The end of copies: the finisher thread waits for the GPU, reads the sums and wakes waiters.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/errors.h"
#include "copy/checksum.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

namespace {

constexpr uint64_t kFastestBytesPerNs = 64;  // PCIe 5.0 x16 carries at most 63 GB/s
constexpr std::chrono::nanoseconds kFirstLook{10'000}, kLastLook{200'000};

}  // namespace

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

// Sleeps for as long as the bytes need at the least, then asks often: an interrupt would come later (by 0.1 to 0.4 ms
// in a virtual machine), and spinning would take a core from the engine.
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

void Copier::wait_for_streams() {
  for (const OwnedStream* stream : {&uploads_, &transfers_, &kernels_})
    unless_gone(device_, [&](const Calls& cu) { cu->cuStreamSynchronize(stream->get()); });
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
    const auto* sums = reinterpret_cast<const uint64_t*>(ring_host_.host() + batch.ring_begin);
    for (size_t i = 0; i < batch.parts.size(); ++i) {
      const unsigned __int128 total = sums[2 * i] + ((unsigned __int128)(sums[2 * i + 1]) << 32);
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
  ring_->give_back(batch.ring_begin + batch.ring_bytes());
  if (batch.uploaded != nullptr) idle_events_.push_back(batch.uploaded);
  if (batch.done != nullptr) idle_events_.push_back(batch.done);
  if (batch.ends_band) copy.bands_[batch.band] = nullptr;  // it has ended, and its event may serve another copy
  if (batch.band < copy.verified_after_) --copy.first_batches_left_;
  if (--copy.batches_left_ > 0) return;
  if (copy.error_.empty()) note_time(copy, batch.done);
  if (copy.after_ != nullptr) idle_events_.push_back(copy.after_);
  copy.after_ = nullptr;
  const uint64_t one = 1;
  if (::write(ended_fd_, &one, sizeof one) < 0) return;  // a full counter is readable all the same
}

}  // namespace kvdock::cuda
