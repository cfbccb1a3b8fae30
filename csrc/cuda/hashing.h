// Verifying a load before it has ended: CPU threads hash, in the slots, the bytes that are still to be copied.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "cuda/batch.h"

namespace kvdock::cuda {

// The caller of every method but join() holds the Copier's mutex.
class SlotHashers {
 public:
  SlotHashers(Copy::Shared& shared, int threads) : shared_(shared), count_(threads) {}

  void start();  // starts the threads that do not run yet. Throws Refused{cuda}
  // Hashes, in the slots, the bands after the first `verified_after`.
  void hash_the_rest(const std::shared_ptr<Copy>& copy, const DeviceLayout& layout, std::span<const Part> parts,
                     const Bands& bands);
  // Waits until no thread reads the copy's slots. Hashes that have not begun are dropped.
  void release_slots(std::unique_lock<std::mutex>& lock, Copy& copy);
  void stop();  // the threads end once they have hashed all that was added
  void join();

 private:
  struct Hash {  // the stripes of a part from first_stripe to its end, in its slot
    std::shared_ptr<Copy> copy;
    size_t part, bytes, first_stripe;
    uintptr_t slot;
  };
  void run();

  Copy::Shared& shared_;
  int count_;
  std::deque<Hash> hashes_;
  bool stopped_ = false;
  std::condition_variable to_hash_;
  std::vector<std::thread> threads_;
};

}  // namespace kvdock::cuda
