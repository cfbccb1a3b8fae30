// Open leases and reservations, the oldest first, because people look for those that stay long.

import { hint } from "../dom.js";
import { age, bytes, exact, rankWords } from "../format.js";
import { Table, twoPart } from "../table.js";
import { nameOf } from "./sessions.js";

function waiting({ remaining, readers, closed }) {
  if (remaining.length === 0) return "";
  const who = remaining.length === readers && readers > 1 ? "all ranks" : rankWords(remaining);
  return closed ? `closed, waits for ${who}` : who;
}

const COLUMNS = [
  { head: "Kind", cls: "wide", text: (g) => (g.kind === "lease" ? "Lease" : "Reservation"), title: (g) => g.grant },
  { head: "Request", cls: "wide", make: twoPart((g) => g.request, (g) => (g.epoch ? `epoch ${g.epoch}` : "")) },
  { head: "Engine", cls: "wide", text: (g) => g.engine },
  { head: "Still to finish", cls: "wide", make: twoPart((g) => `${g.remaining.length} of ${g.readers}`, waiting) },
  { head: "Chunks", cls: "num", text: (g) => exact(g.chunks) },
  { head: "Bytes", cls: "num", text: (g) => bytes(g.bytes) },
  { head: "Age", cls: "num", text: (g) => age(g.age_s) },
];

export function mountGrants(root) {
  const table = new Table(root, {
    label: "Leases and reservations",
    columns: COLUMNS,
    keyOf: (g) => g.grant,
    limit: 50,
    empty: hint("Nothing is being read or written. Rows appear here while an engine loads or stores."),
  });
  return ({ leases, sessions }) => {
    const names = new Map((sessions?.sessions ?? []).map((s) => [s.session, nameOf(s)]));
    const grants = leases.leases.map((g) => ({ ...g, engine: names.get(g.session) ?? g.session }));
    table.update(grants.sort((a, b) => b.age_s - a.age_s));
  };
}
