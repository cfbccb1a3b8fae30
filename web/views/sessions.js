// Attached engines: a row for each, in it a chip for each process with its state and the age of its heartbeat.

import { el, hint, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { age, bytes, count, rankWords } from "../format.js";
import { Table, twoPart } from "../table.js";

const MOST_CHIPS = 16;

export function nameOf(session) {
  return session.label || session.instance;
}

function roleOf({ scheduler, ranks }) {
  const names = ranks.length ? [rankWords(ranks)] : [];
  if (scheduler) names.unshift("scheduler");
  return names.join(", ") || "no rank";
}

/** Processes that are not live first, then the scheduler, then by rank. */
function order(a, b) {
  const rank = (m) => [m.state === "live" ? 1 : 0, m.scheduler ? 0 : 1, m.ranks[0] ?? -1];
  const [x, y] = [rank(a), rank(b)];
  return x[0] - y[0] || x[1] - y[1] || x[2] - y[2];
}

function makeChip() {
  const role = el("span");
  const state = el("b");
  const beat = el("small");
  const node = el("li", { cls: "chip", children: [role, state, beat] });
  const update = (member) => {
    setAttr(node, "data-state", member.state);
    setAttr(node, "title", `${member.id}: ${member.state}, heartbeat ${age(member.heartbeat_age_s)} ago`);
    setText(role, roleOf(member));
    setText(state, member.state);
    setText(beat, age(member.heartbeat_age_s));
  };
  return { node, update };
}

function members(cell) {
  const list = el("ul", { cls: "chips" });
  const more = el("small");
  cell.append(list, more);
  const chips = new KeyedList(list, (m) => m.id, makeChip);
  return (session) => {
    const all = [...session.members].sort(order);
    chips.update(all.slice(0, MOST_CHIPS));
    setHidden(more, all.length <= MOST_CHIPS);
    setText(more, `and ${all.length - MOST_CHIPS} more`);
  };
}

const COLUMNS = [
  { head: "Engine", cls: "wide stacked", make: twoPart(nameOf, (s) => (s.label ? s.instance : "")) },
  { head: "Model", cls: "wide stacked", make: twoPart((s) => s.model, (s) => `namespace ${s.namespace.slice(0, 8)}`) },
  { head: "Processes", cls: "widest", make: members },
  { head: "Leases", cls: "num", text: (s) => count(s.leases) },
  { head: "Reservations", cls: "num", text: (s) => count(s.reservations) },
  { head: "Held", cls: "num", text: (s) => bytes(s.held_bytes) },
  { head: "Attached", cls: "num", text: (s) => age(s.age_s) },
];

export function mountSessions(root) {
  const table = new Table(root, {
    label: "Sessions",
    columns: COLUMNS,
    keyOf: (s) => s.session,
    limit: 50,
    empty: hint("No engine is attached yet.", "kvdock bench"),
  });
  return ({ sessions }) => table.update(sessions.sessions);
}
