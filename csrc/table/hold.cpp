// Leases of chunks wherever they stand in their chains, for copies that are no engine's.
#include "table/table.h"

namespace kvdock {

LookupResult Table::hold(uint64_t session, uint64_t member, const Id16& request, const std::vector<Key>& keys,
                         uint64_t now) {
  Members::Asker asker = members_.asker(session, member);
  uint32_t space = members_.session(asker.session).space;
  if (keys.size() > kMaxStoreKeys)
    throw TableError("bad_argument", "too many keys", int64_t(keys.size()), kMaxStoreKeys);
  if (grants_.of_request(asker.session, GrantKind::kLease, request))
    throw TableError("id_reused", "the request id was used for another lease");
  LookupResult out;
  grants_.require_lines(static_cast<uint32_t>(keys.size()));
  Grant* g = nullptr;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const KeyEntry* e = chunks_.find(space, keys[i]);
    bool is_there = e && e->ready != kNone;
    uint64_t bytes = is_there ? chunks_.bytes_of(e->ready) : 0;
    bool fits = chunks_.held_bytes(asker.session) + bytes <= session_room() &&
                chunks_.held_bytes() + bytes <= total_room();
    if (is_there && !fits) out.limited = Limit::held_bytes;
    if (is_there && fits) {
      if (!g) {
        g = &grants_.prepare({GrantKind::kLease, asker, request, 1, now});
        grants_.open(*g);
      }
      const Record& r = chunks_.record(e->ready);
      grants_.add_line(*g, {r.generation(), e->ready, static_cast<uint16_t>(r.groups), static_cast<uint16_t>(i)});
      append_parts(r, r.groups, &out.parts);
    }
    out.part_ends.push_back(static_cast<uint32_t>(out.parts.size()));
  }
  if (g) out.lease = g->id;
  return out;
}

}  // namespace kvdock
