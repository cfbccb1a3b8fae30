// Charts of v1/stats over a range that people choose. The server says which series there are, which share a chart,
// their units, and when it was started and limits were changed.

import { Chart } from "../charts.js";
import { choice } from "../choice.js";
import { el, hint, KeyedList, setHidden, setText } from "../dom.js";
import { age, bytes, count, words } from "../format.js";
import { makeMark } from "../marks.js";
import { gaps, rolled } from "../rolling.js";
import { moment } from "../scale.js";
import { keep, kept } from "../tab.js";

const HOUR_S = 3600;
const DAY_S = 24 * HOUR_S;
/** The ranges to choose from: the finest series of the server that reach back as far, and how much of them is shown. */
const RANGES = [
  { name: "live", text: "Live", over: "minutes", seconds: Infinity },
  { name: "15min", text: "15 min", over: "hours", seconds: HOUR_S / 4 },
  { name: "1h", text: "1 h", over: "hours", seconds: HOUR_S },
  { name: "6h", text: "6 h", over: "hours", seconds: 6 * HOUR_S },
  { name: "12h", text: "12 h", over: "hours", seconds: 12 * HOUR_S },
  { name: "24h", text: "24 h", over: "days", seconds: DAY_S },
  { name: "7d", text: "7 days", over: "days", seconds: 7 * DAY_S },
  { name: "14d", text: "14 days", over: "days", seconds: 14 * DAY_S },
];
const KEPT_AS = "kvdock-range";
/** From this width on all charts are open; else only the first. */
const ROOMY_PX = 760;
const MOST_MARKS = 6;
/** A server begins a while before its first value. */
const START_S = 10;

const rangeOf = (name) => RANGES.find((range) => range.name === name) ?? RANGES[0];
const pathOf = ({ over }) => (over === "minutes" ? "v1/stats" : `v1/stats?over=${over}`);

/** The path of the history for the range that this tab has chosen. */
export const historyPath = () => pathOf(rangeOf(kept(KEPT_AS)));

/** A chart for each (chart name, unit), in the server's order: two units never share an axis. */
function grouped(series) {
  const charts = new Map();
  for (const one of series) {
    const key = `${one.chart}\n${one.unit}`;
    if (!charts.has(key)) charts.set(key, { key, title: words(one.chart), unit: one.unit, series: [] });
    charts.get(key).series.push(one);
  }
  return [...charts.values()];
}

function markText({ kind, limits = [], pool_bytes: poolBytes = null }) {
  if (kind === "started") return "the server was started";
  const others = limits.filter((name) => name !== "pool_bytes" || poolBytes === null);
  const names = others.map((name) => (name === "quotas" ? "quotas of tenants" : words(name).toLowerCase()));
  return `limits changed: ${[poolBytes === null ? [] : `pool size ${bytes(poolBytes)}`, names].flat().join(", ")}`;
}

/** What happened within the range, the latest first: starts, changes of limits, and times without samples. */
function happened(marks, breaks, { intervalS }) {
  const stops = breaks.map(({ from, fromS, to }) => ({
    kind: "gap", at: fromS,
    text: `no samples for ${age((from - to + 1) * intervalS)}: no server ran, or it was stopped`,
  }));
  return [...marks, ...stops].sort((a, b) => b.at - a.at).map((one) => ({
    ...one, text: `${moment(one.at, intervalS)}: ${one.text}`,
  }));
}

/** turn: (path) => void, makes the page fetch the history from that path. */
export function mountHistory(root, turn) {
  let range = rangeOf(kept(KEPT_AS));
  /** The range of the figures that are drawn: they stay until those of another range have come. */
  let shown = range;
  let [last, old] = [null, null];
  const ranges = choice("How far back", RANGES.map(({ name, text }) => [name, text]), range.name, (name) => {
    range = rangeOf(name);
    keep(KEPT_AS, name);
    old = last;
    turn(pathOf(range));
  });
  const empty = hint("No history yet: the first point appears after one interval.");
  const [main, grid] = [el("div"), el("div", { cls: "charts" })];
  const titles = el("summary");
  const fold = el("details", { cls: "inner", children: [titles, grid] });
  const list = el("ul", { cls: "marks", attrs: { "aria-label": "Marks in the charts, the latest first" } });
  fold.open = innerWidth >= ROOMY_PX;
  for (const node of [empty, fold, list]) setHidden(node, true); // until the first answer
  root.append(ranges, empty, main, list, fold);
  const group = new Set();
  const make = ({ title }) => {
    const chart = new Chart(title, group);
    return { node: chart.node, update: (data) => chart.update(data) };
  };
  const [first, others] = [main, grid].map((node) => new KeyedList(node, (c) => c.key, make));
  const rows = new KeyedList(list, (mark) => mark.kind, makeMark);
  return ({ stats, statsAt }) => {
    last = stats;
    if (stats !== old) shown = range;
    const span = Math.ceil(shown.seconds / stats.interval_s);
    const series = rolled(stats).series.map((one) => ({ ...one, values: one.values.slice(-span) }));
    const scale = { intervalS: stats.interval_s, ageS: stats.age_s, endS: statsAt - stats.age_s };
    const breaks = gaps(series).map((gap) => ({ ...gap, fromS: scale.endS - (gap.from + 1) * scale.intervalS }));
    const points = Number.isFinite(span) ? span : (series[0]?.values.length ?? 0);
    const startS = scale.endS - points * scale.intervalS - (span === Infinity ? START_S : 0);
    const known = (stats.marks ?? []).map((one) => ({ kind: one.kind, at: statsAt - one.age_s, text: markText(one) }));
    const marks = known.filter(({ at }) => at >= startS);
    const charts = grouped(series).filter((chart) => chart.series.some((s) => s.values.length > 0));
    const [most, ...rest] = charts.map((chart) => ({ ...chart, ...scale, span, breaks, marks }));
    first.update(most ? [most] : []);
    others.update(rest);
    const told = most ? happened(marks, breaks, scale) : [];
    const more = told.length - MOST_MARKS;
    rows.update([
      ...told.slice(0, MOST_MARKS), ...(more > 0 ? [{ kind: "more", text: `and ${count(more)} before` }] : []),
    ]);
    setHidden(list, told.length === 0);
    setText(titles, rest.map(({ title }) => title).join(", "));
    setHidden(fold, rest.length === 0);
    setHidden(empty, charts.length > 0);
  };
}
