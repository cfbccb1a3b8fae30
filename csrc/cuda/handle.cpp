// Copy: what the caller of a Copier holds.
#include <chrono>

#include "base/errors.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

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

std::optional<double> Copy::took_s() const {
  const std::lock_guard<std::mutex> guard(shared_->mutex);
  return took_s_;
}

void Copy::order(uintptr_t stream, std::optional<size_t> which) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (bands_.empty()) return;  // a copy of nothing
  const size_t band = which.value_or(bands_.size() - 1);
  if (band >= bands_.size()) refuse(Refusal::copy, "band", band, "less than " + std::to_string(bands_.size()));
  while (bands_submitted_ <= band) {
    if (copier_->can_advance()) copier_->advance(lock, SIZE_MAX);
    else shared_->changed.wait(lock);
  }
  if (bands_[band] == nullptr) return;  // it has ended
  const ContextGuard cu(shared_->device);
  refuse_captured(cu, reinterpret_cast<Stream>(stream));
  check(cu->cuStreamWaitEvent(reinterpret_cast<Stream>(stream), bands_[band], 0), "cuStreamWaitEvent");
}

}  // namespace kvdock::cuda
