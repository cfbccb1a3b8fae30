// A line chart in SVG. Title, unit and values come from the server.
// The pointer, or the arrow keys when the chart has the focus, move a cursor; the legend shows the values there.
// Charts of one group move their cursors together. Every node is made once and reused. Where nothing was measured, the
// line is broken, and a share of nothing is drawn as a thin line at its last value; where no sample was taken, nothing
// is drawn but the gap itself.

import { el, KeyedList, setAttr, setText, svg } from "./dom.js";
import { age } from "./format.js";
import { makeAxisMark, makeGap } from "./marks.js";
import { moment, timeTicks, unitOf, valueAxis } from "./scale.js";

const HEIGHT = 168;
const MARGIN = { top: 10, right: 16, bottom: 22 };
const CHARACTER_PX = 6.4;
const LEAST_POINTS = 60;
const LONE_POINT = "m-1.5 0h3"; // a short dash
const STYLES = 6;
const LATE_INTERVALS = 3;
/** The cursor names the marks that are at most this far from it. */
const NEAR_PX = 5;
const STEP = { ArrowLeft: 1, ArrowDown: 1, ArrowRight: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };

export class Chart {
  #data = { series: [], unit: "", intervalS: 1, ageS: 0, endS: 0, span: Infinity, breaks: [], marks: [] };
  #cursor = null; // points before the newest, or null
  #frame = 0;
  #box = { left: 48, width: 0 };

  /** group: the Set of the charts beside it. */
  constructor(title, group = new Set()) {
    this.group = group.add(this);
    this.when = el("span", { cls: "when" });
    const head = el("figcaption", { children: [el("h3", { text: title }), this.when] });
    const legend = el("ul", { cls: "legend" });
    this.svg = svg("svg", { height: HEIGHT, "aria-hidden": "true", focusable: "false" });
    this.plot = el("div", {
      cls: "plot",
      attrs: { tabindex: "0", role: "slider", "aria-label": `${title}, chart`, "aria-valuemin": "0" },
      children: [this.svg],
    });
    this.node = el("figure", { cls: "card chart", children: [head, legend, this.plot] });
    this.#addLayers(legend);
    this.#listen();
    new ResizeObserver(() => this.#schedule()).observe(this.plot);
  }

  /**
   * data.series: [{name, title, values}] of one unit; the newest value is the last, of `endS`, and is `ageS` old.
   * span: how many points the axis has; Infinity: as many as there are values. breaks: [{from, to}], the runs of points
   * without a sample, from the older to the newer, counted from the newest point. marks: [{kind, at, text}].
   */
  update(data) {
    this.#data = data;
    this.#schedule();
  }

  #addLayers(legend) {
    const group = (cls) => this.svg.appendChild(svg("g", { class: cls }));
    const label = (attrs) => () => {
      const node = svg("g");
      const line = node.appendChild(svg("line"));
      const text = node.appendChild(svg("text", attrs));
      return { node, update: (tick) => placeTick(line, text, tick) };
    };
    this.yTicks = new KeyedList(group("ticks"), (t) => t.value, label({ "text-anchor": "end", dy: "0.32em" }));
    this.xTicks = new KeyedList(group("ticks x"), (t) => t.at, label({ "text-anchor": "middle" }));
    this.gaps = new KeyedList(group("gaps"), () => "gap", makeGap);
    this.axisMarks = new KeyedList(group("axis-marks"), (mark) => mark.kind, makeAxisMark);
    this.lines = new KeyedList(group("lines"), (s) => s.name, makeLine);
    this.cursorLine = group("cursor").appendChild(svg("line"));
    this.dots = new KeyedList(this.cursorLine.parentNode, (d) => d.name, makeDot);
    this.legend = new KeyedList(legend, (s) => s.name, makeLegendItem);
  }

  #listen() {
    this.plot.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.plot.addEventListener("pointerdown", (event) => this.#pointAt(event));
    this.plot.addEventListener("pointerleave", () => this.#moveTo(this.#hasFocus() ? 0 : null));
    this.plot.addEventListener("focus", () => this.#hasFocus() && this.#moveTo(this.#cursor ?? 0, true));
    this.plot.addEventListener("blur", () => this.#moveTo(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
  }

  #hasFocus() {
    return this.plot.matches(":focus-visible");
  }

  #key(event) {
    const at = this.#cursor ?? 0;
    let to;
    if (event.key in STEP) to = at + STEP[event.key];
    else if (event.key === "Home") to = this.#points() - 1;
    else if (event.key === "End") to = 0;
    else if (event.key === "Escape") to = null;
    else return;
    event.preventDefault();
    this.#moveTo(to, true);
  }

  #pointAt(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left - this.#box.left;
    this.#moveTo(Math.round((1 - x / this.#box.width) * (this.#span() - 1)));
  }

