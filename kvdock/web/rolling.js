// The hit rate over a while, from the tokens looked up and found in each interval: the mean of intervals' shares would
// count a lookup of ten tokens as much as one of ten thousand. Pure functions.

const WINDOW_S = 60;
const ASKED = "lookup_tokens";
const FOUND = "hit_tokens";
const SHARE = "hit_ratio";

const valuesOf = (stats, name) => stats?.series.find((series) => series.name === name)?.values;

/** Tokens per second that were looked up and found, summed over all intervals of the stats. */
export function recent(stats) {
  const [asked, found] = [valuesOf(stats, ASKED) ?? [], valuesOf(stats, FOUND) ?? []];
  const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);
  return { asked: sum(asked), found: sum(found), seconds: asked.length * (stats?.interval_s ?? 0) };
}

/** The stats with the hit rate of each point being that of the minute before it. */
export function rolled(stats) {
  const [asked, found] = [valuesOf(stats, ASKED), valuesOf(stats, FOUND)];
  if (!asked || !found) return stats;
  const wide = Math.max(1, Math.round(WINDOW_S / stats.interval_s));
  let [tokens, hits] = [0, 0];
  const values = asked.map((value, i) => {
    tokens += (value ?? 0) - (asked[i - wide] ?? 0);
    hits += (found[i] ?? 0) - (found[i - wide] ?? 0);
    return tokens > 1e-6 ? Math.min(1, Math.max(0, hits / tokens)) : null;
  });
  const roll = (series) => (series.name === SHARE ? { ...series, values } : series);
  return { ...stats, series: stats.series.map(roll) };
}
