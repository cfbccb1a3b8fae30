// The main figures. A figure that the server does not have is omitted.

import { el, setText } from "../dom.js";
import { about, age, bytes, count, plural, shareOf } from "../format.js";
import { recent } from "../rolling.js";
import { inTrouble } from "./sessions.js";

function troubleWords(sessions) {
  if (!sessions) return "attached";
  const bad = sessions.sessions.flatMap(inTrouble).length;
  return bad ? `attached; ${plural(bad, "process", "processes")} in trouble` : "attached, all processes live";
}

function hitRate({ status: { counters: c }, stats }) {
  const { asked, found, seconds } = recent(stats);
  const whole = `${shareOf(c.hit_tokens ?? 0, c.lookup_tokens ?? 0)} since start`;
  if (!asked) return [shareOf(c.hit_tokens ?? 0, c.lookup_tokens ?? 0), `since start; of ${asOf(c)} looked up`];
  return [shareOf(found, asked), `in the last ${age(seconds)}; ${whole}, of ${asOf(c)} looked up`];
}

const asOf = (c) => plural(c.lookup_tokens ?? 0, "token");

function saved({ status: { counters: c, saved: reported } }) {
  if (!reported?.tokens) return [count(c.hit_tokens ?? 0), `tokens found, in ${plural(c.lookups ?? 0, "lookup")}`];
  if ((reported.seconds ?? null) === null) return [count(reported.tokens), "tokens were loaded instead of computed"];
  return [age(reported.seconds), `of computing: ${plural(reported.tokens, "token")} were loaded instead`];
}

/** A pool with a smaller free share than this counts as full: eviction keeps a little free. */
const FULL_SHARE = 0.05;

/** When the pool will be full; if it is full, how long its oldest chunk was unused. */
function fullWords({ full_in_s: fullInS, oldest_s: oldestS, pool }) {
  const free = pool.free_bytes + pool.limit_bytes - pool.allocated_bytes;
  const isFull = free < FULL_SHARE * pool.limit_bytes;
  if (!isFull && (fullInS ?? null) !== null) return `; full in ${about(fullInS)} at this rate`;
  return isFull && (oldestS ?? null) !== null ? `; the oldest chunk was unused for ${about(oldestS)}` : "";
}

/** The tiles: a name, and a function from bodies to [value, note]. */
const TILES = [
  ["Hit rate", hitRate],
  ["Saved", saved],
  [
    "Cached",
    ({ status }) => {
      const { chunks, pool } = status;
      const share = `${shareOf(pool.ready_bytes, pool.limit_bytes)} of ${bytes(pool.limit_bytes)}`;
      return [bytes(pool.ready_bytes), `${plural(chunks.ready, "chunk")}: ${share}${fullWords(status)}`];
    },
  ],
  ["Engines", ({ status: s, sessions }) => [count(s.sessions), s.sessions ? troubleWords(sessions) : "none attached"]],
  [
    "Leases",
    ({ status: s, leases }) => {
      const oldest = Math.max(0, ...(leases?.leases ?? []).map((g) => g.age_s));
      const beside = plural(s.reservations, "reservation");
      return [count(s.leases), oldest ? `and ${beside}; the oldest is ${age(oldest)} old` : `and ${beside}`];
    },
  ],
];

export function mountTiles(root) {
  const tiles = TILES.map(([name, of]) => {
    const value = el("p", { cls: "figure" });
    const note = el("p", { cls: "muted" });
    root.append(el("div", { cls: "card tile", children: [el("h2", { text: name }), value, note] }));
    return { of, value, note };
  });
  return (bodies) => {
    for (const { of, value, note } of tiles) {
      const [figure, words] = of(bodies);
      setText(value, figure);
      setText(note, words);
    }
  };
}
