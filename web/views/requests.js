// Recent lookups and stores, the newest first: their tokens, and how many of them were found.

import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { bytes, clock, count, dateTime, exact, shareOf, took } from "../format.js";
import { Table } from "../table.js";

const isLookup = (r) => r.kind === "lookup";

/** A thin bar and its figure; a store has neither, because it cannot hit. */
function hitShare(cell) {
  const fill = el("span");
  const track = el("span", { cls: "track", attrs: { "aria-hidden": "true" }, children: [fill] });
  const figure = el("span");
  cell.append(track, figure);
  return (r) => {
    setHidden(track, !isLookup(r));
    fill.style.width = `${r.tokens > 0 ? Math.min(100, (100 * r.hit_tokens) / r.tokens) : 0}%`;
    setText(figure, isLookup(r) ? shareOf(r.hit_tokens, r.tokens) : "–");
  };
}

function kind(cell) {
  const text = el("span", { cls: "kind" });
  cell.append(text);
  return (r) => {
    setAttr(text, "data-kind", r.kind);
    setText(text, isLookup(r) ? "Lookup" : "Store");
  };
}

const COLUMNS = [
  { head: "Time", text: (r) => clock(r.at), title: (r) => dateTime(r.at) },
  { head: "Kind", make: kind },
  { head: "Request", cls: "wide", text: (r) => r.request },
  { head: "Engine", cls: "wide", text: (r) => r.label || r.session },
  { head: "Tokens", cls: "num", text: (r) => count(r.tokens), title: (r) => exact(r.tokens) },
  { head: "Hit", cls: "num", text: (r) => (isLookup(r) ? count(r.hit_tokens) : "–") },
  { head: "Hit share", cls: "num share", make: hitShare },
  { head: "Chunks", cls: "num", text: (r) => exact(r.chunks) },
  { head: "Bytes", cls: "num", text: (r) => bytes(r.bytes) },
  { head: "Took", cls: "num", text: (r) => took(r.took_us) },
];

export function mountRequests(root) {
  const table = new Table(root, {
    label: "Recent requests",
    columns: COLUMNS,
    keyOf: (r) => `${r.at} ${r.kind} ${r.session} ${r.request}`,
    limit: 40,
    empty: hint("No request yet. Lookups and stores of attached engines are listed here."),
  });
  return ({ requests }) => table.update([...requests.requests].sort((a, b) => b.at - a.at));
}
