// Copy: the handle of a copy under way. Tuning and Bands: the options of a Copier and of a call.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/device.h"

namespace kvdock::cuda {

// CopyTuning in kvdock/datapath/cuda.py has the usual values.
struct Tuning {
  size_t piece_bytes;
  int buffers;                                   // staging buffers of piece_bytes each
  int load_ctas, store_ctas, direct_ctas;  // CTAs (thread blocks) of a kernel
  size_t direct_load_bytes, direct_store_bytes;  // calls of up to this many bytes are direct copies
  int hash_threads;                              // CPU threads that verify loads before they have ended
  size_t least_band_bytes;                       // smaller bands of a load are joined
};

// The bands of a load. `ends`: ascending plane indices at which each band ends; the last equals the number of planes;
// empty: one band. Bands of a load that is not verified early are joined (join_bands): who waits for one of them waits
// for all that are joined with it. The load is verified once its first `verified_after` bands have been copied and the
// CPU has hashed the others in the slots; 0: when it has ended.
struct Bands {
  std::span<const size_t> ends;
  size_t verified_after = 0;
};

class Copier;
struct Batch;

// A copy under way, shared by its caller and the Copier, which it may outlive.
class Copy {
 public:
  bool done() const;
  bool wait(double timeout_s) const;  // negative: for ever. False on timeout
  // Later work on `stream` runs after the copy, or after its bands up to `band`. Submits the pieces of these bands that
  // were not submitted yet. Returns the last band that the work runs after: the last of those that are joined with
  // `band`.
  size_t order(uintptr_t stream, std::optional<size_t> band);
  // Waits, then returns each part's checksum. Throws Refused{cuda} when the copy failed.
  std::vector<uint64_t> checksums() const;
  // Waits until the copy is verified. After a gather: false, a part needs more units of the pool than there are, and
  // its slot is of no use. After a scatter: false, a slot holds no packed part of the shape, and its blocks may hold
  // anything; of bands that are still to be copied, nothing is known.
  std::vector<bool> fit() const;
  // Seconds on the GPU's clock from the end of the work before the copy (`after`) to the copy's end; without such work,
  // from the call. nullopt until the copy has ended, and when it failed.
  std::optional<double> took_s() const;
  // Like wait() and checksums(), but they wait only until the copy is verified. The sums then cover the bytes that were
  // copied, and, for the other bytes, the content that the CPU found in the slots.
  bool wait_verified(double timeout_s) const;
  std::vector<uint64_t> verified_checksums() const;

 private:
  friend class Copier;
  friend class SlotHashers;
  struct Shared;  // mutex and condition of the Copier, which may be gone before the Copy
  bool is_verified() const;
  template <typename Condition>
  bool wait_until(double timeout_s, Condition holds) const;
  std::shared_ptr<Shared> shared_;
  Copier* copier_ = nullptr;  // valid until all pieces of the copy are submitted
  std::vector<uint64_t> sums_;
  std::vector<bool> fit_;
  size_t batches_left_ = 0, bands_submitted_ = 0;
  std::vector<uint64_t> verified_sums_;
  size_t verified_after_ = 0, first_batches_left_ = 0, hashes_left_ = 0;  // first batches: those of the first bands
  Event after_ = nullptr;     // belongs to the copier, as those of bands_ do; null once it is not needed
  struct Band {
    Event done;   // null: not submitted yet, or ended
    size_t last;  // of the bands that are joined with this one
  };
  std::vector<Band> bands_;
  std::chrono::steady_clock::time_point called_ = std::chrono::steady_clock::now();
  std::optional<double> took_s_;
  std::string error_;
};

}  // namespace kvdock::cuda
