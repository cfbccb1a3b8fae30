// How the pool's bytes are used: a bar, a row for each state, then a small map for each segment.

import { el, hint, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { bytes, exact, plural, shareOf } from "../format.js";
import { mountSegments } from "./segments.js";

const inStates = (p) => p.ready_bytes + p.reserved_bytes + p.quarantined_bytes + p.free_bytes;

/**
 * The states, in the order in which the bar shows them. The server reports the bytes of the first four. A `rare` state
 * without bytes has no row.
 */
const STATES = [
  { id: "ready", name: "Ready", about: "published, can be hit" },
  { id: "reserved", name: "Reserved", about: "being written" },
  { id: "quarantined", name: "Quarantined", about: "a copy may still be running" },
  { id: "free", name: "Free", about: "allocated, empty" },
  {
    id: "other",
    name: "Other",
    about: "headers and rounding",
    bytes: (p) => p.allocated_bytes - inStates(p),
    rare: true,
  },
  { id: "later", name: "Not allocated", about: "up to the limit", bytes: (p) => p.limit_bytes - p.allocated_bytes },
];

export function mountPool(root) {
  const bar = el("div", { cls: "bar", attrs: { role: "img" } });
  const parts = STATES.map(({ id }) => bar.appendChild(el("span", { cls: `state ${id}` })));
  const body = el("tbody");
  const heads = ["State", "Bytes", "Share", "Chunks"].map((text, i) =>
    el("th", { text, cls: i ? "num" : "", attrs: { scope: "col" } }),
  );
  const table = el("table", {
    cls: "states",
    attrs: { "aria-label": "Pool by state" },
    children: [el("thead", { children: [el("tr", { children: heads })] }), body],
  });
  const rows = new KeyedList(body, (row) => row.id, makeRow);
  const summary = el("p", { cls: "muted" });
  const empty = hint("No memory is allocated yet: segments are made as engines need them.");
  root.append(bar, table, summary, empty);
  const drawSegments = mountSegments(root);
  const draw = ({ status: { pool, chunks, pool_id: id, incarnation }, segments }) => {
    const bytesIn = (s) => Math.max(0, s.bytes ? s.bytes(pool) : pool[`${s.id}_bytes`]);
    const all = STATES.map((s) => ({ ...s, bytes: bytesIn(s), chunks: chunks[s.id] ?? null }));
    all.forEach((s, i) => {
      parts[i].style.flexGrow = String(s.bytes / Math.max(1, pool.limit_bytes));
      setHidden(parts[i], s.bytes === 0);
    });
    const spoken = all.filter((s) => s.bytes).map((s) => `${s.name} ${bytes(s.bytes)}`);
    setAttr(bar, "aria-label", `Pool: ${spoken.join(", ")}`);
    const shown = all.filter((s) => !s.rare || s.bytes);
    rows.update(shown.map((s) => ({ ...s, share: shareOf(s.bytes, pool.limit_bytes) })));
    setText(summary, `${describe(pool)} Pool ${id}, incarnation ${incarnation}.`);
    setHidden(empty, pool.segments > 0);
    drawSegments(segments?.segments ?? []);
  };
  draw.digest = ({ status: { pool } }) =>
    `${shareOf(pool.ready_bytes, pool.limit_bytes)} of ${bytes(pool.limit_bytes)} can be hit`;
  return draw;
}

function describe(pool) {
  const share = shareOf(pool.held_bytes, pool.limit_bytes);
  const held = `${bytes(pool.held_bytes)} (${share}) held by leases and reservations`;
  const allocated = `${bytes(pool.allocated_bytes)} allocated in ${plural(pool.segments, "segment")}`;
  const raw = pool.raw_parts ? `, ${plural(pool.raw_parts, "part")} raw` : "";
  const packed = pool.kv_bytes > pool.ready_bytes ? ` Ready: ${bytes(pool.kv_bytes)} of KV, packed${raw}.` : "";
  const ready = `${allocated}, ${bytes(pool.prefaulted_bytes)} prefaulted`;
  return `Limit ${bytes(pool.limit_bytes)}; ${ready}; ${held}.${packed}`;
}

function makeRow({ id, name, about }) {
  const cells = [0, 1, 2].map(() => el("td", { cls: "num" }));
  const swatch = el("span", { cls: `swatch state ${id}` });
  const label = [swatch, el("span", { text: name }), " ", el("small", { text: about })];
  const node = el("tr", { children: [el("th", { attrs: { scope: "row" }, children: label }), ...cells] });
  const update = (state) => {
    setText(cells[0], bytes(state.bytes));
    setAttr(cells[0], "title", `${exact(state.bytes)} bytes`);
    setText(cells[1], state.share);
    setText(cells[2], state.chunks === null ? "" : exact(state.chunks));
  };
  return { node, update };
}
