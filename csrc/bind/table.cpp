// Bindings of csrc/table. Every call runs without the GIL and with the table's mutex; its arguments and its result are
// converted with the GIL. Bytes become keys and ids, errors become TableError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>

#include "bind/bind.h"
#include "bind/part_codec.h"
#include "table/census.h"
#include "table/table.h"

namespace pybind11::detail {

template <uint32_t kBytes>
struct type_caster<kvdock::Digest<kBytes>> {
  PYBIND11_TYPE_CASTER(kvdock::Digest<kBytes>, const_name("bytes"));
  bool load(handle source, bool) {
    if (!isinstance<bytes>(source)) return false;
    std::string_view raw = reinterpret_borrow<bytes>(source);
    if (raw.size() != kBytes)
      throw kvdock::TableError("bad_argument", kBytes == 32 ? "a key is 32 bytes" : "an id is 16 bytes",
                               int64_t(raw.size()), kBytes);
    std::memcpy(value.bytes, raw.data(), kBytes);
    return true;
  }
  static handle cast(const kvdock::Digest<kBytes>& id, return_value_policy, handle) {
    return bytes(reinterpret_cast<const char*>(id.bytes), kBytes).release();
  }
};

template <>
struct type_caster<std::vector<kvdock::Key>> {  // concatenated in one bytes object
  PYBIND11_TYPE_CASTER(std::vector<kvdock::Key>, const_name("bytes"));
  bool load(handle source, bool) {
    if (!isinstance<bytes>(source)) return false;
    std::string_view raw = reinterpret_borrow<bytes>(source);
    if (raw.size() % kvdock::kKeyBytes)
      throw kvdock::TableError("bad_argument", "keys are 32 bytes each", int64_t(raw.size()), "a multiple of 32");
    value.resize(raw.size() / kvdock::kKeyBytes);
    if (!raw.empty()) std::memcpy(value.data(), raw.data(), raw.size());
    return true;
  }
};

}  // namespace pybind11::detail

namespace py = pybind11;

