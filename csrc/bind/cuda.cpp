// Bindings of csrc/cuda. The module can be imported on a machine without a GPU. Opening a GPU there throws an error
// that says why there is none.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bind/parts.h"
#include "bind/bind.h"
#include "copy/checksum.h"
#include "cuda/batch.h"
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

std::vector<size_t> batch_pieces(size_t bytes, size_t piece_bytes, bool is_load, bool shrinks) {
  std::vector<size_t> made;
  const auto stripes = uint32_t(stripes_of(bytes)), most = uint32_t(piece_bytes / kChecksumStripeBytes);
  const Direction direction = is_load ? Direction::scatter : Direction::gather;
  for (const cuda::Piece& piece : cuda::cut_into_pieces(stripes, std::max(most, 1u), direction, shrinks))
    made.push_back((piece.last_stripe - piece.first_stripe) * kChecksumStripeBytes);
  return made;
}

std::shared_ptr<Copy> gather(Copier& self, size_t layout, const py::buffer& slots, const py::buffer& block_ids,
                             const py::buffer& starts, std::optional<uintptr_t> after) {
  const PartBuffers call(slots, block_ids, starts);
  const py::gil_scoped_release released;
  return self.copy(layout, call.parts, Direction::gather, after, {});
}

void bind_memory(py::module_& m) {
  py::class_<cuda::SlotMemory>(m, "CudaSlotMemory",
          "Lets slots lie in [address, address + bytes): registers host memory with the driver (touch its pages "
          "first), or checks that the memory is the device's. Ranges never overlap.\n\n"
          "Raises CudaError. Closing it while a copy uses the memory is undefined.")
      .def(py::init([](int device, uintptr_t address, size_t bytes, bool host) {
        return std::make_unique<cuda::SlotMemory>(Device::get(device), address, bytes, kind_of(host));
      }), py::kw_only(), "device"_a, "address"_a, "bytes"_a, "host"_a, Nogil())
      .def("close", &cuda::SlotMemory::close, Nogil());
  py::class_<cuda::Buffer>(m, "CudaBuffer",
          "Memory for slots, page-locked on the host or on the device, freed with the object.")
      .def(py::init([](int device, size_t bytes, bool host) {
        return std::make_unique<cuda::Buffer>(Device::get(device), bytes, kind_of(host), cuda::MemoryUse::slots);
      }), py::kw_only(), "device"_a, "bytes"_a, "host"_a, Nogil())
      .def_property_readonly("address", &cuda::Buffer::address)
      .def_property_readonly("bytes", &cuda::Buffer::bytes);
  py::class_<cuda::Stopwatch>(m, "CudaStopwatch",
          "A stream of its own; times the work between start and stop on it.")
      .def(py::init([](int device) { return std::make_unique<cuda::Stopwatch>(Device::get(device)); }), py::kw_only(),
           "device"_a, Nogil())
      .def_property_readonly("stream", &cuda::Stopwatch::stream)
      .def("start", &cuda::Stopwatch::start, Nogil())
      .def("stop_ms", &cuda::Stopwatch::stop_ms, Nogil(), "Waits for the stream.")
      .def("copy", [](cuda::Stopwatch& self, uintptr_t to, uintptr_t from, size_t bytes, bool to_device) {
        self.copy(to, from, bytes, to_device ? Direction::scatter : Direction::gather);
      }, "to"_a, "from_"_a, "bytes"_a, py::kw_only(), "to_device"_a, Nogil(),
         "One plain asynchronous copy between host and device on the stream.")
      .def("fill", &cuda::Stopwatch::fill, "address"_a, "value"_a, "bytes"_a, Nogil());
}

