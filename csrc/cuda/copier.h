// Copies by block id between paged KV on a GPU and slots: what copy/copy.h does, on the GPU.
//
//   staged   slots <-> staging buffers by the copy engine, staging <-> paged blocks by a kernel on a few
//            multiprocessors, each on a stream of its own; events say when a buffer is full or free
//   direct   the same kernel reads or writes the slots themselves: small transfers, and slots on the device
//
// A call is cut into batches that fit the descriptor ring, a batch into pieces that fit a staging buffer. Pieces shrink
// towards the end of a load (and grow from the start of a store), so that the last kernel, which nothing hides, is
// short. A load may be cut into bands: neighbouring planes (layers) of all parts, then the next ones. The CPU can hash
// in the slots what is still to be copied: then a load is verified while its last bands are being copied.
//
// Threads: a call checks, describes, and submits the first pieces, so that the GPU has work at once; the submitter
//   thread submits the rest; the finisher thread waits for the GPU, reads the sums and wakes waiters; hashers, which
//   the first load that needs them starts, hash in slots.
// Waiting: copy() and order() only enqueue. There are two exceptions: when the driver refuses a
//   submission, the call that made it waits for what is on the streams already; and order() waits for earlier copies to
//   end when their descriptors fill the ring. add_layout(), close(), Copy's waits and its checksums wait for the GPU.
// Ownership: a Copier owns its streams, staging and rings. A Copy is shared with its caller. Blocks and slots belong to
//   the copy until it is done.
// Invariants: nothing is enqueued before every argument was checked. Copies of one Copier end in order of submission.
//   Neither copy() nor order() touches a stream on which a CUDA graph is being captured: they throw Refused{cuda}.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "copy/copy.h"
#include "cuda/device.h"
#include "cuda/device_layout.h"
#include "cuda/memory.h"

namespace kvdock::cuda {

// CopyTuning in kvdock/datapath/cuda.py has the usual values.
struct Tuning {
  size_t piece_bytes;
  int buffers;                                   // staging buffers of piece_bytes each
  int load_ctas, store_ctas, direct_ctas;  // CTAs (thread blocks) of a kernel
  size_t direct_load_bytes, direct_store_bytes;  // calls of up to that many bytes go direct
  int hash_threads;                              // CPU threads that verify loads before they have ended
};

// How a load is cut. `ends`: ascending plane indices at which each band ends; the last equals the number of planes;
// empty: one band. The load is verified once its first `verified_after` bands have been copied and the CPU has hashed
// the others in the slots; 0: when it has ended.
struct Bands {
  std::span<const size_t> ends;
  size_t verified_after = 0;
};

class Copier;
class DescriptorRing;
struct Piece;

// A copy under way, shared by its caller and the Copier, which it may outlive.
class Copy {
 public:
  bool done() const;
  bool wait(double timeout_s) const;  // negative: for ever. False on timeout
  // Work put on `stream` from now on runs after the copy, or after its bands up to `band`. Submits the pieces up to
  // there that are not submitted yet.
  void order(uintptr_t stream, std::optional<size_t> band);
  // Waits; each part's checksum. Throws Refused{cuda} when the copy failed.
  std::vector<uint64_t> checksums() const;
  // Seconds of the GPU's clock from the end of what comes before the copy to its own end; without anything before, from
  // the call. Nothing while it has not ended, and when it failed.
  std::optional<double> took_s() const;
  // Like wait() and checksums(), but for a verified copy: the sums cover the bytes already copied, and the others as
  // the CPU found them in the slots.
  bool wait_verified(double timeout_s) const;
  std::vector<uint64_t> verified_checksums() const;

