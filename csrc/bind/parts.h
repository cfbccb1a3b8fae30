// Parts as Python passes them: flat buffers of 8-byte integers, checked here.
#pragma once

#include <pybind11/pybind11.h>

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
      refuse(name, "a buffer of " + std::to_string(info_.ndim) + " dimensions, format '" + info_.format + "'",
             "one contiguous dimension of 8-byte integers");
  }
  std::span<const T> view() const { return {static_cast<const T*>(info_.ptr), size_t(info_.size)}; }
  [[noreturn]] static void refuse(const std::string& name, const std::string& found, const std::string& wanted) {
    throw Refused(Refusal::copy, name + ": found " + found + ", wanted " + wanted, found, wanted);
  }

 private:
  py::buffer_info info_;
};

inline void require(bool holds, const char* name, const std::string& found, const std::string& wanted) {
  if (!holds) Integers<int64_t>::refuse(name, found, wanted);
}

// Part i takes block_ids[starts[i], starts[i + 1]) and skips[i].
inline std::vector<Part> parts_of(std::span<const uint64_t> slots, std::span<const int64_t> ids,
                                  std::span<const int64_t> starts, std::span<const int64_t> skips) {
  require(starts.size() == slots.size() + 1, "starts (entries)", std::to_string(starts.size()),
          std::to_string(slots.size() + 1));
  require(starts.front() == 0 && starts.back() == int64_t(ids.size()), "starts (range)",
          std::to_string(starts.front()) + ".." + std::to_string(starts.back()), "0.." + std::to_string(ids.size()));
  std::vector<Part> parts;
  for (size_t i = 0; i < slots.size(); ++i) {
    require(starts[i] <= starts[i + 1], "starts (order)", std::to_string(starts[i + 1]),
            "at least " + std::to_string(starts[i]));
    const int64_t skip = skips.empty() ? 0 : skips[i];
    require(skip >= 0, "skipped blocks", std::to_string(skip), "at least 0");
    const auto own = ids.subspan(size_t(starts[i]), size_t(starts[i + 1] - starts[i]));
    parts.push_back({uintptr_t(slots[i]), own, size_t(skip)});
  }
  return parts;
}

}  // namespace kvdock
