// Adoption in Python: which segments a region names, and a table over what an earlier server left.
#include <pybind11/stl.h>

#include "bind/table.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using Facts = std::tuple<uint32_t, uint64_t, uint64_t>;  // id, data offset, data bytes

py::dict counts(const Adoption& found) {
  py::dict out;
  out["clock_ms"] = found.clock_ms;
  out["chunks"] = found.chunks;
  out["dropped"] = found.dropped;
  out["aborted"] = found.aborted;
  out["replaced"] = found.replaced;
  out["leases"] = found.leases;
  out["reservations"] = found.reservations;
  out["sessions"] = found.sessions;
  out["members"] = found.members;
  return out;
}

TableOptions identity(uint64_t pool_id, uint64_t lock_inode) {
  return {pool_id, lock_inode, 0, 0, 0, 0, 0, 0, 0, 0, 0};
}

py::tuple adopt(py::object region, uint64_t pool_id, uint64_t lock_inode, const std::vector<Facts>& segments,
                uint64_t limit_bytes, uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms, double session_cap,
                double total_cap) {
  Mapping& mapping = region.cast<Mapping&>();
  TableOptions options = identity(pool_id, lock_inode);
  options.limit_bytes = limit_bytes;
  options.ask_ms = ask_ms, options.settle_ms = settle_ms, options.suspect_ms = suspect_ms;
  options.session_cap = session_cap, options.total_cap = total_cap;
  std::vector<SegmentFacts> facts;
  for (auto& [id, offset, bytes] : segments) facts.push_back({id, kSegmentLive, offset, bytes});
  Adoption found;
  std::unique_ptr<Table> table;
  {
    py::gil_scoped_release nogil;
    auto* bytes = reinterpret_cast<uint8_t*>(mapping.data());
    table = std::make_unique<Table>(bytes, mapping.bytes(), options, facts, &found);
  }
  return py::make_tuple(BoundTable{std::move(region), std::move(table)}, counts(found));
}

}  // namespace

void bind_adoption(py::class_<BoundTable>& c) {
  c.def_static("adopt", &adopt, py::arg("region"), py::kw_only(), py::arg("pool_id"), py::arg("lock_inode"),
               py::arg("segments"), py::arg("limit_bytes"), py::arg("ask_ms") = 60'000, py::arg("settle_ms") = 3'000,
               py::arg("suspect_ms") = 6'000, py::arg("session_cap") = 0.25, py::arg("total_cap") = 0.75)
      .def_static(
          "stored_segments",
          [](const Mapping& mapping, uint64_t pool_id, uint64_t lock_inode) {
            std::vector<std::tuple<uint32_t, std::string, uint64_t, uint64_t>> out;
            constexpr const char* states[] = {"", "live", "retiring", "gone"};
            for (const SegmentFacts& s : Table::stored_segments(reinterpret_cast<uint8_t*>(mapping.data()),
                                                                mapping.bytes(), identity(pool_id, lock_inode)))
              out.emplace_back(s.segment, states[s.state], s.data_offset, s.data_bytes);
            return out;
          },
          py::arg("region"), py::kw_only(), py::arg("pool_id"), py::arg("lock_inode"))
      .def_property_readonly("incarnation", [](const BoundTable& t) { return t.table->incarnation(); })
      .def_property_readonly("first_incarnation", [](const BoundTable& t) { return t.table->first_incarnation(); });
}

}  // namespace kvdock
