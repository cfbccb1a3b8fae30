// Bindings of csrc/table. Every call runs without the GIL and with the table's mutex; its arguments and its result are
// converted with the GIL. Bytes become keys and ids, errors become TableError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

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

constexpr uint64_t kAll = UINT64_MAX;  // so much work that a call does all of it

const char* name_of(uint32_t fate) {
  constexpr const char* names[] = {"ready", "being_stored", "unknown"};
  return fate < FateRun::kGone ? names[fate] : kGoneNames[fate - FateRun::kGone];
}

struct BoundTable {
  py::object region;  // keeps the mapping alive
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

// A str that type checkers know to be one of these.
template <py::typing::StringLiteral... Names>
py::typing::Literal<Names...> one_of(const char* name) {
  return py::reinterpret_steal<py::typing::Literal<Names...>>(py::str(name).release());
}

auto granted(const PartAt& p) { return py::make_tuple(p.group, p.writer, p.segment, p.offset, p.length); }
auto stored(const PartAt& p) {
  return py::make_tuple(p.group, p.writer, p.segment, p.offset, p.length, p.checksum);
}

template <class Range, class Form>
auto list_of(const Range& from, Form form) {
  py::typing::List<decltype(form(*from.begin()))> out(from.size());
  size_t i = 0;
  for (const auto& one : from) out[i++] = form(one);
  return out;
}

uint64_t bytes_of(std::span<const PartAt> parts) {
  uint64_t sum = 0;
  for (const PartAt& p : parts) sum += p.length;
  return sum;
}

using GroupSpecs = std::vector<std::tuple<std::string, uint32_t, uint64_t>>;

std::vector<Group> groups_of(const GroupSpecs& specs, const std::vector<uint64_t>& packed) {
  if (!packed.empty() && packed.size() != specs.size())
    throw TableError("bad_argument", "packed_bytes of each group", int64_t(packed.size()), int64_t(specs.size()));
  std::vector<Group> out;
  for (const auto& [kind, window, bytes] : specs) {
    if (kind != "full" && kind != "window")
      throw TableError("bad_argument", "unknown kind of group", kind, "full or window");
    const uint64_t packed_bytes = packed.empty() ? 0 : packed[out.size()];
    out.push_back({kind == "full" ? GroupKind::kFull : GroupKind::kWindow, window, bytes, packed_bytes});
  }
  return out;
}

void bind_views(py::module_& m) {
  py::class_<GrantInfo>(m, "GrantView")
      .def_readonly("grant", &GrantInfo::grant)
      .def_property_readonly("kind",
                             [](const GrantInfo& g) {
                               return one_of<"'lease'", "'reservation'">(
                                   g.kind == GrantKind::kLease ? "lease" : "reservation");
                             })
      .def_readonly("session", &GrantInfo::session)
      .def_readonly("request", &GrantInfo::request)
      .def_readonly("epoch", &GrantInfo::epoch)
      .def_readonly("readers", &GrantInfo::readers)
      .def_readonly("remaining", &GrantInfo::remaining)
      .def_readonly("chunks", &GrantInfo::chunks)
      .def_readonly("bytes", &GrantInfo::bytes)
      .def_readonly("opened_ms", &GrantInfo::opened_ms)
      .def_readonly("place", &GrantInfo::place,
                    "Rises from the oldest grant to the youngest; ids do not, as their cells are used again.")
      .def_readonly("closed", &GrantInfo::closed);
  py::class_<MemberInfo>(m, "MemberView")
      .def_readonly("member", &MemberInfo::member)
      .def_readonly("session", &MemberInfo::session)
      .def_readonly("nonce", &MemberInfo::nonce)
      .def_readonly("ranks", &MemberInfo::ranks)
      .def_readonly("scheduler", &MemberInfo::scheduler)
      .def_property_readonly("state", [](const MemberInfo& x) {
        return one_of<"'live'", "'suspect'", "'dead'", "'gone'">(name_of(x.state));
      })
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
      .def_readonly("chunks", &SpaceInfo::chunks, "Records that are not FREE.")
      .def_readonly("left_ms", &SpaceInfo::left_ms,
                    "When its last session left: after `grace_ms` it is evicted first; None: it was not left.");
}

void bind_tenant_view(py::module_& m) {
  using Seen = const TenantInfo&;
  auto limit = [](uint64_t quota) { return quota == kNoQuota ? std::nullopt : std::optional(quota); };
  py::class_<TenantInfo>(m, "TenantView",
          "What a tenant uses: of records that are not free, and of grants that have a holder.")
      .def_readonly("tenant", &TenantInfo::tenant)
      .def_property_readonly("bytes", [](Seen t) { return t.usage.bytes; }, "The bytes in slots.")
      .def_property_readonly("chunks", [](Seen t) { return t.usage.chunks; })
      .def_property_readonly("namespaces", [](Seen t) { return t.usage.namespaces; })
      .def_property_readonly("sessions", [](Seen t) { return t.usage.sessions; })
      .def_property_readonly("members", [](Seen t) { return t.usage.members; })
      .def_property_readonly("grants", [](Seen t) { return t.usage.grants; })
      .def_property_readonly("quota_bytes", [limit](Seen t) { return limit(t.quota.bytes); }, "None: no limit.")
      .def_property_readonly("quota_chunks", [limit](Seen t) { return limit(t.quota.chunks); });
}

void bind_results(py::module_& m) {
  using Found = const LookupResult&;
  py::class_<LookupResult>(m, "Lookup")
      .def_readonly("hit_tokens", &LookupResult::hit_tokens)
      .def_readonly("first_chunk", &LookupResult::first_chunk)
      .def_readonly("lease", &LookupResult::lease, "A grant's id; 0 when nothing was locked.")
      .def_property_readonly("limited", [](Found r) {
        return one_of<"''", "'held_bytes'", "'pinning'">(name_of(r.limited));
      }, "What shortened the hit.")
      .def_readonly("unpinned_tokens", &LookupResult::unpinned_tokens, "By how much 'pinning' shortened it.")
      .def_readonly("being_stored", &LookupResult::being_stored,
                    "Tokens of the prefix that other live sessions store now; 0: none does.")
      .def_readonly("committed", &LookupResult::committed,
                    "How many of these are stored, whatever shortened the hit.")
      .def_property_readonly("chunk_count", [](Found r) { return r.part_ends.size(); })
      .def("bytes_from", [](Found r, size_t chunk) {
        size_t at = chunk == 0 ? 0 : chunk > r.part_ends.size() ? r.parts.size() : r.part_ends[chunk - 1];
        return bytes_of(std::span(r.parts).subspan(at));
      }, "chunk"_a, "The bytes of the parts of `chunks[chunk:]`.")
      .def_property_readonly("chunks_json", [](Found r) { return py::bytes(parts_json(r)); },
                             "`chunks` as the wire's JSON: a list of lists of [group, writer, segment, offset, length, "
                             "'16 hex digits'].")
      .def_property_readonly("chunks_msgpack", [](Found r) { return py::bytes(parts_msgpack(r)); },
                             "The same in MessagePack, with the checksum as an unsigned integer.")
      .def_property_readonly("chunks", [](Found r) {
        return list_of(r.part_ends, [&r, at = size_t{0}](size_t end) mutable {
          const size_t from = std::exchange(at, end);
          return list_of(std::span(r.parts).subspan(from, end - from), &stored);
        });
      }, "Per chunk from first_chunk on: (group, writer, segment, offset, length, checksum).");
  using Granted = const ReserveResult&;
  py::class_<ReserveResult>(m, "Reservation")
      .def_readonly("grant", &ReserveResult::grant, "0 when nothing was granted.")
      .def_readonly("has_more", &ReserveResult::has_more, "Nothing was granted yet: call again with `goes_on`.")
      .def_readonly("present", &ReserveResult::present)
      .def_readonly("busy", &ReserveResult::busy)
      .def_property_readonly("limited", [](Granted r) {
        return one_of<"''", "'held_bytes'", "'no_space'", "'pinning'", "'quota'">(name_of(r.limited));
      })
      .def_property_readonly("chunk_count", [](Granted r) { return r.chunks.size(); })
      .def_property_readonly("part_bytes", [](Granted r) {
        uint64_t sum = 0;
        for (const auto& [index, parts] : r.chunks) sum += bytes_of(parts);
        return sum;
      }, "The bytes of all parts granted.")
      .def_property_readonly("chunks_json", [](Granted r) { return py::bytes(granted_json(r)); },
                             "`chunks` as the wire's JSON: a list of {'index': …, 'parts': [[group, writer, segment, "
                             "offset, length]]}.")
      .def_property_readonly("chunks_msgpack", [](Granted r) { return py::bytes(granted_msgpack(r)); })
      .def_property_readonly("chunks", [](Granted r) {
        return list_of(r.chunks, [](const auto& chunk) {
          return py::make_tuple(chunk.first, list_of(chunk.second, &granted));
        });
      }, "(index into keys, [(group, writer, segment, offset, length)]).");
}

void bind_pool(py::class_<BoundTable>& c) {
  c.def("add_segment", call(&Chunks::add_segment), "segment"_a, "data_offset"_a, "data_bytes"_a)
      .def("retire_segment", call(&Chunks::retire_segment), "segment"_a, "max_chunks"_a,
           "Gives out none of its slots any more and evicts up to `max_chunks` chunks; returns its bytes still in use.")
      .def("remove_segment", call(&Chunks::remove_segment), "segment"_a,
           "bad_argument unless it was retired and is empty.")
      .def("segment_used_bytes", call(&SlotAllocator::used_in), "segment"_a,
           "The bytes in slots that have an owner; add_segment named it.")
      .def("free_bytes", call(&SlotAllocator::free_bytes))
      .def("available_bytes", call(&Eviction::available_bytes),
           "The smallest of these: all free bytes; and, for each slot size that a store had to evict for since the "
           "last evict(), the bytes that slots of that size could take now.")
      .def("evict", call(&Chunks::evict), "target_bytes"_a, "max_chunks"_a,
           py::kw_only(), "by_operator"_a = false,
           "Evicts unpinned chunks, first the leaf that is worth least to the eviction policy, until available_bytes "
           "is `target_bytes`, or about `max_chunks` were evicted; returns their number. "
           "`by_operator`: because one asked for free bytes.")
      .def("can_evict", call(&Eviction::can_evict),
           "Whether there is an unpinned chunk that is not kept and is the last of its chain.")
      .def("next_out", [](BoundTable& t, uint64_t bytes, size_t most) {
        py::typing::Dict<py::int_, py::bytes> out;
        for (auto& [space, keys] : call(&Eviction::next_out)(t, bytes, most))
          out[py::int_(space)] = py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes);
        return out;
      }, "bytes"_a, "most"_a = kAll, "By namespace, keys of about the chunks evicted next, at most `most`.")
      .def("set_eviction", call(&Chunks::set_eviction), "policy"_a,
           "'adaptive' (the default) or 'lru'; bad_argument for another. The new policy has learnt nothing yet. It "
           "sees the present chunks in the next calls of tick().")
      .def("eviction", call(&Eviction::policy))
      .def("set_limits", call(&Table::set_limits), py::kw_only(), "limit_bytes"_a, "session_cap"_a, "total_cap"_a,
           "Caps for later grants; present ones stay. bad_argument if the segments hold more.");
}

