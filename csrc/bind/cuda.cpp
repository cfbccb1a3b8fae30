// Bindings of csrc/cuda. The module imports on a machine without a GPU; opening one there throws the reason.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bind/parts.h"
#include "bind/bind.h"
#include "cuda/copier.h"
#include "cuda/kernel_image.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;
using cuda::Copier;
using cuda::Copy;
using cuda::Device;
using cuda::MemoryKind;
using Nogil = py::call_guard<py::gil_scoped_release>;

using Timeout = std::optional<double>;
double or_forever(Timeout timeout_s) { return timeout_s ? std::max(*timeout_s, 0.0) : -1.0; }

MemoryKind kind_of(bool host) { return host ? MemoryKind::host : MemoryKind::device; }

std::shared_ptr<Copy> scatter(Copier& self, size_t layout, const py::buffer& slots, const py::buffer& block_ids,
                              const py::buffer& starts, const py::buffer& skips, std::optional<uintptr_t> after,
                              const std::vector<size_t>& bands, size_t verified_after) {
  const PartBuffers call(slots, block_ids, starts, skips);
  const py::gil_scoped_release released;
  return self.copy(layout, call.parts, Direction::scatter, after, {bands, verified_after});
}

std::shared_ptr<Copy> gather(Copier& self, size_t layout, const py::buffer& slots, const py::buffer& block_ids,
                             const py::buffer& starts, std::optional<uintptr_t> after) {
  const PartBuffers call(slots, block_ids, starts);
  const py::gil_scoped_release released;
  return self.copy(layout, call.parts, Direction::gather, after, {});
}

void bind_memory(py::module_& m) {
  py::class_<cuda::SlotMemory>(m, "CudaSlotMemory")
      .def(py::init([](int device, uintptr_t address, size_t bytes, bool host) {
        return std::make_unique<cuda::SlotMemory>(Device::get(device), address, bytes, kind_of(host));
      }), py::kw_only(), "device"_a, "address"_a, "bytes"_a, "host"_a, Nogil())
      .def("close", &cuda::SlotMemory::close, Nogil());
  py::class_<cuda::Buffer>(m, "CudaBuffer")
      .def(py::init([](int device, size_t bytes, bool host) {
        return std::make_unique<cuda::Buffer>(Device::get(device), bytes, kind_of(host), cuda::MemoryUse::slots);
      }), py::kw_only(), "device"_a, "bytes"_a, "host"_a, Nogil())
      .def_property_readonly("address", &cuda::Buffer::address)
      .def_property_readonly("bytes", &cuda::Buffer::bytes);
  py::class_<cuda::Stopwatch>(m, "CudaStopwatch")
      .def(py::init([](int device) { return std::make_unique<cuda::Stopwatch>(Device::get(device)); }), py::kw_only(),
           "device"_a, Nogil())
      .def_property_readonly("stream", &cuda::Stopwatch::stream)
      .def("start", &cuda::Stopwatch::start, Nogil())
      .def("stop_ms", &cuda::Stopwatch::stop_ms, Nogil())
      .def("copy", [](cuda::Stopwatch& self, uintptr_t to, uintptr_t from, size_t bytes, bool to_device) {
        self.copy(to, from, bytes, to_device ? Direction::scatter : Direction::gather);
      }, "to"_a, "from_"_a, "bytes"_a, py::kw_only(), "to_device"_a, Nogil())
      .def("fill", &cuda::Stopwatch::fill, "address"_a, "value"_a, "bytes"_a, Nogil());
}

void bind_copier(py::module_& m) {
  py::class_<Copy, std::shared_ptr<Copy>>(m, "CudaCopy")
      .def("done", &Copy::done)
      .def("wait", [](const Copy& self, Timeout limit) { return self.wait(or_forever(limit)); },
           "timeout_s"_a = py::none(), Nogil())
      .def("wait_verified", [](const Copy& self, Timeout limit) { return self.wait_verified(or_forever(limit)); },
           "timeout_s"_a = py::none(), Nogil())
      .def("order", &Copy::order, "stream"_a, "band"_a = py::none(), Nogil())
      .def("checksums", &Copy::checksums, Nogil())
      .def("took_s", &Copy::took_s)
      .def("verified_checksums", &Copy::verified_checksums, Nogil());
  py::class_<Copier>(m, "CudaCopier")
      .def(py::init([](int device, size_t piece_bytes, int buffers, int load_ctas, int store_ctas, int direct_ctas,
                       size_t direct_load_bytes, size_t direct_store_bytes, int hash_threads) {
        return std::make_unique<Copier>(device, cuda::Tuning{piece_bytes, buffers, load_ctas, store_ctas, direct_ctas,
                                                             direct_load_bytes, direct_store_bytes, hash_threads});
      }), py::kw_only(), "device"_a, "piece_bytes"_a, "buffers"_a, "load_ctas"_a, "store_ctas"_a, "direct_ctas"_a,
          "direct_load_bytes"_a, "direct_store_bytes"_a, "hash_threads"_a, Nogil())
      .def("add_layout", &Copier::add_layout, "layout"_a, py::kw_only(), "part_blocks"_a, Nogil())
      .def("gather", &gather, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, py::kw_only(), "after"_a = py::none())
      .def("scatter", &scatter, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, "skips"_a, py::kw_only(),
           "after"_a = py::none(), "bands"_a = std::vector<size_t>(), "verified_after"_a = size_t(0))
      .def("fileno", &Copier::ended_fd)
      .def_property_readonly("closed", &Copier::closed)
      .def_property_readonly("staging_bytes", &Copier::staging_bytes)
      .def("close", &Copier::close, Nogil());
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
  m.def("cuda_relax_thread", &cuda::relax_thread);
  m.def("cuda_devices", &cuda::devices, Nogil());
  m.def("cuda_kernels", [] { return cuda::kKernelTargets; });
  bind_memory(m);
  bind_copier(m);
}

}  // namespace kvdock
