// Parts whose bytes were found right, by their place and their checksum, and when. The oldest ones are forgotten first.
//
// Ownership: values. Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>

#include "copy/plan.h"

namespace kvdock {

class TrustedParts {
 public:
  TrustedParts(uint64_t most_bytes, size_t most_parts) : most_bytes_(most_bytes), most_parts_(most_parts) {}

  void add(const PlannedPart& part, double now_s) {
    const Place place{part.segment, part.offset, part.checksum};
    if (const auto known = known_.find(place); known != known_.end()) {
      bytes_ -= known->second->bytes;
      order_.erase(known->second);
      known_.erase(known);
    }
    order_.push_back({place, part.length, now_s});
    known_.emplace(place, std::prev(order_.end()));
    bytes_ += part.length;
    for (; bytes_ > most_bytes_ || order_.size() > most_parts_; order_.pop_front()) {
      bytes_ -= order_.front().bytes;
      known_.erase(order_.front().place);
    }
  }

  bool has(const PlannedPart& part, double since_s) const {
    const auto known = known_.find({part.segment, part.offset, part.checksum});
    return known != known_.end() && known->second->added_s > since_s;
  }

  size_t size() const { return order_.size(); }

  void clear() {
    known_.clear();
    order_.clear();
    bytes_ = 0;
  }

 private:
  struct Place {
    int64_t segment;
    uint64_t offset, checksum;
    bool operator==(const Place&) const = default;
  };
  struct PlaceHash {
    // Checksums are evenly distributed already.
    size_t operator()(const Place& place) const { return place.checksum ^ place.offset * 0x9e3779b97f4a7c15u; }
  };
  struct Entry {
    Place place;
    uint64_t bytes;
    double added_s;
  };

  uint64_t most_bytes_, bytes_ = 0;
  size_t most_parts_;
  std::list<Entry> order_;  // from the oldest to the latest
  std::unordered_map<Place, std::list<Entry>::iterator, PlaceHash> known_;
};

}  // namespace kvdock