void bind_chunks(py::class_<BoundTable>& c) {
  c.def("delete", call(&Table::remove), "namespace"_a, "keys"_a,
        "Takes chunks out of use, also those that are being written; returns how many were READY.")
      .def("drop_unread", call(&Table::drop_unread), "namespace"_a, "keys"_a,
           "Takes temporary chunks that no lookup leased out of use; returns how many.")
      .def("clear", call(&Chunks::clear), "namespace"_a, "start"_a, "budget"_a,
           "Takes READY chunks of a namespace (-1: of all) out of use, looking at `budget` records from cursor `start` "
           "(0 first). Returns (chunks taken, next cursor or -1 when done): call it until then.")
      .def("raise_generation", call(&Table::raise_generation), "namespace"_a, "least"_a = 0,
           "Clears the namespace at once: lookups find none of its chunks, and its open reservations publish nothing. "
           "Raises its generation by one, or to `least` where that is more; does nothing if `least` is neither 0 nor "
           "above it. Returns the generation. close_cleared() and clear_old() free the memory.")
      .def("close_cleared", call(&Table::close_cleared), "start"_a, "most"_a = kAll,
           "Closes open reservations that raise_generation() has cleared, from cursor `start` on (0 first). Returns "
           "the next cursor, or -1 when done; `most`: as for leave().")
      .def("generation", call(&Table::generation), "namespace"_a)
      .def("clear_old", call(&Chunks::clear_old), "start"_a, "budget"_a,
           "As clear(), for chunks that raise_generation() has cleared.")
      .def("pin", call(&Table::keep_chunks), "namespace"_a, "keys"_a, "until_ms"_a,
           "Keeps READY chunks of these keys from eviction until `until_ms` (0: no longer); returns how many it found.")
      .def("retain", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms) {
        RetainResult done = call(&Table::retain)(t, space, keys, priority, until_ms);
        return py::make_tuple(done.chunks, done.refused);
      }, "namespace"_a, "keys"_a, "priority"_a, "until_ms"_a,
         "A chain's chunks, from its first on, are evicted after others until `until_ms`; priority 1..MOST_PRIORITY. "
         "Returns how many of the stored ones are retained, and how many exceeded the limit. Raises bad_argument.")
      .def("lower", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys, int priority, uint64_t until_ms,
                       const py::bytes& following) {
        Key below = py::len(following) ? following.cast<Key>() : Key{};
        LowerResult done = call(&Table::lower)(t, space, keys, priority, until_ms, below);
        return py::make_tuple(done.chunks, done.shared);
      }, "namespace"_a, "keys"_a, "priority"_a, "until_ms"_a = 0, "following"_a = py::bytes(),
         "Chunks at the end of `keys` that no other chain shares are evicted before others, until a request names them "
         "or until `until_ms`; CONVERSATION_ENDED <= priority <= 0. `following`: the key after the last, whose chunk "
         "is not shared. Returns how many chunks, and whether it ended at a chunk that is shared. Raises "
         "bad_argument.")
      .def("state_of", call(&Table::state_of), "namespace"_a, "key"_a, "'absent', 'reserved' or 'ready'.")
      .def("stats", call(&Table::stats))
      .def("reuse", [](BoundTable& t) {
        const Reuse& all = call(&Table::reuse)(t);
        return py::typing::Dict<py::str, HistogramTuple>(
            "hit_age"_a = histogram_of(all.hit_age), "eviction_age"_a = histogram_of(all.eviction_age),
            "eviction_uses"_a = histogram_of(all.eviction_uses));
      }, "hit_age and eviction_age in seconds, and eviction_uses (csrc/table/reuse.h), each as upper bounds, counts "
         "(one more than bounds), and the sum of the values.")
      .def("check_integrity", call(&Table::check_integrity),
           "Computes all that is derived again and compares; raises TableError('corrupt', …).");
}

