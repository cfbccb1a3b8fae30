// Open leases and reservations, the oldest first, because operators look for those that stay long.

import { el, hint, setAttr, setText } from "../dom.js";
import { age, bytes, exact, plural, rankWords } from "../format.js";
import { Table, twoPart } from "../table.js";
import { nameOf } from "./sessions.js";

/** An older grant needs attention: a copy takes seconds. */
const OLD_GRANT_S = 60;

function waiting({ remaining, readers, closed }) {
  if (remaining.length === 0) return "";
  const who = remaining.length === readers && readers > 1 ? "all ranks" : rankWords(remaining);
  return closed ? `closed, waiting for ${who}` : who;
}

/** The age, highlighted if the grant is old. */
function aged(cell) {
  const text = el("span");
  cell.append(text);
  return (g) => {
    setText(text, age(g.age_s));
    setAttr(text, "class", g.age_s > OLD_GRANT_S ? "warned" : "");
    setAttr(cell, "title", g.age_s > OLD_GRANT_S ? "Older than a copy should take" : "");
  };
}

const COLUMNS = [
  { head: "Kind", text: (g) => (g.kind === "lease" ? "Lease" : "Reservation"), title: (g) => g.grant },
  { head: "Request", cls: "wide", make: twoPart((g) => g.request, (g) => (g.epoch ? `epoch ${g.epoch}` : "")) },
  { head: "Engine", cls: "wide", make: twoPart((g) => g.engine, () => "") },
  { head: "Unfinished ranks", cls: "wide", make: twoPart((g) => `${g.remaining.length} of ${g.readers}`, waiting) },
  { head: "Chunks", cls: "num", text: (g) => exact(g.chunks) },
  { head: "Bytes", cls: "num", text: (g) => bytes(g.bytes) },
  { head: "Age", cls: "num", make: aged },
];

export function mountGrants(root) {
  const table = new Table(root, {
    label: "Leases and reservations",
    columns: COLUMNS,
    keyOf: (g) => g.grant,
    limit: 10,
    empty: hint("Nothing is being read or written. Rows appear here while an engine loads or stores."),
  });
  const draw = ({ leases, sessions }) => {
    const names = new Map((sessions?.sessions ?? []).map((s) => [s.session, nameOf(s)]));
    const grants = leases.leases.map((g) => ({ ...g, engine: names.get(g.session) ?? g.session }));
    table.update(grants.sort((a, b) => b.age_s - a.age_s));
  };
  draw.digest = ({ status: s }) => `${plural(s.leases, "lease")}, ${plural(s.reservations, "reservation")}`;
  return draw;
}