void bind_copier(py::module_& m) {
  py::class_<Copy, std::shared_ptr<Copy>>(m, "CudaCopy")
      .def("done", &Copy::done)
      .def("wait", [](const Copy& self, Timeout limit) { return self.wait(or_forever(limit)); },
           "timeout_s"_a = py::none(), Nogil())
      .def("wait_verified", [](const Copy& self, Timeout limit) { return self.wait_verified(or_forever(limit)); },
           "timeout_s"_a = py::none(), Nogil())
      .def("order", &Copy::order, "stream"_a, "band"_a = py::none(), Nogil(),
           "Returns the last band after which later work on the stream runs.")
      .def("checksums", &Copy::checksums, Nogil(), "Waits; one for each part. Raises CudaError when the copy failed.")
      .def("fit", &Copy::fit, Nogil(),
           "Waits until the copy is verified; of packed parts: whether each fits (gather), or is a packed part of the "
           "shape (scatter).")
      .def("took_s", &Copy::took_s)
      .def("verified_checksums", &Copy::verified_checksums, Nogil(),
           "Like checksums(), once the copy is verified: of the bytes copied by then, and of the others in the slots.");
  py::class_<Copier>(m, "CudaCopier",
          "Copies by block id between slots and the paged blocks of layouts (device addresses), which share staging, "
          "streams and order. Copies name a layout by the number that add_layout() gave it.\n\n"
          "`after`: a stream (CUstream as an integer, 0: the legacy default stream) whose work so far comes first; "
          "None: nothing comes first. Raises CudaError (device, memory; blocks that are not in the device's memory), "
          "CopyError (a slot outside CudaSlotMemory, a part longer than its layout's `part_blocks`, …).")
      .def(py::init([](int device, size_t piece_bytes, int buffers, int load_ctas, int store_ctas, int direct_ctas,
                       size_t direct_load_bytes, size_t direct_store_bytes, int hash_threads,
                       size_t least_band_bytes) {
        return std::make_unique<Copier>(device, cuda::Tuning{piece_bytes, buffers, load_ctas, store_ctas, direct_ctas,
                                                             direct_load_bytes, direct_store_bytes, hash_threads,
                                                             least_band_bytes});
      }), py::kw_only(), "device"_a, "piece_bytes"_a, "buffers"_a, "load_ctas"_a, "store_ctas"_a, "direct_ctas"_a,
          "direct_load_bytes"_a, "direct_store_bytes"_a, "hash_threads"_a, "least_band_bytes"_a, Nogil())
      .def("add_layout", [](Copier& self, const PagedLayout& layout, size_t part_blocks,
                            std::optional<std::pair<size_t, size_t>> packed) {
        std::optional<cuda::Packed> pack;
        if (packed) pack = cuda::Packed{packed->first, packed->second};
        return self.add_layout(layout, part_blocks, pack);
      }, "layout"_a, py::kw_only(), "part_blocks"_a, "packed"_a = py::none(), Nogil(),
           "`part_blocks`: of the longest part that copies will name. packed: (marks, units) of packed parts, all of "
           "which have `part_blocks` blocks; None: parts are stored as they are. Waits for the GPU.")
      .def("gather", &gather, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, py::kw_only(), "after"_a = py::none())
      .def("scatter", &scatter, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, "skips"_a, py::kw_only(),
           "after"_a = py::none(), "bands"_a = std::vector<size_t>(), "verified_after"_a = size_t(0),
           "`bands`: ascending plane indices at which each band ends; the last equals the number of planes; empty: one "
           "band. The copy is verified once `verified_after` bands have been copied and the CPU has hashed the others "
           "in the slots; 0: when it has ended.")
      .def("fileno", &Copier::ended_fd, "An eventfd that counts the copies that have ended.")
      .def_property_readonly("closed", &Copier::closed)
      .def_property_readonly("staging_bytes", &Copier::staging_bytes)
      .def("close", &Copier::close, Nogil(), "Waits for the submitted copies; later calls raise CopyError.");
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<cuda::DeviceInfo>(m, "CudaDevice")
      .def_readonly("index", &cuda::DeviceInfo::index)
      .def_readonly("name", &cuda::DeviceInfo::name)
      .def_readonly("uuid", &cuda::DeviceInfo::uuid, "32 hex digits.")
      .def_readonly("compute", &cuda::DeviceInfo::compute, "90 for sm_90.")
      .def_readonly("driver", &cuda::DeviceInfo::driver, "The CUDA version that the driver supports: 13000 for 13.0.")
      .def_readonly("multiprocessors", &cuda::DeviceInfo::multiprocessors)
      .def_readonly("memory_bytes", &cuda::DeviceInfo::memory_bytes);
  m.def("cuda_unavailable", &cuda::why_unavailable, "'' when a GPU can be used, else one sentence with the reason.");
  m.def("cuda_relax_thread", &cuda::relax_thread,
        "Puts the calling thread in the driver's relaxed capture mode, for good: the driver then allows the thread's "
        "own calls, too, while another thread captures a CUDA graph. Does nothing where this process does not use the "
        "driver. CudaError when the driver refuses.");
  m.def("cuda_devices", &cuda::devices, Nogil(), "Raises CudaError when there is no driver or GPU.");
  m.def("cuda_pieces", &batch_pieces, "bytes"_a, "piece_bytes"_a, py::kw_only(), "is_load"_a, "shrinks"_a,
        "The bytes of each piece into which a copier cuts a batch of `bytes` bytes.");
  m.def("cuda_kernels", [] { return cuda::kKernelTargets; },
        "The targets of the copy kernels, such as sm_90; empty when nvcc was missing at build time.");
  bind_memory(m);
  bind_copier(m);
}

}  // namespace kvdock
