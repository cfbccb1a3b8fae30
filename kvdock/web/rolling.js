// Shares over a while, from the tokens of each interval: the mean of intervals' shares would count a prompt of ten
// tokens as much as one of ten thousand. Pure functions.

const WINDOW_S = 60;
const valuesOf = (stats, name) => stats?.series.find((series) => series.name === name)?.values;

/** Without the remainder that sums of fractions leave: it would read as a share of its own. */
const whole = (n) => (n > 1e-6 ? n : 0);

/** Tokens per second by interval: in prompts, loaded, computed, in the engines' own caches. Null: not all are known. */
function rates(stats) {
  const [prompt, loaded, computed] = ["prompt_tokens", "loaded_tokens", "computed_tokens"].map((name) =>
    valuesOf(stats, name),
  );
  if (!prompt || !loaded || !computed) return null;
  const local = prompt.map((n, i) => whole((n ?? 0) - (loaded[i] ?? 0) - (computed[i] ?? 0)));
  return { prompt, loaded, computed, local };
}

/** The sums over all intervals of the stats; `prompt` is 0 if no request has ended in that time. */
export function recent(stats) {
  const known = rates(stats);
  if (!known) return { prompt: 0, loaded: 0, computed: 0, local: 0, seconds: 0 };
  const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);
  const seconds = known.prompt.length * (stats.interval_s ?? 0);
  const sums = Object.entries(known).map(([name, values]) => [name, sum(values)]);
  return { ...Object.fromEntries(sums), seconds };
}

/** Each point is the share over the minute that ends with it. */
function rolling(parts, wholes, wide) {
  let [part, all] = [0, 0];
  return wholes.map((value, i) => {
    all += (value ?? 0) - (wholes[i - wide] ?? 0);
    part += (parts[i] ?? 0) - (parts[i - wide] ?? 0);
    return all > 1e-6 ? Math.min(1, whole(part) / all) : null;
  });
}

/** Whether no sample was taken, for each interval: every sample has a value of some series. */
function unsampled(series) {
  const length = Math.max(0, ...series.map(({ values }) => values.length));
  return Array.from({ length }, (_, i) => series.every(({ values }) => (values[i] ?? null) === null));
}

/** The runs of intervals without a sample, oldest first: the first and the last, counted from the newest interval. */
export function gaps(series) {
  const found = [];
  const all = unsampled(series);
  all.forEach((isGap, i) => {
    const back = all.length - 1 - i;
    if (isGap && all[i - 1]) found.at(-1).to = back;
    else if (isGap) found.push({ from: back, to: back });
  });
  return found;
}

/** The stats with the shares of each point being those of the minute before it. */
export function rolled(stats) {
  const known = rates(stats);
  if (!known) return stats;
  const isGap = unsampled(stats.series);
  const wide = Math.max(1, Math.round(WINDOW_S / stats.interval_s));
  const parts = { loaded_share: known.loaded, local_share: known.local };
  const roll = (series) => series.name in parts
    ? { ...series, values: rolling(parts[series.name], known.prompt, wide).map((v, i) => (isGap[i] ? null : v)) }
    : series;
  return { ...stats, series: stats.series.map(roll) };
}
