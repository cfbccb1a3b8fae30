// Charts of v1/stats. The server says which series there are, which share a chart, and their units.

import { Chart } from "../charts.js";
import { el, hint, KeyedList, setHidden } from "../dom.js";
import { words } from "../format.js";

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

export function mountHistory(root) {
  const empty = hint("No history yet: the first point appears after one interval.");
  empty.classList.add("card");
  const grid = el("div", { cls: "charts" });
  setHidden(empty, true); // until the first answer
  root.append(empty, grid);
  const charts = new KeyedList(grid, (c) => c.key, ({ title }) => {
    const chart = new Chart(title);
    return { node: chart.node, update: (data) => chart.update(data) };
  });
  return ({ stats }) => {
    const known = grouped(stats).filter(({ series }) => series.some((s) => s.values.length > 0));
    const scale = { intervalS: stats.interval_s, ageS: stats.age_s };
    charts.update(known.map((chart) => ({ ...chart, ...scale })));
    setHidden(empty, known.length > 0);
  };
}
