// Marks on the clock axis of charts, and their names below the charts: a triangle where the server was started, a
// diamond where limits were changed, a bar where there are no samples.

import { el, setAttr, setText, svg } from "./dom.js";

const SHAPES = { started: "M0-8L4.5 0H-4.5Z", limits: "M0-9L4.5-4.5L0 0L-4.5-4.5Z", gap: "M-5-8H5V0H-5Z", more: "" };
const shapeOf = (kind) => SHAPES[kind] ?? SHAPES.limits;

/** A mark in the chart. update({kind, x, top, bottom}), in pixels of the chart. */
export function makeAxisMark() {
  const node = svg("g");
  const line = node.appendChild(svg("line"));
  const shape = node.appendChild(svg("path"));
  const update = ({ kind, x, top, bottom }) => {
    setAttr(node, "data-kind", kind);
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: top, y2: bottom })) {
      setAttr(line, name, value.toFixed(1));
    }
    setAttr(shape, "d", shapeOf(kind));
    setAttr(shape, "transform", `translate(${x.toFixed(1)} ${bottom})`);
  };
  return { node, update };
}

/** A time without samples in the chart. update({left, right, top, bottom}), in pixels of the chart. */
export function makeGap() {
  const node = svg("rect", { class: "gap" });
  const update = ({ left, right, top, bottom }) => {
    const box = { x: left, y: top, width: Math.max(1, right - left), height: bottom - top };
    for (const [name, value] of Object.entries(box)) setAttr(node, name, value.toFixed(1));
  };
  return { node, update };
}

/** A line of the list below the charts. update({kind, text}). */
export function makeMark() {
  const key = svg("svg", { width: 12, height: 10, viewBox: "-6 -9 12 10", "aria-hidden": "true" });
  const shape = key.appendChild(svg("path"));
  const words = el("span");
  const node = el("li", { children: [key, words] });
  const update = ({ kind, text }) => {
    setAttr(node, "data-kind", kind);
    setAttr(shape, "d", shapeOf(kind));
    setText(words, text);
  };
  return { node, update };
}