namespace kvdock {

namespace {

using namespace py::literals;

const char* name_of(uint32_t fate) {
  constexpr const char* names[] = {"ready", "being_stored", "unknown"};
  return fate < FateRun::kGone ? names[fate] : kGoneNames[fate - FateRun::kGone];
}

struct BoundTable {
  py::object region;  // keeps the mapping alive under the table
  std::unique_ptr<Table> table;
};

// Binds a method of the table, or of one of its parts, without further conversion.
template <class Part, class... Args, class Method>
auto locked(Method method) {
  return [method](BoundTable& t, Args... args) {
    py::gil_scoped_release nogil;
    std::lock_guard lock(t.table->mutex);
    return (t.table->part<Part>().*method)(std::forward<Args>(args)...);
  };
}
template <class Part, class Result, class... Args>
auto call(Result (Part::*method)(Args...)) {
  return locked<Part, Args...>(method);
}
template <class Part, class Result, class... Args>
auto call(Result (Part::*method)(Args...) const) {
  return locked<Part, Args...>(method);
}

const char* name_of(Limit limit) {
  constexpr const char* names[] = {"", "held_bytes", "no_space", "pinning", "quota"};
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

using GroupSpecs = std::vector<std::tuple<std::string, uint32_t, uint64_t>>;

std::vector<Group> groups_of(const GroupSpecs& specs) {
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
      .def_readonly("request", &GrantInfo::request)
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
      .def_readonly("nonce", &MemberInfo::nonce)
      .def_readonly("ranks", &MemberInfo::ranks)
      .def_readonly("scheduler", &MemberInfo::scheduler)
      .def_property_readonly("state", [](const MemberInfo& x) { return name_of(x.state); })
      .def_readonly("heartbeat_ms", &MemberInfo::heartbeat_ms)
      .def_readonly("lock_offset", &MemberInfo::lock_offset)
      .def_readonly("pinned_through", &MemberInfo::pinned_through);
  py::class_<SessionInfo>(m, "SessionView")
      .def_readonly("session", &SessionInfo::session)
      .def_readonly("nonce", &SessionInfo::nonce)
      .def_readonly("namespace", &SessionInfo::space)
      .def_readonly("leases", &SessionInfo::leases)
      .def_readonly("reservations", &SessionInfo::reservations)
      .def_readonly("held_bytes", &SessionInfo::held_bytes)
      .def_readonly("opened_ms", &SessionInfo::opened_ms);
  py::class_<SpaceInfo>(m, "NamespaceView")
      .def_readonly("namespace", &SpaceInfo::space)
      .def_readonly("digest", &SpaceInfo::digest)
      .def_readonly("base", &SpaceInfo::base)
      .def_readonly("tenant", &SpaceInfo::tenant)
      .def_readonly("chunks", &SpaceInfo::chunks)
      .def_readonly("left_ms", &SpaceInfo::left_ms);
  using Seen = const TenantInfo&;
  auto limit = [](uint64_t quota) { return quota == kNoQuota ? std::nullopt : std::optional(quota); };
  py::class_<TenantInfo>(m, "TenantView")
      .def_readonly("tenant", &TenantInfo::tenant)
      .def_property_readonly("bytes", [](Seen t) { return t.usage.bytes; })
      .def_property_readonly("chunks", [](Seen t) { return t.usage.chunks; })
      .def_property_readonly("namespaces", [](Seen t) { return t.usage.namespaces; })
      .def_property_readonly("sessions", [](Seen t) { return t.usage.sessions; })
      .def_property_readonly("grants", [](Seen t) { return t.usage.grants; })
      .def_property_readonly("quota_bytes", [limit](Seen t) { return limit(t.quota.bytes); })
      .def_property_readonly("quota_chunks", [limit](Seen t) { return limit(t.quota.chunks); });
}

void bind_results(py::module_& m) {
  using Found = const LookupResult&;
  py::class_<LookupResult>(m, "Lookup")
      .def_readonly("hit_tokens", &LookupResult::hit_tokens)
      .def_readonly("first_chunk", &LookupResult::first_chunk)
      .def_readonly("lease", &LookupResult::lease)
      .def_property_readonly("limited", [](Found r) { return name_of(r.limited); })
      .def_readonly("unpinned_tokens", &LookupResult::unpinned_tokens)
      .def_readonly("being_stored", &LookupResult::being_stored)
      .def_readonly("committed", &LookupResult::committed)
      .def_property_readonly("chunk_count", [](Found r) { return r.part_ends.size(); })
      .def("bytes_from", [](Found r, size_t chunk) {
        size_t at = chunk == 0 ? 0 : chunk > r.part_ends.size() ? r.parts.size() : r.part_ends[chunk - 1];
        return bytes_of(std::span(r.parts).subspan(at));
      }, "chunk"_a)
      .def_property_readonly("chunks_json", [](Found r) { return py::bytes(parts_json(r)); })
      .def_property_readonly("chunks_msgpack", [](Found r) { return py::bytes(parts_msgpack(r)); })
      .def_property_readonly("chunks", [](Found r) {
        py::list out(r.part_ends.size());
        for (size_t i = 0, at = 0; i < r.part_ends.size(); at = r.part_ends[i++])
          out[i] = list_of(std::span(r.parts).subspan(at, r.part_ends[i] - at), &stored);
        return out;
      });
  using Granted = const ReserveResult&;
  py::class_<ReserveResult>(m, "Reservation")
      .def_readonly("grant", &ReserveResult::grant)
      .def_readonly("present", &ReserveResult::present)
      .def_readonly("busy", &ReserveResult::busy)
      .def_property_readonly("limited", [](Granted r) { return name_of(r.limited); })
      .def_property_readonly("chunk_count", [](Granted r) { return r.chunks.size(); })
      .def_property_readonly("part_bytes", [](Granted r) {
        uint64_t sum = 0;
        for (const auto& [index, parts] : r.chunks) sum += bytes_of(parts);
        return sum;
      })
      .def_property_readonly("chunks_json", [](Granted r) { return py::bytes(granted_json(r)); })
      .def_property_readonly("chunks_msgpack", [](Granted r) { return py::bytes(granted_msgpack(r)); })
      .def_property_readonly("chunks", [](Granted r) {
        py::list out(r.chunks.size());
        for (size_t i = 0; i < r.chunks.size(); ++i)
          out[i] = py::make_tuple(r.chunks[i].first, list_of(r.chunks[i].second, &granted));
        return out;
      });
}

void bind_pool(py::class_<BoundTable>& c) {
  c.def("add_segment", call(&Chunks::add_segment), "segment"_a, "data_offset"_a, "data_bytes"_a)
      .def("retire_segment", call(&Chunks::retire_segment), "segment"_a, "max_chunks"_a)
      .def("remove_segment", call(&Chunks::remove_segment), "segment"_a)
      .def("segment_used_bytes", call(&SlotAllocator::used_in), "segment"_a)
      .def("free_bytes", call(&SlotAllocator::free_bytes))
      .def("available_bytes", call(&Eviction::available_bytes))
      .def("evict", call(&Chunks::evict), "target_bytes"_a, "max_chunks"_a)
      .def("can_evict", call(&Eviction::can_evict))
      .def("next_out", [](BoundTable& t, uint64_t bytes) {
        py::dict out;
        for (auto& [space, keys] : call(&Eviction::next_out)(t, bytes))
          out[py::int_(space)] = py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes);
        return out;
      }, "bytes"_a)
      .def("set_eviction", call(&Chunks::set_eviction), "policy"_a)
      .def("eviction", call(&Eviction::policy))
      .def("set_limits", call(&Table::set_limits), py::kw_only(), "limit_bytes"_a, "session_cap"_a, "total_cap"_a)
      .def("delete", call(&Table::remove), "namespace"_a, "keys"_a)
      .def("drop_unread", call(&Table::drop_unread), "namespace"_a, "keys"_a)
      .def("clear", call(&Chunks::clear), "namespace"_a, "start"_a, "budget"_a)
      .def("raise_generation", call(&Table::raise_generation), "namespace"_a, "least"_a = 0)
      .def("generation", call(&Table::generation), "namespace"_a)
      .def("clear_old", call(&Chunks::clear_old), "start"_a, "budget"_a)
      .def("pin", call(&Table::keep_chunks), "namespace"_a, "keys"_a, "until_ms"_a)
      .def("retain", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms) {
        RetainResult done = call(&Table::retain)(t, space, keys, priority, until_ms);
        return py::make_tuple(done.chunks, done.refused);
      }, "namespace"_a, "keys"_a, "priority"_a, "until_ms"_a)
      .def("lower", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms,
                       const py::bytes& following) {
        Key below = py::len(following) ? following.cast<Key>() : Key{};
        LowerResult done = call(&Table::lower)(t, space, keys, priority, until_ms, below);
        return py::make_tuple(done.chunks, done.shared);
      }, "namespace"_a, "keys"_a, "priority"_a, "until_ms"_a = 0, "following"_a = py::bytes())
      .def("state_of", call(&Table::state_of), "namespace"_a, "key"_a)
      .def("stats", call(&Table::stats))
      .def("reuse", [](BoundTable& t) {
        const Reuse& all = call(&Table::reuse)(t);
        return py::dict("hit_age"_a = histogram_of(all.hit_age), "eviction_age"_a = histogram_of(all.eviction_age),
                        "eviction_uses"_a = histogram_of(all.eviction_uses));
      })
      .def("check_integrity", call(&Table::check_integrity))
      .def("add_namespace", [](BoundTable& t, const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens,
                               uint32_t writers, const GroupSpecs& groups, const Id16& tenant,
                               const std::optional<Key>& base) {
        NewNamespace wanted{digest,       base.value_or(digest), tenant, chunk_tokens,
                            block_tokens, writers,               groups_of(groups)};
        return call(&Table::add_namespace)(t, wanted);
      }, "digest"_a, py::kw_only(), "chunk_tokens"_a, "block_tokens"_a, "writers"_a, "groups"_a, "tenant"_a = Id16{},
         "base"_a = py::none())
      .def("empty_left", call(&Chunks::empty_left), "kept"_a, "max_chunks"_a, "tenant"_a = py::none())
      .def("namespaces", call(&Chunks::spaces));
}

