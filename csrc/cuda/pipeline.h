// Puts a batch on the GPU's streams: one upload, then for each piece a transfer and a kernel (for a direct copy the
// kernel alone), and one event at the end.
//
// Ownership: a Pipeline owns its streams, its staging buffers and the memory of the descriptor ring. Threads: only the
// thread that submits a batch (BatchQueue) calls submit() and wait_for_streams().
#pragma once

#include <memory>
#include <vector>

#include "cuda/batch.h"
#include "cuda/memory.h"

namespace kvdock::cuda {

// A pool of events for reuse. The Copier's mutex guards it.
class EventPool {
 public:
  explicit EventPool(Device& device) : device_(device) {}
  Event take();
  void give_back(Event event) { idle_.push_back(event); }

 private:
  Device& device_;
  std::vector<OwnedEvent> all_;
  std::vector<Event> idle_;  // the events of all_ that are not in use
};

class Pipeline {
 public:
  Pipeline(Device& device, const Tuning& tuning);

  // Puts the batch's next pieces on the streams, `most_pieces` of them at most. Throws Refused{cuda}.
  void submit(const ContextGuard& cu, Batch& batch, size_t most_pieces);
  void wait_for_streams();
  void make_room_to_pack();  // before the first batch that packs
  // The sums that the GPU has written for a batch that has ended: two for each part.
  const uint64_t* sums_of(const Batch& batch) const {
    return reinterpret_cast<const uint64_t*>(ring_host_.host() + batch.ring_begin);
  }

 private:
  // A staging buffer. Event `full`: the bytes are in it; `free`: they have been copied out. A wait for one of them
  // means its latest record before the wait.
  struct Staging {
    uintptr_t address;
    OwnedEvent full, free;
  };

  void upload(const ContextGuard& cu, Batch& batch);
  void move_piece(const ContextGuard& cu, const Batch& batch, const Piece& piece, const Staging& staging);
  void move_slots(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void launch(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void move_packed_slots(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void pack(const ContextGuard& cu, const Batch& batch, const Piece& piece, uintptr_t staging);
  void launch_packed(const ContextGuard& cu, const Batch& batch, const PackArgs& args, PackStep step, size_t warps);

  Device& device_;
  Tuning tuning_;
  Buffer ring_host_, ring_device_, staging_;
  OwnedStream uploads_, transfers_, kernels_;
  std::vector<Staging> buffers_;
  size_t next_buffer_ = 0;
  std::unique_ptr<const PackMemory> pack_memory_;
};

}  // namespace kvdock::cuda