  /** `speak`: the user pressed a key, so a screen reader should read the new value. */
  #moveTo(cursor, speak = false) {
    for (const chart of this.group) chart.#follow(cursor, speak && chart === this);
  }

  #follow(cursor, speak) {
    this.#cursor = cursor === null ? null : Math.max(0, Math.min(this.#points() - 1, cursor));
    this.#readOut(speak);
    this.#schedule();
  }

  #points() {
    return Math.max(1, ...this.#data.series.map((s) => s.values.length));
  }

  #span() {
    const { span } = this.#data;
    return Number.isFinite(span) ? Math.max(2, span) : Math.max(LEAST_POINTS, this.#points());
  }

  #schedule() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const width = this.plot.clientWidth;
    if (!width) return;
    setAttr(this.svg, "width", width);
    const { series, unit, intervalS, endS, breaks } = this.#data;
    const known = series.flatMap((s) => s.values).filter((v) => v !== null);
    const axis = valueAxis(known.reduce((a, b) => Math.max(a, b), 0), unit);
    const left = Math.max(40, 14 + CHARACTER_PX * Math.max(...axis.ticks.map((t) => t.text.length)));
    this.#box = { left, width: width - left - MARGIN.right };
    const x = (back) => left + this.#box.width * (1 - back / (this.#span() - 1));
    const bottom = HEIGHT - MARGIN.bottom;
    const y = (value) => bottom - ((bottom - MARGIN.top) * value) / axis.top;

    this.yTicks.update(axis.ticks.map((t) => ({ ...t, x: left - 8, y: y(t.value), to: width - MARGIN.right })));
    const ticks = timeTicks(endS, (this.#span() - 1) * intervalS, this.#box.width < 300 ? 3 : 5)
      .map((t) => ({ ...t, x: x((endS - t.at) / intervalS), y: HEIGHT - 6, to: null }))
      .filter((t) => t.x + CHARACTER_PX * t.text.length / 2 <= width); // a word that is cut off says nothing
    this.xTicks.update(ticks);
    this.#drawMarks(x, bottom);
    const alone = { filled: series.length === 1, holds: unit === "ratio", breaks };
    this.lines.update(series.map((s, style) => ({ ...s, style, x, y, bottom, ...alone })));
    this.#drawCursor(x, y, bottom);
    this.#readOut(false);
  }

  #drawMarks(x, bottom) {
    const { intervalS, endS, breaks, marks } = this.#data;
    const [oldest, tall] = [this.#span() - 1, { top: MARGIN.top, bottom }];
    const within = (back) => Math.max(0, Math.min(oldest, back));
    this.gaps.update(
      breaks.map(({ from, to }) => ({ ...tall, left: x(within(from + 1)), right: x(within(to - 1)) })),
    );
    this.axisMarks.update(marks.map(({ kind, at }) => ({ ...tall, kind, x: x(within((endS - at) / intervalS)) })));
  }

  /** The marks at that point of the axis, and whether no sample was taken there. */
  #told(back) {
    const { intervalS, endS, breaks, marks } = this.#data;
    const near = Math.max(0.5, (NEAR_PX * (this.#span() - 1)) / Math.max(1, this.#box.width));
    return {
      isGap: breaks.some(({ from, to }) => back <= from && back >= to),
      beside: marks.filter(({ at }) => Math.abs((endS - at) / intervalS - back) <= near).map(({ text }) => text),
    };
  }

  #drawCursor(x, y, bottom) {
    const at = this.#cursor;
    setAttr(this.cursorLine.parentNode, "visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    for (const [name, value] of Object.entries({ x1: x(at), x2: x(at), y1: MARGIN.top, y2: bottom })) {
      setAttr(this.cursorLine, name, value.toFixed(1));
    }
    this.dots.update(
      this.#data.series.map((s, style) => {
        const value = s.values[s.values.length - 1 - at] ?? null;
        return { name: s.name, style, x: x(at), y: value === null ? null : y(value) };
      }),
    );
  }

  #readOut(speak) {
    const { series, unit, intervalS, ageS, endS } = this.#data;
    const back = this.#cursor ?? 0;
    const latest = ageS > LATE_INTERVALS * intervalS ? `latest, ${age(ageS)} old` : "latest";
    const { isGap, beside } = this.#cursor === null ? { isGap: false, beside: [] } : this.#told(back);
    const when = [back ? moment(endS - back * intervalS, intervalS) : latest, ...beside].join(", ");
    const none = isGap ? "no sample" : "no data";
    const text = (value) => (value === null || value === undefined ? none : unitOf(unit).text(value));
    const items = series.map((s, style) => ({ ...s, style, text: text(s.values[s.values.length - 1 - back]) }));
    setText(this.when, when);
    this.legend.update(items);
    if (!speak && document.activeElement === this.plot) return; // or a screen reader would read every second's value
    setAttr(this.plot, "aria-valuemax", this.#points() - 1);
    setAttr(this.plot, "aria-valuenow", this.#points() - 1 - back);
    setAttr(this.plot, "aria-valuetext", `${when}: ${items.map((s) => `${s.title} ${s.text}`).join(", ")}`);
  }
}

