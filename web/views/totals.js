// The main figures, and every counter of the server, under the names that the server gives them.

import { el, KeyedList, setAttr, setText } from "../dom.js";
import { bytes, count, exact, plural, shareOf, words } from "../format.js";

/** The value and the note of each tile, from v1/status. */
const TILES = [
  {
    name: "Hit share",
    value: ({ counters: c }) => shareOf(c.hit_tokens ?? 0, c.lookup_tokens ?? 0),
    note: ({ counters: c }) => `of ${plural(c.lookup_tokens ?? 0, "token")} looked up`,
  },
  {
    name: "Served from cache",
    value: ({ counters: c }) => count(c.hit_tokens ?? 0),
    note: ({ counters: c }) => `tokens, in ${plural(c.lookups ?? 0, "lookup")}`,
  },
  {
    name: "Ready to be hit",
    value: ({ chunks }) => count(chunks.ready),
    note: ({ chunks, pool }) => `${chunks.ready === 1 ? "chunk" : "chunks"}, ${bytes(pool.ready_bytes)}`,
  },
  {
    name: "Sessions",
    value: ({ sessions }) => count(sessions),
    note: ({ sessions }) => ["no engine attached", "engine attached"][sessions] ?? "engines attached",
  },
  {
    name: "Open grants",
    value: ({ leases, reservations }) => count(leases + reservations),
    note: ({ leases, reservations }) => `${plural(leases, "lease")}, ${plural(reservations, "reservation")}`,
  },
];

export function mountTiles(root) {
  const tiles = TILES.map((tile) => {
    const value = el("p", { cls: "figure" });
    const note = el("p", { cls: "muted" });
    root.append(el("div", { cls: "card tile", children: [el("h2", { text: tile.name }), value, note] }));
    return { ...tile, value: { node: value, of: tile.value }, note: { node: note, of: tile.note } };
  });
  return ({ status }) => {
    for (const tile of tiles) for (const { node, of } of [tile.value, tile.note]) setText(node, of(status));
  };
}

/** Counters that should stay at zero. */
const ALARMING = new Set(["mismatches"]);

export function mountTotals(root) {
  const list = el("dl", { cls: "totals" });
  root.append(list);
  const rows = new KeyedList(list, ([name]) => name, ([name]) => {
    const value = el("dd");
    const node = el("div", { children: [el("dt", { text: words(name) }), value] });
    const update = ([, n]) => {
      setText(value, name.endsWith("_bytes") ? bytes(n) : count(n));
      setAttr(value, "title", exact(n));
      setAttr(node, "data-tone", ALARMING.has(name) && n > 0 ? "bad" : "idle");
    };
    return { node, update };
  });
  return ({ status }) => rows.update(Object.entries(status.counters));
}
