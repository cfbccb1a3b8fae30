// The main figures. A figure that the server does not have is omitted.

import { el, setAttr, setText } from "../dom.js";
import { about, age, bytes, count, isLoss, plural, shareOf } from "../format.js";
import { computedTokens, loadedShare, loadedTokens, NOT_REPORTED } from "../hits.js";
import { recent } from "../rolling.js";
import { enginesOf, inTrouble } from "./sessions.js";

function troubleWords(engines) {
  if (!engines) return "attached";
  const bad = engines.flatMap(inTrouble).length;
  return bad ? `attached; ${plural(bad, "process", "processes")} in trouble` : "attached, all processes live";
}

/** The share of prompt tokens that kvdock loaded, lately if requests have ended lately. */
function loaded({ status: { counters: c, hits }, stats }) {
  const known = hits?.prompt_tokens ?? 0;
  const asked = c.lookup_tokens ?? 0;
  const unknown = asked ? `asked for ${plural(asked, "token")}; ${NOT_REPORTED}` : "no request has ended yet";
  if (!known) return ["–", unknown];
  const whole = `${loadedShare(hits)} since start, of ${plural(known, "prompt token")}`;
  const { prompt, seconds, ...lately } = recent(stats);
  const parts = prompt
    ? [lately.loaded, lately.local, lately.computed]
    : [loadedTokens(hits), hits.local_tokens, computedTokens(hits)];
  const [figure, own, computed] = parts.map((part) => shareOf(part, prompt || known));
  const when = prompt ? `in the last ${age(seconds)}; ${whole}` : `since start, of ${plural(known, "prompt token")}`;
  return [figure, `own cache ${own}, computed ${computed}, ${when}`];
}

function saved({ status: { hits } }) {
  const tokens = loadedTokens(hits);
  const seconds = hits?.saved_s ?? null;
  if (seconds === null) {
    return tokens ? [count(tokens), "tokens were loaded instead of computed"] : ["–", "nothing was loaded yet"];
  }
  if (isLoss(seconds)) return [age(seconds), `loads took longer than computing: of ${plural(tokens, "token")}`, "bad"];
  return [age(seconds), `of computing: ${plural(tokens, "token")} were loaded instead`];
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

/** The tiles: a name, and a function from bodies to [value, note, tone]. */
const TILES = [
  ["Loaded from kvdock", loaded],
  ["Saved", saved],
  [
    "Cached",
    ({ status }) => {
      const { chunks, pool } = status;
      const share = `${shareOf(pool.ready_bytes, pool.limit_bytes)} of ${bytes(pool.limit_bytes)}`;
      return [bytes(pool.ready_bytes), `${plural(chunks.ready, "chunk")}: ${share}${fullWords(status)}`];
    },
  ],
  [
    "Engines",
    (bodies) => {
      const n = bodies.status.sessions;
      return [count(n), n ? troubleWords(enginesOf(bodies)) : "none attached"];
    },
  ],
  [
    "Leases",
    ({ status: s, leases }) => {
      const held = s.leases + s.reservations ? (leases?.leases ?? []) : [];  // that list may be older
      const oldest = Math.max(0, ...held.map((g) => g.age_s));
      const beside = plural(s.reservations, "reservation");
      return [count(s.leases), oldest ? `and ${beside}; the oldest is ${age(oldest)} old` : `and ${beside}`];
    },
  ],
];

/** A tile may be narrow, so its figure may be broken before a unit. */
const breakable = (text) => text.replaceAll("\u00a0", " ");

export function mountTiles(root) {
  const tiles = TILES.map(([name, of]) => {
    const value = el("p", { cls: "figure" });
    const note = el("p", { cls: "muted" });
    root.append(el("div", { cls: "card tile", children: [el("h2", { text: name }), value, note] }));
    return { of, value, note };
  });
  return (bodies) => {
    for (const { of, value, note } of tiles) {
      const [figure, words, tone = ""] = of(bodies);
      setText(value, breakable(figure));
      setText(note, words);
      setAttr(value, "class", tone === "bad" ? "figure alarm" : "figure");
    }
  };
}