void bind_tenants(py::class_<BoundTable>& c) {
  using Amount = std::optional<uint64_t>;
  auto quota_of = [](Amount bytes, Amount chunks) {
    return Quota{bytes.value_or(kNoQuota), chunks.value_or(kNoQuota)};
  };
  c.def("set_quota", [quota_of](BoundTable& t, const Id16& tenant, Amount bytes, Amount chunks) {
     call(&Tenants::set_quota)(t, tenant, quota_of(bytes, chunks));
   }, "tenant"_a, py::kw_only(), "bytes"_a, "chunks"_a)
      .def("set_default_quota", [quota_of](BoundTable& t, Amount bytes, Amount chunks) {
        call(&Tenants::set_default)(t, quota_of(bytes, chunks));
      }, py::kw_only(), "bytes"_a, "chunks"_a)
      .def("evict_over_quota", call(&Chunks::evict_over_quota), "max_chunks"_a)
      .def("tenant", call(&Tenants::view), "tenant"_a)
      .def("tenants", call(&Tenants::views))
      .def("has_namespace", call(&Table::has_namespace), "digest"_a);
}

void bind_members(py::class_<BoundTable>& c) {
  c.def("drop_idle_namespaces", call(&Table::drop_idle_namespaces))
      .def("open_session", call(&Table::open_session), "nonce"_a, "namespace"_a, "now_ms"_a)
      .def("session_of", call(&Members::session_of), "nonce"_a)
      .def("move_session", call(&Table::move_session), "session"_a, "namespace"_a, "now_ms"_a)
      .def("add_member", [](BoundTable& t, uint64_t session, const Id16& nonce, std::vector<uint32_t> ranks,
                            bool scheduler, uint64_t now, uint64_t lock_offset) {
        return call(&Members::add_member)(t, session, {nonce, std::move(ranks), scheduler, lock_offset}, now);
      }, "session"_a, "nonce"_a, "ranks"_a, "scheduler"_a, "now_ms"_a, "lock_offset"_a = 0)
      .def("heartbeat", call(&Table::heartbeat), "member"_a, "now_ms"_a)
      .def("report_pinned", call(&Members::report_pinned), "member"_a, "through"_a)
      .def("member_dead", call(&Table::member_dead), "member"_a, "now_ms"_a)
      .def("leave", call(&Table::leave), "member"_a)
      .def("tick", call(&Table::tick), "now_ms"_a)
      .def("sessions", call(&Table::sessions), "named"_a = py::none())
      .def("members", call(&Members::views), "sessions"_a = py::none());
}