void bind_namespaces(py::class_<BoundTable>& c) {
  c.def("add_namespace", [](BoundTable& t, const Key& digest, uint32_t chunk_tokens, uint32_t block_tokens,
                            uint32_t writers, const GroupSpecs& groups, const Id16& tenant,
                            const std::optional<Key>& base, const std::vector<uint64_t>& packed_bytes) {
     NewNamespace wanted{digest,       base.value_or(digest), tenant, chunk_tokens,
                         block_tokens, writers,               groups_of(groups, packed_bytes)};
     return call(&Table::add_namespace)(t, wanted);
   }, "digest"_a, py::kw_only(), "chunk_tokens"_a, "block_tokens"_a, "writers"_a, "groups"_a, "tenant"_a = Id16{},
      "base"_a = py::none(), "packed_bytes"_a = std::vector<uint64_t>{},
      "groups: (kind 'full'|'window', window_tokens, part_bytes). packed_bytes: of each group's parts where they are "
      "packed, 0 where they are not; by default none is. tenant: the owner, 16 bytes; zeros, the default: "
      "the server's own user. base: the digest of the same manifest and tenant without weights; None: `digest`. "
      "Idempotent by digest; bad_argument if it is another tenant's or has another base. Drops idle namespaces if "
      "it has to: table_full if there are none. A namespace's number is used again once it was dropped.")
      .def("empty_left", call(&Chunks::empty_left), "kept"_a, "max_chunks"_a, "tenant"_a = py::none(),
           "Evicts at most `max_chunks` of namespaces that sessions have left, the oldest first, whenever that was, "
           "but not of the `kept` latest. `tenant`: only of its namespaces, `kept` or not. Returns how many were "
           "evicted.")
      .def("namespaces", call(&Chunks::spaces))
      .def("namespace", call(&Chunks::space_info), "number"_a)
      .def("namespaces_in_use", call(&Namespaces::in_use), "tenant"_a, "leaving"_a = kNone,
           "How many namespaces of the tenant, or of all (None), sessions have not left. `leaving`: the number of one "
           "that one of its sessions is about to leave; without others in it, it does not count.");
}