 private:
  friend class Copier;
  struct Shared;  // mutex and condition of the Copier, which may be gone before the Copy
  bool is_verified() const;
  template <typename Condition>
  bool wait_until(double timeout_s, Condition holds) const;
  std::shared_ptr<Shared> shared_;
  Copier* copier_ = nullptr;  // valid until all of the copy is submitted
  std::vector<uint64_t> sums_;
  size_t batches_left_ = 0, bands_submitted_ = 0;
  std::vector<uint64_t> verified_sums_;
  size_t verified_after_ = 0, first_batches_left_ = 0, hashes_left_ = 0;  // first_batches: those of the first bands
  Event after_ = nullptr;     // the copier's, like those of bands_; null when not needed any more
  std::vector<Event> bands_;  // the end of each band
  std::chrono::steady_clock::time_point called_ = std::chrono::steady_clock::now();
  std::optional<double> took_s_;
  std::string error_;
};

class Copier {
 public:
  // Throws Refused{cuda} (device, memory) and Refused{copy} (tuning).
  Copier(int device, const Tuning& tuning);
  ~Copier();

  // More blocks to copy, which share staging and order with the others; returns the number by which copies name them.
  // `part_blocks`: of the longest part, for which it uploads checksum keys, so that no call has to. Waits for the GPU.
  size_t add_layout(const PagedLayout& layout, size_t part_blocks);

  // Gathers into the slots of `parts`, or scatters from them. `after`: a stream whose work so far comes first (0 is the
  // legacy stream). Bands are a scatter's.
  std::shared_ptr<Copy> copy(size_t layout, std::span<const Part> parts, Direction direction,
                             std::optional<uintptr_t> after, const Bands& bands);

  void close();  // waits for what was submitted; later calls throw Refused{copy}
  bool closed() const;
  int ended_fd() const { return ended_fd_; }  // an eventfd that counts copies that ended
  size_t staging_bytes() const { return tuning_.piece_bytes * size_t(tuning_.buffers); }

 private:
  friend class Copy;
  struct Batch;
  struct Staging;
  struct Hash {  // a share of a part that is to be hashed in its slot
    std::shared_ptr<Copy> copy;
    size_t part, bytes, first_stripe;
    uintptr_t slot;
  };

  const DeviceLayout& layout_at(size_t number);
  std::vector<std::unique_ptr<Batch>> make_batches(const DeviceLayout& layout, std::span<const Part> parts,
                                                   Direction direction, std::span<const size_t> bands) const;

  // These put work on the GPU's streams; only the thread that set `submitting_` calls them.
  void submit(const ContextGuard& cu, Batch& batch, size_t most_pieces);
  void upload(const ContextGuard& cu, Batch& batch);
  void move_piece(const ContextGuard& cu, const Batch& batch, const Piece& piece, const Staging& staging);
  void move_slots(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void launch(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void wait_for_streams();

  // These run with the mutex held; advance() releases it while it submits.
  bool can_advance();
  void advance(std::unique_lock<std::mutex>& lock, size_t most_pieces);
  void finish(Batch& batch);
  void note_time(Copy& copy, Event done);
  Event take_event();
  void start_hashers();
  void hash_the_rest(const std::shared_ptr<Copy>& copy, const PagedLayout& layout, std::span<const Part> parts,
                     const Bands& bands);
  void let_go_of_slots(std::unique_lock<std::mutex>& lock, Copy& copy);

  void run_submitter();
  void run_finisher();
  void run_hasher();
  void wait_for_end(const Batch& batch);

  Device& device_;
  Tuning tuning_;
  Buffer ring_host_, ring_device_, staging_;
  OwnedStream uploads_, transfers_, kernels_;
  std::vector<Staging> buffers_;
  size_t next_buffer_ = 0;
  int ended_fd_ = -1;

  std::shared_ptr<Copy::Shared> shared_;  // its mutex guards what follows
  std::vector<std::unique_ptr<DeviceLayout>> layouts_;
  std::unique_ptr<DescriptorRing> ring_;
  std::deque<std::unique_ptr<Batch>> backlog_, in_flight_;
  std::vector<OwnedEvent> all_events_;
  std::vector<Event> idle_events_;  // of those, the ones not in use
  bool submitting_ = false;         // a thread submits the front of the backlog: no other may
  bool closed_ = false, drained_ = false;
  std::deque<Hash> hashes_;
  std::condition_variable to_submit_, to_finish_, to_hash_;
  std::thread submitter_, finisher_;
  std::vector<std::thread> hashers_;
};

}  // namespace kvdock::cuda
