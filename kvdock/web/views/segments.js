// A map for each segment: cells in use, ready for use, and not yet prefaulted. It shows amounts, not addresses. In a
// pool with many segments, a cell shows how full one segment is, or several together.

import { el, KeyedList, setAttr, setHidden, setText, svg } from "../dom.js";
import { bytes, count, plural, share, shareOf } from "../format.js";

const COLUMNS = 32;
const CELLS = 2 * COLUMNS;
const PITCH = 6;
const CELL = 5;
const MOST_MAPS = 12;
const MOST_CELLS = 256;

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

const sum = (segments, field) => segments.reduce((all, segment) => all + segment[field], 0);

function makeCell() {
  const fill = el("span");
  const node = el("li", { children: [fill] });
  const update = (group) => {
    const use = shareOf(sum(group, "used_bytes"), sum(group, "bytes"));
    fill.style.height = `${(100 * sum(group, "used_bytes")) / Math.max(1, sum(group, "bytes"))}%`;
    const ids = group.length > 1 ? `${group[0].id} to ${group.at(-1).id}` : group[0].id;
    setAttr(node, "title", `Segment ${ids}: ${bytes(sum(group, "bytes"))}, ${use} used`);
  };
  return { node, update };
}

/** Equal groups, at most MOST_CELLS of them, in the order of their ids. */
function grouped(segments) {
  const size = Math.ceil(segments.length / MOST_CELLS);
  return Array.from({ length: Math.ceil(segments.length / size) }, (_, i) => segments.slice(i * size, (i + 1) * size));
}

function inWords(segments) {
  const full = segments.filter((s) => s.used_bytes >= 0.995 * s.bytes).length;
  const empty = segments.filter((s) => s.used_bytes === 0).length;
  return `${plural(segments.length, "segment")}: ${count(full)} full, ${count(empty)} empty.`;
}

export function mountSegments(root) {
  const list = el("ul", { cls: "segments", attrs: { "aria-label": "Segments" } });
  const heat = el("ul", { cls: "heat", attrs: { "aria-hidden": "true" } });
  const said = el("p", { cls: "muted" });
  root.append(list, heat, said);
  const maps = new KeyedList(list, (segment) => segment.id, makeMap);
  const cells = new KeyedList(heat, ([first]) => first.id, makeCell);
  return (segments) => {
    const areMany = segments.length > MOST_MAPS;
    maps.update(areMany ? [] : segments);
    cells.update(areMany ? grouped(segments) : []);
    setHidden(list, areMany || segments.length === 0);
    setHidden(heat, !areMany);
    setHidden(said, !areMany);
    setText(said, areMany ? inWords(segments) : "");
  };
}