void bind_tenants(py::class_<BoundTable>& c) {
  using Amount = std::optional<uint64_t>;
  auto quota_of = [](Amount bytes, Amount chunks) {
    return Quota{bytes.value_or(kNoQuota), chunks.value_or(kNoQuota)};
  };
  c.def("set_quota", [quota_of](BoundTable& t, const Id16& tenant, Amount bytes, Amount chunks) {
     call(&Tenants::set_quota)(t, tenant, quota_of(bytes, chunks));
   }, "tenant"_a, py::kw_only(), "bytes"_a, "chunks"_a,
      "How much the tenant's chunks may use; None: no limit. It replaces an earlier quota at once, and is forgotten "
      "with this object. A reservation over it evicts the tenant's own chunks, pinned ones last, and then is cut short "
      "with 'quota'. Above a quota that was lowered nothing is granted until the tenant uses less.")
      .def("set_default_quota", [quota_of](BoundTable& t, Amount bytes, Amount chunks) {
        call(&Tenants::set_default)(t, quota_of(bytes, chunks));
      }, py::kw_only(), "bytes"_a, "chunks"_a,
         "The quota of all tenants that have none of their own, except the server's own user.")
      .def("evict_over_quota", call(&Chunks::evict_over_quota), "max_chunks"_a,
           "Evicts chunks of tenants that use more than their quota, at most `max_chunks`; returns their number.")
      .def("tenant", call(&Tenants::view), "tenant"_a)
      .def("tenants", call(&Tenants::views), "Those that have a namespace or a quota of their own.")
      .def("has_namespace", call(&Table::has_namespace), "digest"_a);
}

