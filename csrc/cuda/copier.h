// Copies between paged KV on a GPU and slots, by block id: the counterpart of copy/copy.h on the GPU.
//
//   staged   slots <-> staging buffers by the copy engine, staging <-> paged blocks by a kernel on a few
//            multiprocessors, each on a stream of its own; events say when a buffer is full or free
//   direct   the same kernel reads or writes the slots themselves: small transfers, and slots on the device
//
// A call is cut into batches that fit the descriptor ring, a batch into pieces that fit a staging buffer. Pieces become
// smaller towards the end of a load (and larger from the start of a store), because the last kernel of a load (the
// first of a store) does not overlap any transfer, so it should be short. In the batches before, pieces are as large
// as they can be, because each costs seven calls of the driver. A load may be cut into bands: neighbouring
// planes (layers) of all parts, then the next ones. The CPU can hash, in the slots, the bands that are not copied yet:
// thus a load can be verified before it has ended.
//
// Threads: a call checks its arguments, makes batches, and submits the first pieces, so that the GPU has work at once;
//   the submitter thread submits the rest; the finisher thread waits for the GPU, reads the sums and wakes waiters;
//   hashers (csrc/cuda/hashing.h) start with the first load that needs them.
// Waiting: copy() and order() only enqueue, with two exceptions: when the driver refuses a submission, the call that
//   made it waits for the work that is on the streams already; and order() waits for earlier copies to end when their
//   descriptors fill the ring. add_layout(), close(), Copy's waits and its checksums wait for the GPU.
// Ownership: a Copier owns its streams, staging and rings (csrc/cuda/pipeline.h). A Copy is shared with its caller.
//   Blocks and slots belong to the copy until it is done.
// Invariants: nothing is enqueued before every argument was checked. Copies of one Copier end in order of submission.
//   Neither copy() nor order() touches a stream on which a CUDA graph is being captured: they throw Refused{cuda}.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "copy/copy.h"
#include "cuda/device_layout.h"
#include "cuda/handle.h"
#include "cuda/hashing.h"
#include "cuda/pipeline.h"

namespace kvdock::cuda {

class Copier {
 public:
  // Throws Refused{cuda} (device, memory) and Refused{copy} (tuning).
  Copier(int device, const Tuning& tuning);
  ~Copier();

  // Adds a layout and returns its number, which copies name. The copies of all layouts share staging buffers and one
  // order. `part_blocks`: how many blocks the longest part has; checksum keys for this length are uploaded now, so that
  // no call has to. Waits for the GPU.
  // `pack`: all parts of the layout's copies have `part_blocks` blocks and are packed.
  size_t add_layout(const PagedLayout& layout, size_t part_blocks, const std::optional<Packed>& pack);

  // Gathers into the slots of `parts`, or scatters from them. `after`: a stream whose present work the copy waits for
  // (0: the legacy stream). Only a scatter has bands.
  std::shared_ptr<Copy> copy(size_t layout, std::span<const Part> parts, Direction direction,
                             std::optional<uintptr_t> after, const Bands& bands);

  void close();  // waits for the submitted copies; later calls throw Refused{copy}
  bool closed() const;
  int ended_fd() const { return ended_fd_; }  // an eventfd that counts the copies that have ended
  size_t staging_bytes() const { return tuning_.piece_bytes * size_t(tuning_.buffers); }

 private:
  friend class Copy;

  const DeviceLayout& layout_at(size_t number);

  // These run with the mutex held; advance() releases it while it submits.
  bool can_advance() { return queue_.can_advance(); }
  void advance(std::unique_lock<std::mutex>& lock, size_t most_pieces);
  void finish(Batch& batch);
  void note_time(Copy& copy, Event done);

  void run_submitter();
  void run_finisher();
  void wait_for_end(const Batch& batch);

  Device& device_;
  Tuning tuning_;
  Pipeline pipeline_;
  int ended_fd_ = -1;

  std::shared_ptr<Copy::Shared> shared_;  // its mutex guards what follows
  std::vector<std::unique_ptr<DeviceLayout>> layouts_;
  EventPool events_;
  BatchQueue queue_;
  SlotHashers hashers_;
  bool closed_ = false, drained_ = false;
  std::condition_variable to_submit_, to_finish_;
  std::thread submitter_, finisher_;
};

}  // namespace kvdock::cuda
