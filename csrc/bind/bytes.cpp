// Bindings of csrc/segment and csrc/copy. Shapes are checked here; the GIL is released around every call that can take
// more than a few microseconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <system_error>

#include "bind/parts.h"
#include "bind/bind.h"
#include "bind/contiguous.h"
#include "copy/bands.h"
#include "copy/checksum.h"
#include "copy/copy.h"
#include "copy/threads.h"
#include "base/decoding_cost.h"
#include "base/errors.h"
#include "segment/header.h"
#include "segment/huge_pages.h"
#include "segment/liveness.h"
#include "segment/mapping.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;
using Nogil = py::call_guard<py::gil_scoped_release>;

std::array<const py::object*, 3> g_errors;  // in the order of Refusal

void translate(std::exception_ptr failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Refused& e) {
    const py::object& type = *g_errors[int(e.kind())];
    py::object error = type(e.what());
    error.attr("found") = py::cast(e.found());
    error.attr("wanted") = py::cast(e.wanted());
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (const std::system_error& e) {
    // OSError(errno, text) picks the subclass itself: BlockingIOError, FileNotFoundError, …
    py::object error = py::reinterpret_borrow<py::object>(PyExc_OSError)(e.code().value(), e.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

int mapping_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto& mapping = py::handle(self).cast<Mapping&>();
  if (mapping.data() == nullptr) {
    PyErr_SetString(PyExc_ValueError, "the mapping is closed");
    view->obj = nullptr;
    return -1;
  }
  if (PyBuffer_FillInfo(view, self, mapping.data(), Py_ssize_t(mapping.bytes()), !mapping.writable(), flags) != 0)
    return -1;
  mapping.pin();
  return 0;
}

void mapping_releasebuffer(PyObject* self, Py_buffer*) { py::handle(self).cast<Mapping&>().unpin(); }

void close_mapping(Mapping& mapping) {
  if (mapping.pinned()) throw py::buffer_error("cannot close: buffers of this mapping are still in use");
  py::gil_scoped_release nogil;  // unmapping a populated gigabyte takes tens of milliseconds
  mapping.close();
}

void bind_mapping(py::module_& m) {
  py::class_<Mapping>(m, "Mapping",
          "A shared mapping of an open file or shared-memory object; MADV_DONTFORK; keeps no descriptor.",
          py::custom_type_setup([](PyHeapTypeObject* type) {
                        type->ht_type.tp_as_buffer = &type->as_buffer;
                        type->as_buffer.bf_getbuffer = mapping_getbuffer;
                        type->as_buffer.bf_releasebuffer = mapping_releasebuffer;
                      }))
      .def(py::init<int, size_t, bool>(), "fd"_a, "bytes"_a, py::kw_only(), "writable"_a = true)
      .def_property_readonly("address", [](const Mapping& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("bytes", &Mapping::bytes)
      .def("populate", &Mapping::populate, "offset"_a, "bytes"_a, Nogil(),
           "MADV_POPULATE_WRITE without the GIL. OSError when memory runs out; never SIGBUS.")
      .def("reaches_end", &Mapping::reaches_end, Nogil(),
           "False when the object has become shorter than the mapping: access would raise SIGBUS.")
      .def("advise_huge", &Mapping::advise_huge)
      .def("close", close_mapping);
  m.def("allocate_huge", &allocate_huge, "fd"_a, "bytes"_a, Nogil(),
        "Allocates the beginning of a new, empty object in huge pages, as far as the kernel gives them quickly. "
        "Returns how many bytes; the caller allocates what is behind.");
}

void bind_liveness(py::module_& m) {
  py::class_<MemberLock>(m, "MemberLock",
          "An open-file-description lock on one byte, kept by a mapping: it ends with the address space.")
      .def(py::init<const std::string&, int64_t, bool>(), "path"_a, "offset"_a, py::kw_only(),
           "with_children"_a = false,
           "BlockingIOError when another open file holds the byte. `with_children`: forked children keep it, too.")
      .def_property_readonly("offset", &MemberLock::offset)
      .def("close", &MemberLock::close);
  m.def("lock_holder_alive", &lock_holder_alive, "fd"_a, "offset"_a,
        "F_OFD_GETLK: True while another open file holds the byte. fd: the server's own descriptor of the lock file.");
}

void check_header_fits(const Mapping& mapping) {
  if (mapping.data() == nullptr || mapping.bytes() < kSegmentHeaderBytes)
    throw py::value_error("segment header: found a mapping of " +
                          std::to_string(mapping.data() == nullptr ? 0 : mapping.bytes()) + " bytes, wanted at least " +
                          std::to_string(kSegmentHeaderBytes));
}

void write_header(Mapping& mapping, uint64_t pool_id, uint32_t segment, uint64_t data_offset) {
  check_header_fits(mapping);
  if (!mapping.writable()) throw py::value_error("segment header: found a read-only mapping, wanted a writable one");
  if (data_offset < kSegmentHeaderBytes || data_offset % kSlotAlign != 0 || data_offset >= mapping.bytes())
    throw py::value_error("data_offset: found " + std::to_string(data_offset) + ", wanted a multiple of " +
                          std::to_string(kSlotAlign) + " within " + std::to_string(mapping.bytes()) + " bytes");
  write_segment_header(mapping.data(), mapping.bytes(), pool_id, segment, data_offset);
}

py::typing::Tuple<py::str, py::typing::Dict<py::str, py::int_>> read_header(const Mapping& mapping) {
  check_header_fits(mapping);
  SegmentHeader header;
  const HeaderState state = read_segment_header(mapping.data(), mapping.bytes(), &header);
  constexpr const char* kNames[] = {"ok", "not_ready", "wrong_version", "corrupt"};
  py::dict fields("magic"_a = header.magic, "version"_a = header.version, "pool_id"_a = header.pool_id,
                  "segment"_a = header.segment, "bytes"_a = header.bytes, "data_offset"_a = header.data_offset,
                  "crc"_a = header.crc);
  return py::make_tuple(kNames[int(state)], fields);
}

void bind_segment_header(py::module_& m) {
  m.attr("SEGMENT_VERSION") = kSegmentVersion;
  m.attr("SEGMENT_HEADER_BYTES") = kSegmentHeaderBytes;
  m.attr("HUGE_PAGE_BYTES") = kHugePage;
  m.attr("SLOT_ALIGN") = kSlotAlign;
  m.def("segment_header_write", write_header, "mapping"_a, "pool_id"_a, "segment"_a, "data_offset"_a,
        "Writes the header, version last (release).");
  m.def("segment_header_read", read_header, "mapping"_a,
        "('ok' | 'not_ready' | 'wrong_version' | 'corrupt', fields found).");
}

std::vector<uint64_t> gather_buffers(const PagedLayout& layout, const py::buffer& slots, const py::buffer& block_ids,
                                     const py::buffer& starts, int threads) {
  const PartBuffers call(slots, block_ids, starts);
  const py::gil_scoped_release released;
  return gather(layout, call.parts, threads);
}

std::vector<uint64_t> scatter_buffers(const PagedLayout& layout, const py::buffer& slots, const py::buffer& block_ids,
                                      const py::buffer& starts, const py::buffer& skips, int threads) {
  const PartBuffers call(slots, block_ids, starts, skips);
  const py::gil_scoped_release released;
  return scatter(layout, call.parts, threads);
}

void memcpy_buffers(const py::buffer& to, const py::buffer& from, size_t bytes, int threads) {
  const Integers<uint64_t> target(to, "to"), source(from, "from");
  require_entries(source, "from", target.view().size());
  const py::gil_scoped_release released;
  memcpy_pieces(target.view(), source.view(), bytes, threads);
}

uint64_t checksum_buffer(const py::buffer& data) {
  const Contiguous bytes(data);
  const py::gil_scoped_release released;
  return checksum(bytes.data(), bytes.bytes());
}

uint64_t copy_hashed_buffers(const py::buffer& to, const py::buffer& from, size_t first) {
  const Contiguous target(to, PyBUF_WRITABLE), source(from);
  if (target.bytes() != source.bytes())
    throw py::value_error("bytes to copy: found " + std::to_string(source.bytes()) + " for a memory of " +
                          std::to_string(target.bytes()) + ", wanted as many");
  const py::gil_scoped_release released;
  return copy_hashed(source.data(), target.data(), source.bytes(), first);
}

uint64_t share_of_checksum_buffer(const py::buffer& data, size_t first) {
  const Contiguous bytes(data);
  const py::gil_scoped_release released;
  return share_of_checksum(bytes.data(), bytes.bytes(), first);
}

using PlacedPart = std::tuple<uintptr_t, size_t, uint64_t>;  // address, bytes, checksum

// A byte for each part: std::vector<bool> must not be written by several threads.
std::vector<uint8_t> match_each(const std::vector<PlacedPart>& parts, size_t workers) {
  std::vector<uint8_t> match(parts.size());
  size_t most_bytes = 0;
  for (const PlacedPart& part : parts) most_bytes = std::max(most_bytes, std::get<1>(part));
  const auto keys = checksum_keys(stripes_of(most_bytes));  // throws here, not in a thread of run_parallel
  run_parallel(parts.size(), workers, [&](size_t i) {
    const auto& [address, bytes, wanted] = parts[i];
    match[i] = checksum(reinterpret_cast<const char*>(address), bytes) == wanted;
  });
  return match;
}

std::vector<bool> checksums_match(const std::vector<PlacedPart>& parts, size_t threads) {
  const std::vector<uint8_t> match = match_each(parts, std::max<size_t>(threads, 1));
  return {match.begin(), match.end()};
}

bool decoding_within(const py::buffer& data, uint64_t limit, bool packed) {
  const Contiguous bytes(data);
  const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
  return (packed ? packed_costs_within : json_costs_within)(begin, begin + bytes.bytes(), limit);
}

void set_keys(const py::bytes& nh, const py::bytes& level2) {
  const std::string_view first(nh), second(level2);
  if (first.size() != 2 * kChecksumStripeBytes || second.size() % 32 != 0)
    throw py::value_error("checksum keys: found " + std::to_string(first.size()) + " and " +
                          std::to_string(second.size()) + " bytes, wanted " + std::to_string(2 * kChecksumStripeBytes) +
                          " and a multiple of 32");
  const py::gil_scoped_release released;
  set_checksum_keys(first.data(), second.data(), second.size() / 32);
}

// Refuses a negative number of a layout by its name, instead of letting it wrap around.
size_t natural(long long value, const char* name) {
  if (value < 0) refuse(Refusal::layout, name, value, "at least 0");
  return size_t(value);
}

using PlaneTuple = std::tuple<uint64_t, long long, long long, long long, long long>;

PagedLayout make_layout(const std::vector<PlaneTuple>& tuples, long long num_blocks, long long block_tokens) {
  std::vector<Plane> planes;
  for (const auto& [base, block_stride, run_bytes, run_count, run_stride] : tuples)
    planes.push_back({uintptr_t(base), natural(block_stride, "block stride"), natural(run_bytes, "run bytes"),
                      natural(run_count, "run count"), natural(run_stride, "run stride")});
  return PagedLayout(std::move(planes), natural(num_blocks, "num_blocks"), natural(block_tokens, "block_tokens"));
}

std::vector<std::array<size_t, 3>> join_bands_of(const PagedLayout& layout, size_t blocks,
                                                 const std::vector<size_t>& ends, size_t least_bytes) {
  check_ends(layout, ends);
  std::vector<std::array<size_t, 3>> made;
  for (const JoinedBands& one : join_bands(layout, blocks, ends, least_bytes))
    made.push_back({one.first, one.last, one.end});
  return made;
}

void bind_copy(py::module_& m) {
  m.def("set_checksum_keys", set_keys, "nh"_a, "level2"_a,
        "nh: 8192 bytes (k, then k'); level2: 32 bytes a stripe. Longer tables replace shorter ones.");
  m.def("checksum", checksum_buffer, "data"_a,
        "The checksum of contiguous bytes of any length. Raises CopyError when the keys are too short for it.");
  m.def("copy_hashed", copy_hashed_buffers, "to"_a, "from_"_a, py::kw_only(), "first"_a = 0,
        "Copies all bytes of one buffer to another of that length. Returns their share of the checksum of a part in "
        "which they begin with the stripe `first`, and end with the end of a stripe or of the part. Raises CopyError "
        "when the keys are too short, ValueError when the lengths differ.");
  m.def("share_of_checksum", share_of_checksum_buffer, "data"_a, py::kw_only(), "first"_a,
        "As copy_hashed, of bytes that stay where they are. Raises CopyError when the keys are too short.");
  m.def("checksums_match", checksums_match, "parts"_a, py::kw_only(), "threads"_a = 1, Nogil(),
        "For each part (address, bytes, checksum) whether its bytes have the checksum. Addresses are not checked. "
        "Raises CopyError when the keys are too short.");
  m.def("decoding_within", decoding_within, "data"_a, "limit"_a, py::kw_only(), "packed"_a,
        "Whether it costs at most `limit` to decode the body, which is MessagePack if `packed`, else JSON: 1 for each "
        "value, 4 for each list and map, 2 for a number of eight bytes in MessagePack. Punctuation in JSON's strings "
        "counts.");
  m.def("cpu_paths", &cpu_paths,
        "Names of the copy loops this processor can run, fastest first; 'scalar' runs anywhere.");
  m.def("use_cpu_path", [](const std::string& name) {
    if (!use_cpu_path(name)) throw py::value_error("cpu path: found '" + name + "', wanted one of cpu_paths() or ''");
  }, "name"_a, "For tests and measurements: all later copies use that loop; '' goes back to the fastest.");
  py::class_<PagedLayout>(m, "PagedLayout",
          "Paged KV as strides. planes: (base address, block stride, run bytes, run count, run stride).")
      .def(py::init(&make_layout), "planes"_a, py::kw_only(), "num_blocks"_a, "block_tokens"_a)
      .def_property_readonly("block_bytes", &PagedLayout::block_bytes, "The bytes of one block, over all planes.")
      .def_property_readonly("num_blocks", &PagedLayout::num_blocks)
      .def_property_readonly("block_tokens", &PagedLayout::block_tokens);
  m.def("gather", gather_buffers, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, py::kw_only(), "threads"_a,
        "Paged → slots. slots: uint64 addresses [n]; block_ids: int64, flat; starts: int64 [n+1]. Returns each part's "
        "checksum. Refuses ids outside 0..num_blocks-1 before any byte moves.");
  m.def("scatter", scatter_buffers, "layout"_a, "slots"_a, "block_ids"_a, "starts"_a, "skips"_a, py::kw_only(),
        "threads"_a, "Slots → paged; the first skips[i] blocks of part i are hashed but never written.");
  m.def("join_bands", join_bands_of, "layout"_a, "blocks"_a, "ends"_a, "least_bytes"_a,
        "How a GPU's copier joins the bands of a load of `blocks` blocks: [first band, last band, the plane before "
        "which they end] for each batch. `ends`: for each band, the plane before which it ends. All bands but the "
        "first and the last are joined until they have `least_bytes`. Raises CopyError.");
  m.def("memcpy_pieces", memcpy_buffers, "to"_a, "from_"_a, "bytes"_a, py::kw_only(), "threads"_a,
        "The benchmark's reference: libc memcpy of pieces of equal size. to, from_: uint64 addresses [n], unchecked.");
}

}  // namespace

void bind_bytes(py::module_& m) {
  static py::exception<Refused> layout(m, "LayoutError", PyExc_ValueError), copy(m, "CopyError", PyExc_ValueError);
  static py::exception<Refused> cuda(m, "CudaError", PyExc_RuntimeError);
  g_errors = {&layout, &copy, &cuda};
  for (const py::object* error : g_errors) {
    error->attr_with_type_hint<py::object>("found") = py::none();
    error->attr_with_type_hint<py::object>("wanted") = py::none();
  }
  layout.doc() = "Strides that copies do not support; `found` and `wanted` name the values.";
  copy.doc() = "Block ids, lengths, skips or addresses outside a layout; nothing was copied.";
  cuda.doc() = "The driver refused, or there is none: `found` and `wanted` name the values.";
  py::register_local_exception_translator(translate);
  bind_mapping(m);
  bind_liveness(m);
  bind_segment_header(m);
  bind_copy(m);
}

}  // namespace kvdock