void bind_members(py::class_<BoundTable>& c) {
  c.def("drop_idle_namespaces", call(&Table::drop_idle_namespaces), "most"_a = kAll,
        "Forgets namespaces that have neither a session nor a chunk, at most `most`; returns the others.")
      .def("open_session", call(&Table::open_session), "nonce"_a, "namespace"_a, "now_ms"_a,
           "Idempotent by nonce: a session that is open stays in its namespace; id_reused unless that has the same "
           "base.")
      .def("session_of", call(&Members::session_of), "nonce"_a, "Its id; 0: none is open.")
      .def("move_session", call(&Table::move_session), "session"_a, "namespace"_a, "now_ms"_a,
           "The session's later lookups and stores are in that namespace, which has the same base: bad_argument for "
           "another. Its earlier grants stay. If it was the last session in its namespace, that one counts as left.")
      .def("add_member", [](BoundTable& t, uint64_t session, const Id16& nonce, std::vector<uint32_t> ranks,
                            bool scheduler, uint64_t now, uint64_t lock_offset) {
        return call(&Members::add_member)(t, session, {nonce, std::move(ranks), scheduler, lock_offset}, now);
      }, "session"_a, "nonce"_a, "ranks"_a, "scheduler"_a, "now_ms"_a, "lock_offset"_a = 0,
         "Idempotent by (session, nonce): a repeat counts as a heartbeat; id_reused if ranks or lock differ.")
      .def("heartbeat", call(&Table::heartbeat), "member"_a, "now_ms"_a, "most"_a = kAll,
           "Marks the member live; returns questions about grants (grant, ranks; []: for the member that asked). They "
           "stop at `most`, of which a question counts eight, and one more for each of its ranks.")
      .def("report_pinned", call(&Members::report_pinned), "member"_a, "through"_a,
           "It has page-locked the segments with ids below `through`.")
      .def("member_dead", call(&Table::member_dead), "member"_a, "now_ms"_a, "most"_a = kAll,
           "Its lock was found free; tick() makes it GONE. `most`, and the answer: as for leave().")
      .def("leave", call(&Table::leave), "member"_a, "most"_a = kAll,
           "D2 for all that it holds; the last to leave closes the session. True: it is to be called again, because "
           "more than `most` was to be done, in units of about 10 ns; the member gets nothing new meanwhile.")
      .def("tick", call(&Table::tick), "now_ms"_a, "most"_a = kAll,
           "Applies the passing of time: deadlines, missed heartbeats, dead members, ends of keeps and of hints. "
           "`most`, and the answer: as for leave().")
      .def("sessions", call(&Table::sessions), "named"_a = py::none(),
           "The open ones of the named sessions; by default all open ones.")
      .def("most_holding", call(&Table::most_holding), "by_grants"_a,
           "The session that holds most: grants, or bytes. None: no session has a grant.")
      .def("members", call(&Members::views))
      .def("members_named", call(&Members::views_of), "members"_a, "Those of them that there still are.");
}

void bind_stores(py::class_<BoundTable>& c) {
  c.def("reserve", [](BoundTable& t, uint64_t session, uint64_t member, const Id16& store, const py::bytes& parent,
                         std::vector<Key> keys, uint32_t groups, bool temporary, uint64_t deadline_ms, uint64_t now,
                         uint32_t most_evicted, bool goes_on) {
        Key above = py::len(parent) ? parent.cast<Key>() : Key{};
        ReserveCall wanted{store, above, std::move(keys), groups, temporary, deadline_ms, most_evicted, goes_on};
        return call(&Table::reserve)(t, session, member, wanted, now);
      }, "session"_a, "member"_a, "store"_a, "parent"_a, "keys"_a, py::kw_only(), "groups"_a, "temporary"_a,
         "deadline_ms"_a, "now_ms"_a, "most_evicted"_a = UINT32_MAX, "goes_on"_a = false,
         "parent: 32 bytes, of ones if it is not known, or b'' (root). groups: bit mask, 0 = all. deadline_ms: from "
         "now. If more than `most_evicted` chunks must be evicted first, the call evicts that many, grants nothing, "
         "and says `has_more`: the caller then repeats it with `goes_on`.")
      .def("commit", call(&Table::commit), "session"_a, "grant"_a, "rank"_a, "parts"_a, "now_ms"_a,
           "parts: (index into the store's keys, group, checksum). Returns (chunks ready, ranks remaining).")
      .def("make_raw", [](BoundTable& t, uint64_t session, uint64_t grant, uint32_t rank,
                          const std::vector<std::pair<uint32_t, uint32_t>>& parts, uint64_t now) {
        const RawResult done = call(&Table::make_raw)(t, session, grant, rank, parts, now);
        return py::make_tuple(list_of(done.parts, [](const auto& one) {
          const PartAt& p = one.second;
          return py::make_tuple(one.first, p.group, p.segment, p.offset, p.length);
        }), one_of<"''", "'held_bytes'", "'no_space'", "'pinning'", "'quota'">(name_of(done.limited)));
      }, "session"_a, "grant"_a, "rank"_a, "parts"_a, "now_ms"_a,
         "parts: (index into the store's keys, group) of a rank, which get slots for raw bytes. Returns those that "
         "have them, (index, group, segment, offset, length), and the limit that the others met.");
}

