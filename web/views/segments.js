// A map for each segment: cells in use, ready for use, and not yet prefaulted. It shows amounts, not addresses.

import { el, KeyedList, setAttr, setHidden, setText, svg } from "../dom.js";
import { bytes, plural, share, shareOf } from "../format.js";

const COLUMNS = 32;
const CELLS = 2 * COLUMNS;
const PITCH = 6;
const CELL = 5;
const MOST = 64;

/** The SVG path of cells [from, to). */
function cells(from, to) {
  let path = "";
  for (let i = from; i < to; i += 1) {
    path += `M${(i % COLUMNS) * PITCH} ${Math.floor(i / COLUMNS) * PITCH}h${CELL}v${CELL}h-${CELL}z`;
  }
  return path;
}

/** Whole cells for a part of the segment: at least one if there is any, and not all unless it is the whole. */
function cellsFor(part, whole) {
  if (part <= 0 || whole <= 0) return 0;
  if (part >= whole) return CELLS;
  return Math.min(CELLS - 1, Math.max(1, Math.round((part / whole) * CELLS)));
}

function makeMap() {
  const picture = svg("svg", { viewBox: `0 0 ${COLUMNS * PITCH - 1} ${2 * PITCH - 1}`, role: "img" });
  const path = (cls) => picture.appendChild(svg("path", { class: cls }));
  const [used, ready, later] = [path("used"), path("ready"), path("later")];
  const name = el("b");
  const state = el("span", { cls: "muted" });
  const node = el("li", { children: [el("p", { children: [name, state] }), picture] });
  const update = (segment) => {
    const usedCells = cellsFor(segment.used_bytes, segment.bytes);
    const readyCells = Math.max(usedCells, cellsFor(segment.prefaulted_bytes, segment.bytes));
    setAttr(used, "d", cells(0, usedCells));
    setAttr(ready, "d", cells(usedCells, readyCells));
    setAttr(later, "d", cells(readyCells, CELLS));
    setText(name, `#${segment.id} · ${bytes(segment.bytes)}`);
    setAttr(node, "title", segment.name);
    const done = segment.prefaulted_bytes >= segment.bytes;
    const use = `${shareOf(segment.used_bytes, segment.bytes)} used`;
    const text = done ? use : `${use}, prefault ${share(segment.prefaulted_bytes / Math.max(1, segment.bytes))}`;
    setText(state, text);
    setAttr(picture, "aria-label", `Segment ${segment.id}: ${bytes(segment.bytes)}, ${text}`);
  };
  return { node, update };
}

export function mountSegments(root) {
  const list = el("ul", { cls: "segments", attrs: { "aria-label": "Segments" } });
  const more = el("p", { cls: "muted" });
  root.append(list, more);
  const maps = new KeyedList(list, (segment) => segment.id, makeMap);
  return (segments) => {
    maps.update(segments.slice(0, MOST));
    setHidden(list, segments.length === 0);
    setHidden(more, segments.length <= MOST);
    setText(more, `and ${plural(segments.length - MOST, "segment")} more`);
  };
}
