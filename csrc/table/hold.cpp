// Calls for lower tiers: leases of single chunks, wherever they are in their chains, and the removal of chunks that
// were loaded for requests that have ended.
#include <algorithm>

#include "table/table.h"

namespace kvdock {

namespace {

uint64_t hash_keys(const std::vector<Key>& keys) {
  uint64_t h = keys.size();
  for (const Key& key : keys) {
    for (size_t at = 0; at < kKeyBytes; at += 8) {
      uint64_t v;
      std::memcpy(&v, key.bytes + at, 8);
      h = fold(h ^ h >> 29, v);
    }
  }
  return h;
}

}  // namespace

LookupResult Table::hold(uint64_t session, uint64_t member, const Id16& request, const std::vector<Key>& keys,
                         uint64_t now) {
  Members::Asker asker = members_.asker(session, member);
  if (keys.size() > kMaxStoreKeys)
    throw TableError("bad_argument", "too many keys", int64_t(keys.size()), kMaxStoreKeys);
  LookupResult out;
  uint64_t hash = hash_keys(keys);
  Grant* g = grants_.of_request(asker.session, GrantKind::kLease, request);
  if (g && g->body_hash != hash) throw TableError("id_reused", "the request id was used for another lease");
  if (g && !g->live_holders()) throw TableError("grant_closed", "the lease has been released");
  if (!g) g = hold_new(asker, request, keys, hash, now, &out);
  out.part_ends.resize(keys.size());
  if (!g) return out;
  out.lease = g->id;
  grants_.for_each_entry(*g, [&](const GrantEntry& entry) {
    require(entry.index < keys.size(), "a lease names a chunk that it was not asked for", entry.index);
    append_parts(chunks_.record(entry.record), entry.groups, &out.parts);
    out.part_ends[entry.index] = static_cast<uint32_t>(out.parts.size());
  });
  // A chunk that is not leased ends where the one before it ends.
  for (size_t i = 1; i < out.part_ends.size(); ++i) out.part_ends[i] = std::max(out.part_ends[i], out.part_ends[i - 1]);
  return out;
}

// nullptr: none of the keys has a READY chunk, or the caps allow none of them.
Grant* Table::hold_new(const Members::Asker& asker, const Id16& request, const std::vector<Key>& keys, uint64_t hash,
                       uint64_t now, LookupResult* out) {
  uint32_t space = members_.session(asker.session).space();
  grants_.require_entries(static_cast<uint32_t>(keys.size()));
  Grant* g = nullptr;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const KeyEntry* e = chunks_.find(space, keys[i]);
    if (!e || e->ready == kNone) continue;
    uint64_t bytes = chunks_.records().bytes_of(e->ready);
    if (!may_hold(asker.session, bytes)) {
      out->limited = Limit::held_bytes;
      break;
    }
    if (!g) {
      g = &grants_.prepare({GrantKind::kLease, asker, request, 1, now});
      g->body_hash = hash;
      grants_.open(*g);
    }
    const Record& r = chunks_.record(e->ready);
    grants_.add_entry(*g, {r.generation(), e->ready, static_cast<uint16_t>(r.groups), static_cast<uint16_t>(i)});
  }
  return g;
}

uint32_t Table::drop_unread(uint32_t space, const std::vector<Key>& keys) {
  chunks_.namespaces().require(space);
  std::vector<uint32_t> ids;
  for (const Key& key : keys) {
    const KeyEntry* e = chunks_.find(space, key);
    if (!e || e->ready == kNone) continue;
    const Record& r = chunks_.record(e->ready);
    if (r.temporary && r.temp_seen == 0) ids.push_back(e->ready);
  }
  return take_out(std::move(ids), Gone::unread);
}

}  // namespace kvdock