void bind_grants(py::class_<BoundTable>& c) {
  c.def("lookup", [](BoundTable& t, uint64_t session, uint64_t member, const Id16& request, uint32_t epoch,
                     std::vector<Key> keys, uint32_t readers, uint64_t skip_tokens, uint64_t now, bool computes,
                     bool is_apart) {
     LookupCall wanted{request, epoch, std::move(keys), readers, skip_tokens, computes, is_apart};
     return call(&Table::lookup)(t, session, member, wanted, now);
   }, "session"_a, "member"_a, "request"_a, "epoch"_a, "keys"_a, py::kw_only(), "readers"_a, "skip_tokens"_a,
      "now_ms"_a, "computes"_a = false, "is_apart"_a = false,
      "computes: the request promises to store what nobody alive stores or has stored. is_apart: of a benchmark, which "
      "`reuse` leaves out.")
      .def("withdraw", call(&Table::withdraw), "session"_a, "request"_a, "Drops the request's promises.")
      .def("hold", call(&Table::hold), "session"_a, "member"_a, "request"_a, "keys"_a, "now_ms"_a,
           "A lookup of single keys, not of a chain.")
      .def("peek", call(&Table::peek), "namespace"_a, "keys"_a, "The hit in tokens; without lease or use.")
      .def("chunks_in", call(&Records::chunks_in), "namespace"_a, "Records that are not FREE.")
      .def("children", call(&Table::children), "namespace"_a, "key"_a,
           "Chunks, stored or being stored, that follow this one.")
      .def("fates", [](BoundTable& t, uint32_t space, const std::vector<Key>& keys) {
        std::vector<std::tuple<uint32_t, const char*, uint64_t, uint64_t>> out;
        for (const FateRun& run : call(&Table::fates)(t, space, keys))
          out.emplace_back(run.chunks, name_of(run.fate), run.at_ms, run.used_ms);
        return out;
      }, "namespace"_a, "keys"_a,
         "Runs of chunks: (chunks, 'ready' | 'being_stored' | 'unknown' | why they are gone, when, last use).")
      .def("changes", call(&Table::changes), "namespace"_a, "since"_a, "at_most"_a,
           "([(key, whether lookups find it)], oldest first; the next `since`; False: more than 65,536 changes ago).")
      .def("all_changes", [](BoundTable& t, uint64_t since, size_t at_most) {
        auto [changes, next, complete] = call(&Table::all_changes)(t, since, at_most);
        std::vector<std::tuple<uint32_t, Key, bool, Key>> out;
        out.reserve(changes.size());
        for (const Change& one : changes)
          out.emplace_back(one.space, one.key, one.is_there, call(&Chunks::parent_of)(t, one.space, one.key));
        return std::make_tuple(std::move(out), next, complete);
      }, "since"_a, "at_most"_a,
         "[(namespace, key, whether lookups find it, its parent's key or zeros)], oldest first; the next `since`; "
         "False: more than 65,536 changes ago.")
      .def("ready", [](BoundTable& t, uint64_t start, uint32_t budget) {
        auto [found, next] = call(&Chunks::ready)(t, start, budget);
        std::vector<std::tuple<uint32_t, Key, bool, Key>> out;
        for (const Ready& one : found) out.emplace_back(one.space, one.key, true, one.parent);
        return std::make_pair(std::move(out), next);
      }, "start"_a, "budget"_a,
         "The same of the chunks that lookups find, from the place `start` on, and the next place; -1: it has reached "
         "the last.");
}