function placeTick(line, text, tick) {
  setText(text, tick.text);
  setAttr(text, "x", tick.x.toFixed(1));
  setAttr(text, "y", tick.y.toFixed(1));
  if (tick.to === null) return;
  for (const [name, value] of Object.entries({ x1: tick.x + 8, x2: tick.to, y1: tick.y, y2: tick.y })) {
    setAttr(line, name, value.toFixed(1));
  }
}

const styleClass = (style) => `s${style % STYLES}`;

function makeLine() {
  const node = svg("g");
  const area = node.appendChild(svg("path", { class: "area" }));
  const held = node.appendChild(svg("path", { class: "held" }));
  const line = node.appendChild(svg("path", { class: "line" }));
  const update = ({ values, style, x, y, bottom, filled, holds, breaks }) => {
    setAttr(node, "class", styleClass(style));
    const runs = unbroken(values);
    const pieces = runs.map((piece) => piece.map(([back, v]) => [x(back).toFixed(1), y(v).toFixed(1)]));
    const ends = pieces.map((piece, i) => {
      const [from, level] = piece.at(-1);
      const [endBack, nextBack] = [runs[i].at(-1)[0], runs[i + 1]?.[0][0] ?? -1];
      const gap = breaks.find((one) => one.from < endBack && one.to > nextBack);
      const next = i + 1 < pieces.length ? pieces[i + 1][0] : [x(0).toFixed(1), level];
      const to = gap ? [x(gap.from + 1).toFixed(1), level] : next;
      return from === to[0] ? "" : `M${from} ${level}H${to[0]}V${to[1]}`;
    });
    setAttr(held, "d", holds ? ends.join("") : "");
    const draw = (piece) => "M" + piece.map((point) => point.join(" ")).join("L");
    const path = pieces.map((piece) => draw(piece) + (piece.length === 1 ? LONE_POINT : ""));
    setAttr(line, "d", path.join(""));
    const under = pieces.map((piece, i) => `${path[i]}V${bottom}H${piece[0][0]}Z`);
    setAttr(area, "d", filled ? under.join("") : "");
  };
  return { node, update };
}

/** Runs of known values, each as a list of [points before the newest, value]. */
function unbroken(values) {
  const pieces = [];
  let open = null;
  values.forEach((value, i) => {
    if (value === null) open = null;
    else if (open) open.push([values.length - 1 - i, value]);
    else pieces.push((open = [[values.length - 1 - i, value]]));
  });
  return pieces;
}

function makeDot() {
  const node = svg("circle", { r: 3.5 });
  const update = ({ style, x, y }) => {
    setAttr(node, "class", styleClass(style));
    setAttr(node, "display", y === null ? "none" : "inline");
    setAttr(node, "cx", x.toFixed(1));
    if (y !== null) setAttr(node, "cy", y.toFixed(1));
  };
  return { node, update };
}

function makeLegendItem() {
  const key = svg("svg", { width: 18, height: 8, "aria-hidden": "true" });
  const stroke = key.appendChild(svg("g")).appendChild(svg("path", { class: "line", d: "M1 4H17" }));
  const title = el("span");
  const value = el("b");
  const node = el("li", { children: [key, title, value] });
  const update = (item) => {
    setAttr(stroke.parentNode, "class", styleClass(item.style));
    setText(title, item.title);
    setText(value, item.text);
  };
  return { node, update };
}
