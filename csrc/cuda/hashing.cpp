#include "cuda/hashing.h"

#include <system_error>

#include "base/errors.h"
#include "copy/checksum.h"

namespace kvdock::cuda {

void SlotHashers::start() try {
  while (threads_.size() < size_t(count_)) threads_.emplace_back([this] { run(); });
} catch (const std::system_error& error) {
  throw Refused(Refusal::cuda, std::string("hash threads: ") + error.what(), (long long)(threads_.size()),
                (long long)(count_));
}

void SlotHashers::hash_the_rest(const std::shared_ptr<Copy>& copy, const DeviceLayout& of,
                                std::span<const Part> parts, const Bands& bands) {
  copy->verified_after_ = bands.verified_after;
  copy->verified_sums_.resize(parts.size());
  const size_t plane = bands.ends[bands.verified_after - 1];  // the first that the CPU hashes
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t blocks = parts[i].block_ids.size();
    const size_t bytes = of.packing ? of.packing->shape().packed_bytes() : of.layout.block_bytes() * blocks;
    const size_t first_stripe =
        of.packing ? of.packing->stripes_before(plane) : stripes_of(of.layout.bytes_before(plane) * blocks);
    if (first_stripe < stripes_of(bytes)) hashes_.push_back({copy, i, bytes, first_stripe, parts[i].slot});
    copy->hashes_left_ += first_stripe < stripes_of(bytes);
  }
  to_hash_.notify_all();
}

// Called when all bytes have been copied: the GPU's sums are complete, so the remaining hashes are not needed.
void SlotHashers::release_slots(std::unique_lock<std::mutex>& lock, Copy& copy) {
  if (copy.hashes_left_ == 0) return;
  copy.verified_after_ = 0;
  copy.hashes_left_ -= std::erase_if(hashes_, [&](const Hash& hash) { return hash.copy.get() == &copy; });
  shared_.changed.wait(lock, [&] { return copy.hashes_left_ == 0; });
}

void SlotHashers::stop() {
  stopped_ = true;
  to_hash_.notify_all();
}

void SlotHashers::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void SlotHashers::run() {
  std::unique_lock<std::mutex> lock(shared_.mutex);
  while (true) {
    to_hash_.wait(lock, [&] { return !hashes_.empty() || stopped_; });
    if (hashes_.empty()) return;
    const Hash hash = std::move(hashes_.front());
    hashes_.pop_front();
    lock.unlock();
    const uint64_t found = checksum(reinterpret_cast<const char*>(hash.slot), hash.bytes, hash.first_stripe);
    lock.lock();
    uint64_t& sum = hash.copy->verified_sums_[hash.part];
    sum = add_mod_p(sum, found);
    if (--hash.copy->hashes_left_ == 0) shared_.changed.notify_all();
  }
}

}  // namespace kvdock::cuda