void bind_grant_ends(py::class_<BoundTable>& c) {
  c.def("release", call(&Table::release), "session"_a, "grant"_a, "ranks"_a,
        "Returns the ranks that remain. A repeat is harmless; foreign_grant for another session's grant.")
      .def("leased_parts", [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks) {
        const auto found = call(&Table::leased_parts)(t, session, grant, chunks);
        return list_of(found, [](const LeasedPart& one) {
          const auto& [chunk, part] = one;
          return py::make_tuple(chunk, part.segment, part.offset, part.length, part.checksum);
        });
      }, "session"_a, "grant"_a, "chunks"_a,
         "All parts of those chunks of a lease that lookups find: (chunk, segment, offset, length, checksum).")
      .def("mismatch", [](BoundTable& t, uint64_t session, uint64_t grant, const std::vector<uint32_t>& chunks) {
        auto [space, keys] = call(&Table::mismatch)(t, session, grant, chunks);
        return std::make_pair(space, py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * kKeyBytes));
      }, "session"_a, "grant"_a, "chunks"_a,
         "Takes chunks of a lease, whose checksums did not match, out of use. `chunks`: counted from token 0. Returns "
         "the namespace of the lease, and the keys of the chunks that were taken out.")
      .def("abort", call(&Table::abort), "session"_a, "grant"_a, "ranks"_a, "Unpublished chunks are removed.")
      .def("cancel", call(&Table::cancel), "session"_a, "member"_a, "grant"_a,
           "D3: the member that asked for a lease or reservation, and never handed out its plan, cancels it.")
      .def("keep", call(&Table::keep), "member"_a, "grant"_a, "now_ms"_a)
      .def("done", call(&Table::done), "member"_a, "grant"_a, "ranks"_a,
           "D1: these ranks have ended their work. ranks []: the member that asked for the grant has.")
      .def("grants", call(&Grants::page), "session"_a = 0, py::kw_only(), "from_place"_a = 0, "limit"_a = SIZE_MAX,
           "Grants that have a holder, oldest first, from that place on, at most `limit`. session 0: of all sessions.")
      .def("grant", call(&Grants::view), "grant"_a, "None if it was never given, or all holders are discharged.")
      .def("open_grants", call(&Grants::open_grants), "session"_a, "request"_a,
           "How many grants of the session have a holder left; whether one was asked for as `request`.");
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
  py::class_<BoundCensus>(m, "Census",
          "Counts a table's chunks while it changes (csrc/table/census.h). Times are the server clock's; 0: not known.")
      .def(py::init([](BoundTable& of, std::optional<std::pair<uint32_t, Key>> below,
                       std::vector<std::pair<uint32_t, Key>> named, std::optional<std::vector<uint32_t>> search,
                       uint32_t sought, const std::optional<std::pair<Key, Key>>& keys) {
        Survey survey;
        if (below) std::tie(survey.space, survey.below) = *below;
        survey.named = std::move(named);
        survey.is_search = search.has_value();
        if (search) survey.spaces = std::move(*search);
        survey.sought = sought;
        survey.from.bytes[0] = 1;  // no keys are sought
        if (keys) std::tie(survey.from, survey.to) = *keys;
        std::lock_guard lock(of.table->mutex);
        Census census(of.table->part<Records>(), std::move(survey));
        return std::unique_ptr<BoundCensus>(new BoundCensus{py::cast(&of), of, std::move(census)});
      }), "table"_a, py::kw_only(), "below"_a = py::none(), "named"_a = std::vector<std::pair<uint32_t, Key>>{},
          "search"_a = py::none(), "sought"_a = 0, "keys"_a = py::none(),
          "`below`: a namespace and a key: counts what goes on from that chunk, in place of all. `named`: namespaces "
          "and keys of chunks to find the prefixes of. `search`: lists the prefixes of these namespaces, and of others "
          "only those that hold one of the first `sought` chunks of `named`, or a chunk with a key from keys[0] to "
          "keys[1].")
      .def("step", counted<uint32_t>(&Census::step), "budget"_a,
           "Looks at about that many chunks; True: all are counted.")
      .def("spaces", [](BoundCensus& c) {
        return list_of(counted<>(&Census::spaces)(c), [](const auto& one) {
          const auto& [space, n] = one;
          return py::make_tuple(space, n.chunks, n.bytes, n.oldest, n.newest);
        });
      }, "Namespace, chunks, bytes, oldest and newest use.")
      .def("prefixes", [](BoundCensus& c, std::vector<uint32_t> spaces, size_t most, uint32_t start) {
        auto page = counted<const std::vector<uint32_t>&, size_t, uint32_t>(&Census::prefixes)(c, spaces, most, start);
        auto found = list_of(page.found, [](const PrefixCount& p) {
          return py::make_tuple(p.space, p.first, p.chunks, p.bytes, p.born_ms, p.used_ms, p.uses, p.last,
                                p.last_chunks, p.fork, p.shared_chunks, p.shared_bytes, p.branches, p.kept);
        });
        return py::make_tuple(std::move(found), page.all, page.next);
      }, "namespaces"_a, "most"_a, "start"_a = 0,
         "[(namespace, first key, chunks, bytes, stored, last used, uses, last key, its depth, key at the fork, its "
         "depth, bytes up to there, branches, whether a chunk is kept)], most used first, from the place `start` on; "
         "how many there are; where the next page starts, or 0.")
      .def("named", [](BoundCensus& c) {
        return list_of(counted<>(&Census::named)(c), [](const NamedChunk& n) {
          return py::make_tuple(n.name, n.first, n.depth);
        });
      }, "[(index in `named`, first key of its prefix, its depth)].");
}

auto adopt(const Mapping& region, uint64_t pool_id, uint64_t lock_inode,
           const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& segments, uint64_t limit_bytes,
           uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms, double session_cap, double total_cap,
           uint64_t grace_ms) {
  std::vector<SegmentFacts> facts;
  for (auto& [id, offset, bytes] : segments) facts.push_back({id, SegmentState::kLive, offset, bytes});
  TableOptions options{pool_id, lock_inode, 0,          limit_bytes, 0,        0,
                       ask_ms,  settle_ms,  suspect_ms, session_cap, total_cap, grace_ms};
  Adoption found;
  std::unique_ptr<Table> table;
  {
    py::gil_scoped_release nogil;
    table = std::make_unique<Table>(region, options, facts, &found);
  }
  py::typing::Dict<py::str, py::int_> counts(
      "clock_ms"_a = found.clock_ms, "chunks"_a = found.chunks, "dropped"_a = found.dropped,
      "aborted"_a = found.aborted, "replaced"_a = found.replaced, "cleared"_a = found.cleared,
      "leases"_a = found.leases, "reservations"_a = found.reservations, "sessions"_a = found.sessions,
      "members"_a = found.members);
  return py::make_tuple(BoundTable{py::cast(&region), std::move(table)}, std::move(counts));
}