void bind_grants(py::class_<BoundTable>& c) {
  c.def("lookup", [](BoundTable& t, uint64_t session, uint64_t member, const Id16& request, uint32_t epoch,
                     std::vector<Key> keys, uint32_t readers, uint64_t skip_tokens, uint64_t now, bool computes,
                     bool is_apart) {
     LookupCall wanted{request, epoch, std::move(keys), readers, skip_tokens, computes, is_apart};
     return call(&Table::lookup)(t, session, member, wanted, now);
   }, "session"_a, "member"_a, "request"_a, "epoch"_a, "keys"_a, py::kw_only(), "readers"_a, "skip_tokens"_a,
      "now_ms"_a, "computes"_a = false, "is_apart"_a = false)
      .def("withdraw", call(&Table::withdraw), "session"_a, "request"_a)
      .def("reserve", [](BoundTable& t, uint64_t session, uint64_t member, const Id16& store, const py::bytes& parent,
                         std::vector<Key> keys, uint32_t groups, bool temporary, uint64_t deadline_ms, uint64_t now) {
        Key above = py::len(parent) ? parent.cast<Key>() : Key{};
        ReserveCall wanted{store, above, std::move(keys), groups, temporary, deadline_ms};
        return call(&Table::reserve)(t, session, member, wanted, now);
      }, "session"_a, "member"_a, "store"_a, "parent"_a, "keys"_a, py::kw_only(), "groups"_a, "temporary"_a,
         "deadline_ms"_a, "now_ms"_a)
      .def("commit", call(&Table::commit), "session"_a, "grant"_a, "rank"_a, "parts"_a, "now_ms"_a)
      .def("hold", call(&Table::hold), "session"_a, "member"_a, "request"_a, "keys"_a, "now_ms"_a)
      .def("peek", call(&Table::peek), "namespace"_a, "keys"_a)
      .def("chunks_in", call(&Records::chunks_in), "namespace"_a)
      .def("children", call(&Table::children), "namespace"_a, "key"_a)
      .def("fates", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys) {
        std::vector<std::tuple<uint32_t, const char*, uint64_t, uint64_t>> out;
        for (const FateRun& run : call(&Table::fates)(t, space, keys))
          out.emplace_back(run.chunks, name_of(run.fate), run.at_ms, run.used_ms);
        return out;
      }, "namespace"_a, "keys"_a)
      .def("changes", call(&Table::changes), "namespace"_a, "since"_a, "at_most"_a)
      .def("all_changes", [](BoundTable& t, uint64_t since, size_t at_most) {
        auto [changes, next, complete] = call(&Table::all_changes)(t, since, at_most);
        std::vector<std::tuple<uint32_t, Key, bool, Key>> out;
        out.reserve(changes.size());
        for (const Change& one : changes)
          out.emplace_back(one.space, one.key, one.is_there, call(&Chunks::parent_of)(t, one.space, one.key));
        return std::make_tuple(std::move(out), next, complete);
      }, "since"_a, "at_most"_a)
      .def("ready", [](BoundTable& t, uint64_t start, uint32_t budget) {
        auto [found, next] = call(&Chunks::ready)(t, start, budget);
        std::vector<std::tuple<uint32_t, Key, bool, Key>> out;
        for (const Ready& one : found) out.emplace_back(one.space, one.key, true, one.parent);
        return std::make_pair(std::move(out), next);
      }, "start"_a, "budget"_a)
      .def("release", call(&Table::release), "session"_a, "grant"_a, "ranks"_a)
      .def("mismatch", [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks) {
        auto [space, keys] = call(&Table::mismatch)(t, session, grant, chunks);
        return std::make_pair(space, py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes));
      }, "session"_a, "grant"_a, "chunks"_a)
      .def("abort", call(&Table::abort), "session"_a, "grant"_a, "ranks"_a)
      .def("cancel", call(&Table::cancel), "session"_a, "member"_a, "grant"_a)
      .def("keep", call(&Table::keep), "member"_a, "grant"_a, "now_ms"_a)
      .def("done", call(&Table::done), "member"_a, "grant"_a, "ranks"_a)
      .def("grants", call(&Grants::page), "session"_a = 0, py::kw_only(), "from_place"_a = 0, "limit"_a = SIZE_MAX)
      .def("grant", call(&Grants::view), "grant"_a)
      .def("open_grants", call(&Grants::open_grants), "session"_a, "request"_a);
}

