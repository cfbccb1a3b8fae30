// Charts of v1/stats. The server says which series there are, which share a chart, and their units.

import { Chart } from "../charts.js";
import { choice } from "../choice.js";
import { el, hint, KeyedList, setHidden, setText } from "../dom.js";
import { words } from "../format.js";
import { rolled } from "../rolling.js";

const RANGES = [["minutes", "Minutes"], ["hours", "Hours"], ["days", "Days"]];
const DEFAULT = "minutes";
/** From this width on all charts are open; else only the first. */
const ROOMY_PX = 760;

/** A chart for each (chart name, unit), in the server's order: two units never share an axis. */
function grouped(stats) {
  const charts = new Map();
  for (const series of stats.series) {
    const key = `${series.chart}\n${series.unit}`;
    if (!charts.has(key)) charts.set(key, { key, title: words(series.chart), unit: series.unit, series: [] });
    charts.get(key).series.push(series);
  }
  return [...charts.values()];
}

/** turn: (path) => void, makes the page fetch the history from that path. */
export function mountHistory(root, turn) {
  const ranges = choice("How far back", RANGES, DEFAULT, (range) => {
    turn(range === DEFAULT ? "v1/stats" : `v1/stats?over=${range}`);
  });
  const empty = hint("No history yet: the first point appears after one interval.");
  const [main, grid] = [el("div"), el("div", { cls: "charts" })];
  const titles = el("summary");
  const fold = el("details", { cls: "inner", children: [titles, grid] });
  fold.open = innerWidth >= ROOMY_PX;
  for (const node of [empty, fold]) setHidden(node, true); // until the first answer
  root.append(ranges, empty, main, fold);
  const group = new Set();
  const make = ({ title }) => {
    const chart = new Chart(title, group);
    return { node: chart.node, update: (data) => chart.update(data) };
  };
  const [first, others] = [main, grid].map((node) => new KeyedList(node, (c) => c.key, make));
  return ({ stats, statsAt }) => {
    const known = grouped(rolled(stats)).filter(({ series }) => series.some((s) => s.values.length > 0));
    const scale = { intervalS: stats.interval_s, ageS: stats.age_s, endS: statsAt - stats.age_s };
    const [most, ...rest] = known.map((chart) => ({ ...chart, ...scale }));
    first.update(most ? [most] : []);
    others.update(rest);
    setText(titles, rest.map(({ title }) => title).join(", "));
    setHidden(fold, rest.length === 0);
    setHidden(empty, known.length > 0);
  };
}
