// The main figures. What a server does not know is left out.

import { el, setText } from "../dom.js";
import { age, bytes, count, plural, shareOf } from "../format.js";
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

function saved({ status: { counters: c, saved: told } }) {
  const tokens = told?.tokens ?? c.hit_tokens ?? 0;
  if (told?.seconds === null || told?.seconds === undefined) {
    return [count(tokens), `tokens found, in ${plural(c.lookups ?? 0, "lookup")}`];
  }
  return [age(told.seconds), `of computing: ${plural(tokens, "token")} were not computed again`];
}

/** Name and bodies → [value, note]. */
const TILES = [
  ["Hit rate", hitRate],
  ["Saved", saved],
  [
    "Cached",
    ({ status: { chunks, pool } }) => [
      bytes(pool.ready_bytes),
      `${plural(chunks.ready, "chunk")}: ${shareOf(pool.ready_bytes, pool.limit_bytes)} of ${bytes(pool.limit_bytes)}`,
    ],
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
