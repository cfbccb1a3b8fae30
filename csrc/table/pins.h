// Pins of records, counted by session. A pin is one entry of a grant that has a holder; Pins knows no grants.
//
// Ownership: derived from the grants; a record's count lies in its RecordInfo.
// Invariants (docs/understand/lifetime_protocol.md#invariants): I2 and I7, as far as they concern pins. The bytes that
//   a session holds are counted once, however many of its grants name them.
#pragma once

#include <map>
#include <unordered_map>

#include "table/records.h"

namespace kvdock {

// The pins that the entries of all grants imply: by record, how often each session pins it. Pins::check compares.
using ImpliedPins = std::map<uint32_t, std::map<uint32_t, uint32_t>>;

class Pins {
 public:
  Pins(Records& records, SlotAllocator& slots) : records_(records), slots_(slots) {}

  void add(uint32_t id, uint32_t session);
  bool drop(uint32_t id, uint32_t session);  // returns whether it was the record's last

  bool has(uint32_t id) const { return records_.info(id).pins != 0; }
  bool has(uint32_t id, uint32_t session) const {
    const RecordInfo& in = records_.info(id);
    return in.sole == session || (in.sole == kMany && shared_.count(pair_of(session, id)));
  }
  // The session that alone pins it, or kNone.
  uint32_t only_session(uint32_t id) const {
    uint32_t sole = records_.info(id).sole;
    return sole == kMany ? kNone : sole;
  }
  uint64_t held_bytes() const { return held_bytes_; }
  uint64_t held_bytes(uint32_t session) const { return session < held_by_.size() ? held_by_[session] : 0; }

  void check(const ImpliedPins& implied) const;  // Throws TableError corrupt

 private:
  static uint64_t pair_of(uint32_t session, uint32_t id) { return uint64_t{session} << 32 | id; }
  uint64_t& held_by(uint32_t session) {
    if (session >= held_by_.size()) held_by_.resize(session + 1);
    return held_by_[session];
  }

  Records& records_;
  SlotAllocator& slots_;
  std::unordered_map<uint64_t, uint32_t> shared_;  // pins by pair_of(), for records that several sessions pin
  std::vector<uint64_t> held_by_;                  // by session cell: bytes that it pins
  uint64_t held_bytes_ = 0;
};

}  // namespace kvdock
