// Splits a copy over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "copy/cpu_paths.h"

namespace kvdock {

constexpr size_t kBytesPerThread = size_t(1) << 20;  // with fewer bytes a thread costs more than it saves

// Runs work(i) for i in [0, count) on up to `threads` threads, this one included.
template <class Work>
void run_parallel(size_t count, size_t threads, const Work& work) {
  std::atomic<size_t> next{0};
  const auto loop = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    store_fence();
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < std::min(threads, count); ++t) {
    try {
      others.emplace_back(loop);
    } catch (const std::system_error&) {
      break;  // the system has no more threads: fewer threads do the work
    }
  }
  loop();
  for (std::thread& other : others) other.join();
}

inline size_t useful_threads(size_t bytes, int threads) {
  return std::clamp<size_t>(bytes / kBytesPerThread, 1, size_t(threads));
}

}  // namespace kvdock