std::vector<std::tuple<uint32_t, std::string, uint64_t, uint64_t>> stored_segments(
    const Mapping& mapping, uint64_t pool_id, uint64_t lock_inode) {
  std::vector<std::tuple<uint32_t, std::string, uint64_t, uint64_t>> out;
  for (const SegmentFacts& s : Table::stored_segments(mapping, {pool_id, lock_inode}))
    out.emplace_back(s.segment, name_of(s.state), s.data_offset, s.data_bytes);
  return out;
}

void bind_making(py::class_<BoundTable>& c) {
  c.def(py::init([](const Mapping& region, uint64_t pool_id, uint64_t incarnation, uint64_t limit_bytes,
                    uint64_t max_records, uint64_t max_grants, uint64_t ask_ms, uint64_t settle_ms, uint64_t suspect_ms,
                    double session_cap, double total_cap, uint64_t lock_inode, uint64_t grace_ms) {
    TableOptions options{pool_id, lock_inode, incarnation, limit_bytes, max_records, max_grants,
                         ask_ms,  settle_ms,  suspect_ms,  session_cap, total_cap,   grace_ms};
    return BoundTable{py::cast(&region), std::make_unique<Table>(region, options)};
  }), "region"_a, py::kw_only(), "pool_id"_a, "incarnation"_a, "limit_bytes"_a, "max_records"_a, "max_grants"_a,
      "ask_ms"_a = 60'000, "settle_ms"_a = 3'000, "suspect_ms"_a = 6'000, "session_cap"_a = 0.5, "total_cap"_a = 0.75,
      "lock_inode"_a = 0, "grace_ms"_a = 10'000)
      .def_static("adopt", &adopt, "region"_a, py::kw_only(), "pool_id"_a, "lock_inode"_a, "segments"_a,
                  "limit_bytes"_a, "ask_ms"_a = 60'000, "settle_ms"_a = 3'000, "suspect_ms"_a = 6'000,
                  "session_cap"_a = 0.5, "total_cap"_a = 0.75, "grace_ms"_a = 10'000,
                  "Takes over the region of an earlier server of the pool, with its capacities.\n\n"
                  "segments: (id, data_offset, data_bytes) of the live and retiring ones, as found in memory. Returns "
                  "the table and a dict with clock_ms, and with counts of chunks, dropped, aborted, replaced, cleared, "
                  "leases, reservations, sessions, members. Raises TableError wrong_version or not_adoptable; then "
                  "nothing was changed.")
      .def_static("stored_segments", &stored_segments, "region"_a, py::kw_only(), "pool_id"_a, "lock_inode"_a,
                  "(id, 'live' | 'retiring' | 'gone', data_offset, data_bytes) of each. Raises what adopt raises.")
      .def_static("region_bytes", &Region::bytes_for, "max_records"_a, "max_grants"_a,
                  "Bytes that a region needs for that many records (of up to 4 parts) and live grants.")
      .def_property_readonly("incarnation", [](const BoundTable& t) { return t.table->incarnation(); })
      .def_property_readonly("first_incarnation", [](const BoundTable& t) { return t.table->first_incarnation(); },
                             "That of the pool's first server; it stays when another server adopts the pool.");
}

}  // namespace

void bind_table(py::module_& m) {
  static py::exception<kvdock::TableError> error(m, "TableError");
  error.doc() =
      "A refused call: `code` is stable (docs/operate/errors.md), `found` and `wanted` name the values; None: there is "
      "none.";
  error.attr_with_type_hint<py::str>("code") = "";
  error.attr_with_type_hint<py::object>("found") = py::none();
  error.attr_with_type_hint<py::object>("wanted") = py::none();
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
  bind_tenant_view(m);
  bind_results(m);
  py::class_<BoundTable> c(m, "Table",
          "Chunks, grants and members of one pool: docs/understand/lifetime_protocol.md, in one flat region.\n\n"
          "All times are the server clock in milliseconds, passed in. Keys are 32 bytes each, concatenated. Ids of "
          "requests, stores, sessions and members are 16-byte digests made by the caller. Raises TableError; nothing "
          "is half done when it does.");
  bind_making(c);
  bind_pool(c);
  bind_chunks(c);
  bind_namespaces(c);
  bind_tenants(c);
  bind_members(c);
  bind_stores(c);
  bind_grants(c);
  bind_grant_ends(c);
  bind_census(m);
}

}  // namespace kvdock
