// Bindings of csrc/cuda. The module imports on a machine without a GPU; opening one there throws the reason.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bind/parts.h"
#include "bind/bind.h"
#include "cuda/copier.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using cuda::Device;
using cuda::MemoryKind;

using Timeout = std::optional<double>;
double or_forever(Timeout timeout_s) { return timeout_s ? std::max(*timeout_s, 0.0) : -1.0; }

MemoryKind kind_of(bool host) { return host ? MemoryKind::host : MemoryKind::device; }

std::shared_ptr<cuda::Copy> scatter(cuda::Copier& self, size_t layout, const py::buffer& slots,
                                    const py::buffer& block_ids, const py::buffer& starts, const py::buffer& skips,
                                    std::optional<uintptr_t> after, const std::vector<size_t>& bands,
                                    size_t verified_after) {
  const Integers<uint64_t> slot(slots, "slots");
  const Integers<int64_t> ids(block_ids, "block_ids"), start(starts, "starts"), skip(skips, "skips");
  require(skip.view().size() == slot.view().size(), "skips (entries)", std::to_string(skip.view().size()),
          std::to_string(slot.view().size()));
  const auto parts = parts_of(slot.view(), ids.view(), start.view(), skip.view());
  const py::gil_scoped_release released;
  return self.scatter(layout, parts, after ? &*after : nullptr, {bands, verified_after});
}

std::shared_ptr<cuda::Copy> gather(cuda::Copier& self, size_t layout, const py::buffer& slots,
                                   const py::buffer& block_ids, const py::buffer& starts,
                                   std::optional<uintptr_t> after) {
  const Integers<uint64_t> slot(slots, "slots");
  const Integers<int64_t> ids(block_ids, "block_ids"), start(starts, "starts");
  const auto parts = parts_of(slot.view(), ids.view(), start.view(), {});
  const py::gil_scoped_release released;
  return self.gather(layout, parts, after ? &*after : nullptr);
}

void bind_memory(py::module_& m) {
  using Nogil = py::call_guard<py::gil_scoped_release>;
  py::class_<cuda::SlotMemory>(m, "CudaSlotMemory")
      .def(py::init([](int device, uintptr_t address, size_t bytes, bool host) {
             return std::make_unique<cuda::SlotMemory>(Device::get(device), address, bytes, kind_of(host));
           }),
           py::kw_only(), py::arg("device"), py::arg("address"), py::arg("bytes"), py::arg("host"), Nogil())
      .def("close", &cuda::SlotMemory::close, Nogil());
  py::class_<cuda::Buffer>(m, "CudaBuffer")
      .def(py::init([](int device, size_t bytes, bool host) {
             return std::make_unique<cuda::Buffer>(Device::get(device), bytes, kind_of(host), cuda::MemoryUse::slots);
           }),
           py::kw_only(), py::arg("device"), py::arg("bytes"), py::arg("host"), Nogil())
      .def_property_readonly("address", &cuda::Buffer::address)
      .def_property_readonly("bytes", &cuda::Buffer::bytes);
  py::class_<cuda::Stopwatch>(m, "CudaStopwatch")
      .def(py::init([](int device) { return std::make_unique<cuda::Stopwatch>(Device::get(device)); }), py::kw_only(),
           py::arg("device"), Nogil())
      .def_property_readonly("stream", &cuda::Stopwatch::stream)
      .def("start", &cuda::Stopwatch::start, Nogil())
      .def("stop_ms", &cuda::Stopwatch::stop_ms, Nogil())
      .def(
          "copy",
          [](cuda::Stopwatch& self, uintptr_t to, uintptr_t from, size_t bytes, bool to_device) {
            self.copy(to, from, bytes, to_device ? Direction::scatter : Direction::gather);
          },
          py::arg("to"), py::arg("from_"), py::arg("bytes"), py::kw_only(), py::arg("to_device"), Nogil())
      .def("fill", &cuda::Stopwatch::fill, py::arg("address"), py::arg("value"), py::arg("bytes"), Nogil());
}

void bind_copier(py::module_& m) {
  using Nogil = py::call_guard<py::gil_scoped_release>;
  py::class_<cuda::Copy, std::shared_ptr<cuda::Copy>>(m, "CudaCopy")
      .def("done", &cuda::Copy::done)
      .def(
          "wait", [](const cuda::Copy& self, Timeout timeout_s) { return self.wait(or_forever(timeout_s)); },
          py::arg("timeout_s") = py::none(), Nogil())
      .def(
          "wait_verified",
          [](const cuda::Copy& self, Timeout timeout_s) { return self.wait_verified(or_forever(timeout_s)); },
          py::arg("timeout_s") = py::none(), Nogil())
      .def("order", &cuda::Copy::order, py::arg("stream"), py::arg("band") = py::none(), Nogil())
      .def("checksums", &cuda::Copy::checksums, Nogil())
      .def("verified_checksums", &cuda::Copy::verified_checksums, Nogil());
  py::class_<cuda::Copier>(m, "CudaCopier")
      .def(py::init([](int device, size_t piece_bytes, int buffers, int load_ctas, int store_ctas,
                       int direct_ctas, size_t direct_load_bytes, size_t direct_store_bytes, int hash_threads) {
             return std::make_unique<cuda::Copier>(
                 device, cuda::Tuning{piece_bytes, buffers, load_ctas, store_ctas, direct_ctas, direct_load_bytes,
                                      direct_store_bytes, hash_threads});
           }),
           py::kw_only(), py::arg("device"), py::arg("piece_bytes"), py::arg("buffers"), py::arg("load_ctas"),
           py::arg("store_ctas"), py::arg("direct_ctas"), py::arg("direct_load_bytes"),
           py::arg("direct_store_bytes"), py::arg("hash_threads"), Nogil())
      .def("add_layout", &cuda::Copier::add_layout, py::arg("layout"), py::kw_only(), py::arg("part_blocks"), Nogil())
      .def("gather", &gather, py::arg("layout"), py::arg("slots"), py::arg("block_ids"), py::arg("starts"),
           py::kw_only(), py::arg("after") = py::none())
      .def("scatter", &scatter, py::arg("layout"), py::arg("slots"), py::arg("block_ids"), py::arg("starts"),
           py::arg("skips"), py::kw_only(), py::arg("after") = py::none(), py::arg("bands") = std::vector<size_t>(),
           py::arg("verified_after") = size_t(0))
      .def("fileno", &cuda::Copier::ended_fd)
      .def_property_readonly("closed", &cuda::Copier::closed)
      .def_property_readonly("staging_bytes", &cuda::Copier::staging_bytes)
      .def("close", &cuda::Copier::close, Nogil());
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<cuda::DeviceInfo>(m, "CudaDevice")
      .def_readonly("index", &cuda::DeviceInfo::index)
      .def_readonly("name", &cuda::DeviceInfo::name)
      .def_readonly("uuid", &cuda::DeviceInfo::uuid)
      .def_readonly("compute", &cuda::DeviceInfo::compute)
      .def_readonly("driver", &cuda::DeviceInfo::driver)
      .def_readonly("multiprocessors", &cuda::DeviceInfo::multiprocessors)
      .def_readonly("memory_bytes", &cuda::DeviceInfo::memory_bytes);
  m.def("cuda_unavailable", &cuda::why_unavailable);
  m.def("cuda_devices", &cuda::devices, py::call_guard<py::gil_scoped_release>());
  m.def("cuda_kernels", &cuda::kernel_targets);
  bind_memory(m);
  bind_copier(m);
}

}  // namespace kvdock
