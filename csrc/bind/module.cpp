// The extension module `kvdock._core`. Each file of csrc/bind/ binds one folder of csrc/: it checks shapes,
// releases the GIL, and decides nothing.
#include <pybind11/pybind11.h>

#include "base/limits.h"
#include "base/pause.h"
#include "bind/bind.h"
#include "table/layout.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "kvdock's native core: shared memory, chunk table, checksums and copies.";
  m.attr("KEY_BYTES") = kvdock::kKeyBytes;
  m.attr("MAX_KEYS") = kvdock::kMaxKeys;
  m.attr("MOST_PRIORITY") = int{kvdock::kMostPriority};
  m.attr("CONVERSATION_ENDED") = int{kvdock::kConversationEnded};
  m.attr("MAX_STORE_KEYS") = kvdock::kMaxStoreKeys;
  m.attr("MAX_GROUPS") = kvdock::kMaxGroups;
  m.attr("MAX_RANKS") = kvdock::kMaxRanks;
  m.attr("MAX_SEGMENTS") = kvdock::kMaxSegments;
  m.attr("MAX_SESSIONS") = kvdock::kMaxSessions;
  m.attr("MAX_MEMBERS") = kvdock::kMaxMembers;
  m.attr("MAX_SESSION_MEMBERS") = kvdock::kMaxSessionMembers;
  m.attr("MAX_NAMESPACES") = kvdock::kMaxNamespaces;
  m.attr("SEGMENT_IDS") = kvdock::kSegmentIds;
  m.attr("CHECKSUM_PRIME") = kvdock::kChecksumPrime;
  m.attr("CHECKSUM_STRIPE_BYTES") = kvdock::kChecksumStripeBytes;
  kvdock::bind_bytes(m);
  kvdock::bind_cuda(m);
  kvdock::bind_key_filter(m);
  kvdock::bind_keys(m);
  kvdock::bind_pack(m);
  kvdock::bind_part_map(m);
  kvdock::bind_plan(m);
  kvdock::bind_record_heads(m);
  kvdock::bind_table(m);
  kvdock::bind_curve(m);
#ifdef KVDOCK_PAUSE_POINTS
  m.def("pause_at", &kvdock::pause_at, pybind11::call_guard<pybind11::gil_scoped_release>());
#endif
}
