// Verifying a load before it has ended: the CPU hashes, in the slots, the bytes that are still to be copied.
#include <deque>
#include <system_error>

#include "copy/checksum.h"
#include "base/errors.h"
#include "cuda/batch.h"

namespace kvdock::cuda {

// These run with the mutex held, except run_hasher().
void Copier::start_hashers() try {
  while (hashers_.size() < size_t(tuning_.hash_threads)) hashers_.emplace_back([this] { run_hasher(); });
} catch (const std::system_error& error) {
  throw Refused(Refusal::cuda, std::string("hash threads: ") + error.what(), (long long)(hashers_.size()),
                (long long)(tuning_.hash_threads));
}

void Copier::hash_the_rest(const std::shared_ptr<Copy>& copy, const PagedLayout& layout, std::span<const Part> parts,
                           const Bands& bands) {
  copy->verified_after_ = bands.verified_after;
  copy->verified_sums_.resize(parts.size());
  const size_t first_planes = layout.bytes_before(bands.ends[bands.verified_after - 1]);
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t blocks = parts[i].block_ids.size(), bytes = layout.block_bytes() * blocks;
    const size_t first_stripe = stripes_of(first_planes * blocks);
    if (first_stripe < stripes_of(bytes)) hashes_.push_back({copy, i, bytes, first_stripe, parts[i].slot});
    copy->hashes_left_ += first_stripe < stripes_of(bytes);
  }
  to_hash_.notify_all();
}

// A copy whose bytes have all been copied has all its sums: hashes that have not begun are dropped, those under way are
// waited for.
void Copier::let_go_of_slots(std::unique_lock<std::mutex>& lock, Copy& copy) {
  if (copy.hashes_left_ == 0) return;
  copy.verified_after_ = 0;
  copy.hashes_left_ -= std::erase_if(hashes_, [&](const Hash& hash) { return hash.copy.get() == &copy; });
  shared_->changed.wait(lock, [&] { return copy.hashes_left_ == 0; });
}

void Copier::run_hasher() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  while (true) {
    to_hash_.wait(lock, [&] { return !hashes_.empty() || drained_; });
    if (hashes_.empty()) return;
    const Hash hash = std::move(hashes_.front());
    hashes_.pop_front();
    lock.unlock();
    const uint64_t found = checksum(reinterpret_cast<const char*>(hash.slot), hash.bytes, hash.first_stripe);
    lock.lock();
    uint64_t& sum = hash.copy->verified_sums_[hash.part];
    sum = add_mod_p(sum, found);
    if (--hash.copy->hashes_left_ == 0) shared_->changed.notify_all();
  }
}

}  // namespace kvdock::cuda
