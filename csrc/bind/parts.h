// Parts as Python passes them: flat buffers of 8-byte integers, checked here.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "copy/copy.h"
#include "base/errors.h"

namespace kvdock {

namespace py = pybind11;

// A one-dimensional, contiguous buffer of 8-byte integers; it keeps the exporting object alive.
template <class T>
class Integers {
 public:
  Integers(const py::buffer& source, const char* name) : info_(source.request()) {
    const bool integer = info_.itemsize == 8 && info_.format.find_first_of("qQlLnN") != std::string::npos;
    if (info_.ndim != 1 || !integer || (info_.size > 1 && info_.strides[0] != 8))
      refuse(Refusal::copy, name,
             "a buffer of " + std::to_string(info_.ndim) + " dimensions, format '" + info_.format + "'",
             "one contiguous dimension of 8-byte integers");
  }
  std::span<const T> view() const { return {static_cast<const T*>(info_.ptr), size_t(info_.size)}; }

 private:
  py::buffer_info info_;
};

template <class T>
void require_entries(const Integers<T>& buffer, const std::string& name, size_t wanted) {
  if (size_t found = buffer.view().size(); found != wanted)
    refuse(Refusal::copy, name + " (entries)", std::to_string(found), std::to_string(wanted));
}

// Part i gets the blocks block_ids[starts[i], starts[i + 1]) and skips the first skips[i] of them; without `skips` it
// skips none. The parts are valid as long as this object lives.
class PartBuffers {
 public:
  PartBuffers(const py::buffer& slots, const py::buffer& block_ids, const py::buffer& starts,
              const std::optional<py::buffer>& skips = std::nullopt)
      : slots_(slots, "slots"), ids_(block_ids, "block_ids"), starts_(starts, "starts") {
    const std::span<const int64_t> ids = ids_.view(), start = starts_.view();
    const size_t count = slots_.view().size();
    if (skips) require_entries(skips_.emplace(*skips, "skips"), "skips", count);
    require_entries(starts_, "starts", count + 1);
    if (start.front() != 0 || start.back() != int64_t(ids.size()))
      refuse(Refusal::copy, "starts (range)", std::to_string(start.front()) + ".." + std::to_string(start.back()),
             "0.." + std::to_string(ids.size()));
    // Checks the order of all starts before any of them is used as an index: this bounds them, as the last one is in
    // bounds.
    for (size_t i = 0; i < count; ++i)
      if (start[i] > start[i + 1])
        refuse(Refusal::copy, "starts (order)", std::to_string(start[i + 1]), "at least " + std::to_string(start[i]));
    for (size_t i = 0; i < count; ++i) {
      const int64_t skip = skips_ ? skips_->view()[i] : 0;
      if (skip < 0) refuse(Refusal::copy, "skipped blocks", std::to_string(skip), "at least 0");
      const auto own = ids.subspan(size_t(start[i]), size_t(start[i + 1] - start[i]));
      parts.push_back({uintptr_t(slots_.view()[i]), own, size_t(skip)});
    }
  }
  std::vector<Part> parts;

 private:
  Integers<uint64_t> slots_;
  Integers<int64_t> ids_, starts_;
  std::optional<Integers<int64_t>> skips_;
};

}  // namespace kvdock
