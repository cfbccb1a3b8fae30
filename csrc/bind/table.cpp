// The chunk table in Python: bytes become keys, errors become TableError, and each long call releases the GIL.
#include <pybind11/stl.h>

#include <span>

#include "bind/bind.h"
#include "bind/part_codec.h"
#include "bind/table.h"
#include "table/table.h"

namespace py = pybind11;

namespace kvdock {

namespace {

using Unlocked = py::gil_scoped_release;

std::vector<Key> keys_of(const py::bytes& raw) {
  std::string_view v = raw;
  if (v.size() % kKeyBytes)
    throw TableError("bad_argument", "keys are 32 bytes each", int64_t(v.size()), "a multiple of 32");
  std::vector<Key> out(v.size() / kKeyBytes);
  std::memcpy(out.data(), v.data(), v.size());
  return out;
}

Key key_of(const py::bytes& raw) {
  std::string_view v = raw;
  if (v.size() != kKeyBytes) throw TableError("bad_argument", "a key is 32 bytes", int64_t(v.size()), kKeyBytes);
  Key k;
  std::memcpy(k.bytes, v.data(), kKeyBytes);
  return k;
}

Key parent_of(const py::bytes& raw) { return std::string_view(raw).empty() ? Key{} : key_of(raw); }

Id16 id_of(const py::bytes& raw) {
  std::string_view v = raw;
  if (v.size() != kIdBytes) throw TableError("bad_argument", "an id is 16 bytes", int64_t(v.size()), kIdBytes);
  Id16 id;
  std::memcpy(id.bytes, v.data(), kIdBytes);
  return id;
}

py::bytes raw(const Id16& id) { return py::bytes(reinterpret_cast<const char*>(id.bytes), kIdBytes); }
py::bytes raw(const Key& key) { return py::bytes(reinterpret_cast<const char*>(key.bytes), kKeyBytes); }

py::object value(const Value& v) {
  if (auto* i = std::get_if<long long>(&v)) return py::int_(*i);
  if (auto* s = std::get_if<std::string>(&v)) return py::str(*s);
  return py::none();
}

const char* name_of(Limit limit) {
  constexpr const char* names[] = {"", "held_bytes", "no_space", "pinning"};
  return names[static_cast<size_t>(limit)];
}

py::tuple granted(const PartAt& p) { return py::make_tuple(p.group, p.writer, p.segment, p.offset, p.length); }
py::tuple stored(const PartAt& p) {
  return py::make_tuple(p.group, p.writer, p.segment, p.offset, p.length, p.checksum);
}

py::list list_of(std::span<const PartAt> parts, py::tuple (*form)(const PartAt&)) {
  py::list out(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) out[i] = form(parts[i]);
  return out;
}

uint64_t bytes_of(std::span<const PartAt> parts) {
  uint64_t sum = 0;
  for (const PartAt& p : parts) sum += p.length;
  return sum;
}

std::vector<Group> groups_of(const std::vector<std::tuple<std::string, uint32_t, uint64_t>>& specs) {
  std::vector<Group> out;
  for (const auto& [kind, window, bytes] : specs) {
    if (kind != "full" && kind != "window")
      throw TableError("bad_argument", "unknown kind of group", kind, "full or window");
    out.push_back({kind == "full" ? GroupKind::kFull : GroupKind::kWindow, window, bytes});
  }
  return out;
}

void bind_views(py::module_& m) {
  py::class_<GrantInfo>(m, "GrantView")
      .def_readonly("grant", &GrantInfo::grant)
      .def_property_readonly("kind",
                             [](const GrantInfo& g) { return g.kind == GrantKind::kLease ? "lease" : "reservation"; })
      .def_readonly("session", &GrantInfo::session)
      .def_property_readonly("request", [](const GrantInfo& g) { return raw(g.request); })
      .def_readonly("epoch", &GrantInfo::epoch)
      .def_readonly("readers", &GrantInfo::readers)
      .def_readonly("remaining", &GrantInfo::remaining)
      .def_readonly("chunks", &GrantInfo::chunks)
      .def_readonly("bytes", &GrantInfo::bytes)
      .def_readonly("opened_ms", &GrantInfo::opened_ms)
      .def_readonly("place", &GrantInfo::place)
      .def_readonly("closed", &GrantInfo::closed);
  py::class_<MemberInfo>(m, "MemberView")
      .def_readonly("member", &MemberInfo::member)
      .def_readonly("session", &MemberInfo::session)
      .def_property_readonly("nonce", [](const MemberInfo& x) { return raw(x.nonce); })
      .def_readonly("ranks", &MemberInfo::ranks)
      .def_readonly("scheduler", &MemberInfo::scheduler)
      .def_property_readonly("state", [](const MemberInfo& x) { return name_of(x.state); })
      .def_readonly("heartbeat_ms", &MemberInfo::heartbeat_ms)
      .def_readonly("lock_offset", &MemberInfo::lock_offset)
      .def_readonly("pinned_through", &MemberInfo::pinned_through);
  py::class_<SessionInfo>(m, "SessionView")
      .def_readonly("session", &SessionInfo::session)
      .def_property_readonly("nonce", [](const SessionInfo& x) { return raw(x.nonce); })
      .def_readonly("namespace", &SessionInfo::space)
      .def_readonly("leases", &SessionInfo::leases)
      .def_readonly("reservations", &SessionInfo::reservations)
      .def_readonly("held_bytes", &SessionInfo::held_bytes)
      .def_readonly("opened_ms", &SessionInfo::opened_ms);
}

void bind_results(py::module_& m) {
  py::class_<LookupResult>(m, "Lookup")
      .def_readonly("hit_tokens", &LookupResult::hit_tokens)
      .def_readonly("first_chunk", &LookupResult::first_chunk)
      .def_readonly("lease", &LookupResult::lease)
      .def_property_readonly("limited", [](const LookupResult& r) { return name_of(r.limited); })
      .def_readonly("unpinned_tokens", &LookupResult::unpinned_tokens)
      .def_property_readonly("chunk_count", [](const LookupResult& r) { return r.part_ends.size(); })
      .def(
          "bytes_from",
          [](const LookupResult& r, size_t chunk) {
            size_t at = chunk == 0 ? 0 : chunk > r.part_ends.size() ? r.parts.size() : r.part_ends[chunk - 1];
            return bytes_of(std::span(r.parts).subspan(at));
          },
          py::arg("chunk"))
      .def_property_readonly("chunks_json", [](const LookupResult& r) { return py::bytes(parts_json(r)); })
      .def_property_readonly("chunks_msgpack", [](const LookupResult& r) { return py::bytes(parts_msgpack(r)); })
      .def_property_readonly("chunks", [](const LookupResult& r) {
        py::list out(r.part_ends.size());
        for (size_t i = 0, at = 0; i < r.part_ends.size(); at = r.part_ends[i++])
          out[i] = list_of(std::span(r.parts).subspan(at, r.part_ends[i] - at), &stored);
        return out;
      });
  py::class_<ReserveResult>(m, "Reservation")
      .def_readonly("grant", &ReserveResult::grant)
      .def_readonly("present", &ReserveResult::present)
      .def_readonly("busy", &ReserveResult::busy)
      .def_property_readonly("limited", [](const ReserveResult& r) { return name_of(r.limited); })
      .def_property_readonly("chunk_count", [](const ReserveResult& r) { return r.chunks.size(); })
      .def_property_readonly("part_bytes",
                             [](const ReserveResult& r) {
                               uint64_t sum = 0;
                               for (const auto& [index, parts] : r.chunks) sum += bytes_of(parts);
                               return sum;
                             })
      .def_property_readonly("chunks_json", [](const ReserveResult& r) { return py::bytes(granted_json(r)); })
      .def_property_readonly("chunks_msgpack", [](const ReserveResult& r) { return py::bytes(granted_msgpack(r)); })
      .def_property_readonly("chunks", [](const ReserveResult& r) {
        py::list out(r.chunks.size());
        for (size_t i = 0; i < r.chunks.size(); ++i)
          out[i] = py::make_tuple(r.chunks[i].first, list_of(r.chunks[i].second, &granted));
        return out;
      });
}

// Each method: convert with the GIL, call without it.
template <class F>
auto unlocked(F&& f) {
  Unlocked nogil;
  return f();
}

void bind_pool(py::class_<BoundTable>& c) {
  c.def(
       "add_segment",
       [](BoundTable& t, uint32_t segment, uint64_t data_offset, uint64_t data_bytes) {
         unlocked([&] { t.table->add_segment(segment, data_offset, data_bytes); });
       },
       py::arg("segment"), py::arg("data_offset"), py::arg("data_bytes"))
      .def("free_bytes", [](BoundTable& t) { return unlocked([&] { return t.table->free_bytes(); }); })
      .def(
          "segment_used_bytes",
          [](BoundTable& t, uint32_t segment) {
            return unlocked([&] { return t.table->segment_used_bytes(segment); });
          },
          py::arg("segment"))
      .def(
          "evict",
          [](BoundTable& t, uint64_t target, uint32_t max_chunks) {
            return unlocked([&] { return t.table->evict(target, max_chunks); });
          },
          py::arg("target_free_bytes"), py::arg("max_chunks"))
      .def(
          "add_namespace",
          [](BoundTable& t, const py::bytes& digest, uint32_t chunk_tokens, uint32_t block_tokens, uint32_t writers,
             const std::vector<std::tuple<std::string, uint32_t, uint64_t>>& groups) {
            return t.table->add_namespace(key_of(digest), chunk_tokens, block_tokens, writers, groups_of(groups));
          },
          py::arg("digest"), py::kw_only(), py::arg("chunk_tokens"), py::arg("block_tokens"), py::arg("writers"),
          py::arg("groups"))
      .def(
          "retire_segment",
          [](BoundTable& t, uint32_t segment, uint32_t max_chunks) {
            return unlocked([&] { return t.table->retire_segment(segment, max_chunks); });
          },
          py::arg("segment"), py::arg("max_chunks"))
      .def(
          "remove_segment", [](BoundTable& t, uint32_t segment) { t.table->remove_segment(segment); },
          py::arg("segment"))
      .def("can_evict", [](BoundTable& t) { return t.table->can_evict(); })
      .def(
          "set_limits",
          [](BoundTable& t, uint64_t limit_bytes, double session_cap, double total_cap) {
            t.table->set_limits(limit_bytes, session_cap, total_cap);
          },
          py::kw_only(), py::arg("limit_bytes"), py::arg("session_cap"), py::arg("total_cap"));
}

void bind_administration(py::class_<BoundTable>& c) {
  c.def(
       "delete",
       [](BoundTable& t, uint32_t space, const py::bytes& raw_keys) {
         std::vector<Key> keys = keys_of(raw_keys);
         return unlocked([&] { return keys.empty() ? t.table->remove_all(space) : t.table->remove(space, keys); });
       },
       py::arg("namespace"), py::arg("keys"))
      .def(
          "clear",
          [](BoundTable& t, int64_t space, uint64_t start, uint32_t budget) {
            std::optional<uint32_t> only;
            if (space >= 0) only = static_cast<uint32_t>(space);
            ClearResult cleared = unlocked([&] { return t.table->clear(only, start, budget); });
            return std::pair(cleared.taken, cleared.next ? static_cast<int64_t>(*cleared.next) : -1);
          },
          py::arg("namespace"), py::arg("start"), py::arg("budget"))
      .def(
          "pin",
          [](BoundTable& t, uint32_t space, const py::bytes& raw_keys, uint64_t until) {
            std::vector<Key> keys = keys_of(raw_keys);
            return unlocked([&] { return t.table->keep_chunks(space, keys, until); });
          },
          py::arg("namespace"), py::arg("keys"), py::arg("until_ms"))
      .def(
          "state_of",
          [](BoundTable& t, uint32_t space, const py::bytes& key) { return t.table->state_of(space, key_of(key)); },
          py::arg("namespace"), py::arg("key"))
      .def("stats", [](BoundTable& t) { return unlocked([&] { return t.table->stats(); }); })
      .def("check_integrity", [](BoundTable& t) { unlocked([&] { t.table->check_integrity(); }); });
}

void bind_members(py::class_<BoundTable>& c) {
  c.def(
       "open_session",
       [](BoundTable& t, const py::bytes& nonce, uint32_t space, uint64_t now) {
         return t.table->open_session(id_of(nonce), space, now);
       },
       py::arg("nonce"), py::arg("namespace"), py::arg("now_ms"))
      .def(
          "add_member",
          [](BoundTable& t, uint64_t session, const py::bytes& nonce, const std::vector<uint32_t>& ranks,
             bool scheduler, uint64_t now, uint64_t lock_offset) {
            return t.table->add_member(session, {id_of(nonce), ranks, scheduler, lock_offset}, now);
          },
          py::arg("session"), py::arg("nonce"), py::arg("ranks"), py::arg("scheduler"), py::arg("now_ms"),
          py::arg("lock_offset") = 0)
      .def(
          "find_member",
          [](BoundTable& t, uint64_t session, const py::bytes& nonce) {
            return t.table->find_member(session, id_of(nonce));
          },
          py::arg("session"), py::arg("nonce"))
      .def(
          "heartbeat",
          [](BoundTable& t, uint64_t member, uint64_t now) {
            std::vector<std::pair<uint64_t, std::vector<uint32_t>>> out;
            for (auto& q : unlocked([&] { return t.table->heartbeat(member, now); }))
              out.emplace_back(q.grant, std::move(q.ranks));
            return out;
          },
          py::arg("member"), py::arg("now_ms"))
      .def(
          "report_pinned",
          [](BoundTable& t, uint64_t member, uint32_t through) { t.table->report_pinned(member, through); },
          py::arg("member"), py::arg("through"))
      .def(
          "member_dead",
          [](BoundTable& t, uint64_t member, uint64_t now) { unlocked([&] { t.table->member_dead(member, now); }); },
          py::arg("member"), py::arg("now_ms"))
      .def(
          "leave", [](BoundTable& t, uint64_t member) { unlocked([&] { t.table->leave(member); }); },
          py::arg("member"))
      .def(
          "tick", [](BoundTable& t, uint64_t now) { unlocked([&] { t.table->tick(now); }); }, py::arg("now_ms"));
}

void bind_lists(py::class_<BoundTable>& c) {
  c.def("sessions", [](BoundTable& t) { return unlocked([&] { return t.table->sessions(); }); })
      .def("members", [](BoundTable& t) { return unlocked([&] { return t.table->members(); }); })
      .def(
          "grants",
          [](BoundTable& t, uint64_t session, uint64_t from, size_t limit) {
            return unlocked([&] { return t.table->grants(session, from, limit); });
          },
          py::arg("session") = 0, py::kw_only(), py::arg("from_place") = 0, py::arg("limit") = SIZE_MAX)
      .def(
          "grant", [](BoundTable& t, uint64_t id) { return t.table->grant(id); }, py::arg("grant"))
      .def(
          "open_grants",
          [](BoundTable& t, uint64_t session, const py::bytes& request) {
            return t.table->open_grants(session, id_of(request));
          },
          py::arg("session"), py::arg("request"))
      .def(
          "session_namespace", [](BoundTable& t, uint64_t session) { return t.table->session_namespace(session); },
          py::arg("session"));
}

void bind_lookups(py::class_<BoundTable>& c) {
  c.def(
       "lookup",
       [](BoundTable& t, uint64_t session, uint64_t member, const py::bytes& request, uint32_t epoch,
          const py::bytes& keys, uint32_t readers, uint64_t skip_tokens, uint64_t now) {
         LookupCall call{id_of(request), epoch, keys_of(keys), readers, skip_tokens};
         return unlocked([&] { return t.table->lookup(session, member, call, now); });
       },
       py::arg("session"), py::arg("member"), py::arg("request"), py::arg("epoch"), py::arg("keys"), py::kw_only(),
       py::arg("readers"), py::arg("skip_tokens"), py::arg("now_ms"))
      .def(
          "peek",
          [](BoundTable& t, uint32_t space, const py::bytes& raw_keys) {
            std::vector<Key> keys = keys_of(raw_keys);
            return unlocked([&] { return t.table->peek(space, keys); });
          },
          py::arg("namespace"), py::arg("keys"))
      .def(
          "changes",
          [](BoundTable& t, uint32_t space, uint64_t since, size_t at_most) {
            Changes found = unlocked([&] { return t.table->changes(space, since, at_most); });
            py::list out(found.changes.size());
            for (size_t i = 0; i < found.changes.size(); ++i)
              out[i] = py::make_tuple(raw(found.changes[i].key), found.changes[i].is_there);
            return py::make_tuple(out, found.next, found.complete);
          },
          py::arg("namespace"), py::arg("since"), py::arg("at_most"))
      .def(
          "release",
          [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks) {
            return unlocked([&] { return t.table->release(session, grant, ranks); });
          },
          py::arg("session"), py::arg("grant"), py::arg("ranks"))
      .def(
          "mismatch",
          [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks) {
            return unlocked([&] { return t.table->mismatch(session, grant, chunks); });
          },
          py::arg("session"), py::arg("grant"), py::arg("chunks"));
}

void bind_stores(py::class_<BoundTable>& c) {
  c.def(
          "reserve",
          [](BoundTable& t, uint64_t session, uint64_t member, const py::bytes& store, const py::bytes& parent,
             const py::bytes& keys, uint32_t groups, bool temporary, uint64_t deadline_ms, uint64_t now) {
            ReserveCall call{id_of(store), parent_of(parent), keys_of(keys), groups, temporary, deadline_ms};
            return unlocked([&] { return t.table->reserve(session, member, call, now); });
          },
          py::arg("session"), py::arg("member"), py::arg("store"), py::arg("parent"), py::arg("keys"), py::kw_only(),
          py::arg("groups"), py::arg("temporary"), py::arg("deadline_ms"), py::arg("now_ms"))
      .def(
          "commit",
          [](BoundTable& t, uint64_t session, uint64_t grant, uint32_t rank,
             const std::vector<std::tuple<uint32_t, uint32_t, uint64_t>>& parts, uint64_t now) {
            std::vector<PartCommit> in;
            for (const auto& [index, group, sum] : parts) in.push_back({index, group, sum});
            CommitResult done = unlocked([&] { return t.table->commit(session, grant, rank, in, now); });
            return std::pair(done.ready, std::move(done.remaining));
          },
          py::arg("session"), py::arg("grant"), py::arg("rank"), py::arg("parts"), py::arg("now_ms"))
      .def(
          "abort",
          [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& ranks) {
            return unlocked([&] { return t.table->abort(session, grant, ranks); });
          },
          py::arg("session"), py::arg("grant"), py::arg("ranks"))
      .def(
          "cancel",
          [](BoundTable& t, uint64_t session, uint64_t member, uint64_t grant) {
            unlocked([&] { t.table->cancel(session, member, grant); });
          },
          py::arg("session"), py::arg("member"), py::arg("grant"))
      .def(
          "keep",
          [](BoundTable& t, uint64_t member, uint64_t grant, uint64_t now) { t.table->keep(member, grant, now); },
          py::arg("member"), py::arg("grant"), py::arg("now_ms"))
      .def(
          "done",
          [](BoundTable& t, uint64_t member, uint64_t grant, const std::vector<uint32_t>& ranks) {
            unlocked([&] { t.table->done(member, grant, ranks); });
          },
          py::arg("member"), py::arg("grant"), py::arg("ranks"));
}

}  // namespace

void bind_table(py::module_& m) {
  static py::exception<kvdock::TableError> error(m, "TableError");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TableError& r) {
      py::object e = py::reinterpret_borrow<py::object>(error)(r.message);
      e.attr("code") = r.code;
      e.attr("found") = value(r.found);
      e.attr("wanted") = value(r.wanted);
      PyErr_SetObject(error.ptr(), e.ptr());
    }
  });
  bind_views(m);
  bind_results(m);
  py::class_<BoundTable> c(m, "Table");
  c.def(py::init([](py::object region, uint64_t pool_id, uint64_t incarnation, uint64_t limit_bytes,
                    uint64_t max_records, uint64_t max_grants, uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms,
                    double session_cap, double total_cap, uint64_t lock_inode) {
          Mapping& mapping = region.cast<Mapping&>();
          TableOptions options{pool_id, lock_inode, incarnation, limit_bytes, max_records, max_grants,
                               ask_ms,  settle_ms,  suspect_ms,  session_cap, total_cap};
          return BoundTable{
              region, std::make_unique<Table>(reinterpret_cast<uint8_t*>(mapping.data()), mapping.bytes(), options)};
        }),
        py::arg("region"), py::kw_only(), py::arg("pool_id"), py::arg("incarnation"), py::arg("limit_bytes"),
        py::arg("max_records"), py::arg("max_grants"), py::arg("ask_ms") = 60'000, py::arg("settle_ms") = 3'000,
        py::arg("suspect_ms") = 6'000, py::arg("session_cap") = 0.25, py::arg("total_cap") = 0.75,
        py::arg("lock_inode") = 0)
      .def_static("region_bytes", &Table::region_bytes, py::arg("max_records"), py::arg("max_grants"));
  for (auto bind : {bind_pool, bind_administration, bind_members, bind_lists, bind_lookups, bind_stores, bind_adoption})
    bind(c);
}

}  // namespace kvdock