// A count of a table's chunks, which keeps the table alive.
struct BoundCensus {
  py::object table;
  BoundTable& of;
  Census census;
};

template <class... Args, class Method>
auto counted(Method method) {
  return [method](BoundCensus& c, Args... args) {
    py::gil_scoped_release nogil;
    std::lock_guard lock(c.of.table->mutex);
    return (c.census.*method)(std::forward<Args>(args)...);
  };
}

void bind_census(py::module_& m) {
  py::class_<BoundCensus>(m, "Census")
      .def(py::init([](py::object table) {
        auto& of = table.cast<BoundTable&>();
        std::lock_guard lock(of.table->mutex);
        return std::unique_ptr<BoundCensus>(new BoundCensus{table, of, Census(of.table->part<Records>())});
      }), "table"_a)
      .def("step", counted<uint32_t>(&Census::step), "budget"_a)
      .def("spaces", [](BoundCensus& c) {
        py::list out;
        for (auto& [space, n] : counted<>(&Census::spaces)(c))
          out.append(py::make_tuple(space, n.chunks, n.bytes, n.oldest, n.newest));
        return out;
      })
      .def("prefixes", [](BoundCensus& c, std::vector<uint32_t> spaces, size_t most) {
        auto [found, all] = counted<const std::vector<uint32_t>&, size_t>(&Census::prefixes)(c, spaces, most);
        py::list out;
        for (const PrefixCount& p : found)
          out.append(py::make_tuple(p.space, p.first, p.chunks, p.bytes, p.born_ms, p.used_ms, p.uses, p.last,
                                    p.last_chunks));
        return py::make_tuple(out, all);
      }, "namespaces"_a, "most"_a);
}

py::tuple adopt(py::object region, uint64_t pool_id, uint64_t lock_inode,
                const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& segments, uint64_t limit_bytes,
                uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms, double session_cap, double total_cap,
                uint64_t grace_ms) {
  const auto& mapping = region.cast<const Mapping&>();
  std::vector<SegmentFacts> facts;
  for (auto& [id, offset, bytes] : segments) facts.push_back({id, SegmentState::kLive, offset, bytes});
  TableOptions options{pool_id, lock_inode, 0,          limit_bytes, 0,        0,
                       ask_ms,  settle_ms,  suspect_ms, session_cap, total_cap, grace_ms};
  Adoption found;
  std::unique_ptr<Table> table;
  {
    py::gil_scoped_release nogil;
    table = std::make_unique<Table>(mapping, options, facts, &found);
  }
  py::dict counts("clock_ms"_a = found.clock_ms, "chunks"_a = found.chunks, "dropped"_a = found.dropped,
                  "aborted"_a = found.aborted, "replaced"_a = found.replaced, "cleared"_a = found.cleared,
                  "leases"_a = found.leases,
                  "reservations"_a = found.reservations, "sessions"_a = found.sessions, "members"_a = found.members);
  return py::make_tuple(BoundTable{std::move(region), std::move(table)}, counts);
}

std::vector<std::tuple<uint32_t, std::string, uint64_t, uint64_t>> stored_segments(
    const Mapping& mapping, uint64_t pool_id, uint64_t lock_inode) {
  std::vector<std::tuple<uint32_t, std::string, uint64_t, uint64_t>> out;
  for (const SegmentFacts& s : Table::stored_segments(mapping, {pool_id, lock_inode}))
    out.emplace_back(s.segment, name_of(s.state), s.data_offset, s.data_bytes);
  return out;
}

void bind_making(py::class_<BoundTable>& c) {
  c.def(py::init([](py::object region, uint64_t pool_id, uint64_t incarnation, uint64_t limit_bytes,
                    uint64_t max_records, uint64_t max_grants, uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms,
                    double session_cap, double total_cap, uint64_t lock_inode, uint64_t grace_ms) {
    TableOptions options{pool_id, lock_inode, incarnation, limit_bytes, max_records, max_grants,
                         ask_ms,  settle_ms,  suspect_ms,  session_cap, total_cap,   grace_ms};
    return BoundTable{region, std::make_unique<Table>(region.cast<const Mapping&>(), options)};
  }), "region"_a, py::kw_only(), "pool_id"_a, "incarnation"_a, "limit_bytes"_a, "max_records"_a, "max_grants"_a,
      "ask_ms"_a = 60'000, "settle_ms"_a = 3'000, "suspect_ms"_a = 6'000, "session_cap"_a = 0.5, "total_cap"_a = 0.75,
      "lock_inode"_a = 0, "grace_ms"_a = 10'000)
      .def_static("adopt", &adopt, "region"_a, py::kw_only(), "pool_id"_a, "lock_inode"_a, "segments"_a,
                  "limit_bytes"_a, "ask_ms"_a = 60'000, "settle_ms"_a = 3'000, "suspect_ms"_a = 6'000,
                  "session_cap"_a = 0.5, "total_cap"_a = 0.75, "grace_ms"_a = 10'000)
      .def_static("stored_segments", &stored_segments, "region"_a, py::kw_only(), "pool_id"_a, "lock_inode"_a)
      .def_static("region_bytes", &Region::bytes_for, "max_records"_a, "max_grants"_a)
      .def_property_readonly("incarnation", [](const BoundTable& t) { return t.table->incarnation(); })
      .def_property_readonly("first_incarnation", [](const BoundTable& t) { return t.table->first_incarnation(); });
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
      e.attr("found") = py::cast(r.found);
      e.attr("wanted") = py::cast(r.wanted);
      PyErr_SetObject(error.ptr(), e.ptr());
    }
  });
  bind_views(m);
  bind_results(m);
  py::class_<BoundTable> c(m, "Table");
  bind_making(c);
  bind_pool(c);
  bind_tenants(c);
  bind_members(c);
  bind_grants(c);
  bind_census(m);
}

}  // namespace kvdock
