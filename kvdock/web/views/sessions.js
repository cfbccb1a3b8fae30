// Attached engines: a row for each, with what it loaded and stored, and the state of its processes.

import { el, hint, KeyedList, setAttr, setText } from "../dom.js";
import { age, bytes, count, exact, plural, rankWords, rate, weightsName } from "../format.js";
import { loadedTokens } from "../hits.js";
import { barred, savedCell, Table, twoPart } from "../table.js";
import { loadedFigure, loadedNote, loadedTitle } from "./shares.js";

/** The label under which the server's own mover attaches. */
const MOVER_LABEL = "lower tiers";

const isMover = (status, session) => Boolean(status.mover) && session.label === MOVER_LABEL;

/** The sessions of engines, without the mover's. Null: they are not known. */
export function enginesOf({ status, sessions }) {
  return sessions && sessions.sessions.filter((session) => !isMover(status, session));
}

export function nameOf(session) {
  return session.label || session.instance;
}

/** Processes that are not live. */
export function inTrouble({ members }) {
  return members.filter((m) => m.state !== "live");
}

function roleOf({ scheduler, ranks }) {
  const names = ranks.length ? [rankWords(ranks)] : [];
  if (scheduler) names.unshift("scheduler");
  return names.join(", ") || "no rank";
}

/** Processes that are not live first, then the scheduler, then by rank. */
function order(a, b) {
  const rank = (m) => [m.state === "live" ? 1 : 0, m.scheduler ? 0 : 1, m.ranks[0] ?? -1];
  const [x, y] = [rank(a), rank(b)];
  return x[0] - y[0] || x[1] - y[1] || x[2] - y[2];
}

function makeChip() {
  const role = el("span");
  const state = el("b");
  const beat = el("small");
  const node = el("li", { cls: "chip", children: [role, state, beat] });
  const update = (member) => {
    setAttr(node, "data-state", member.state);
    setAttr(node, "title", `${member.id}: ${member.state}, heartbeat ${age(member.heartbeat_age_s)} ago`);
    setText(role, roleOf(member));
    setText(state, member.state);
    setText(beat, age(member.heartbeat_age_s));
  };
  return { node, update };
}

const WORST = ["dead", "gone", "suspect", "live"];

/** "9 processes: 1 suspect", and the oldest heartbeat. */
function processWords(members) {
  const worst = WORST.find((state) => members.some((m) => m.state === state)) ?? "live";
  const bad = WORST.slice(0, -1).map((state) => [state, members.filter((m) => m.state === state).length]);
  const words = bad.filter(([, n]) => n).map(([state, n]) => `${n} ${state}`).join(", ") || "live";
  return { worst, text: `${plural(members.length, "process", "processes")}: ${words}` };
}

/** One chip for all processes; a click shows each of them. They are drawn only while they are shown. */
function members(cell) {
  const chip = el("span", { cls: "chip" });
  const beat = el("small");
  const list = el("ul", { cls: "chips" });
  const summary = el("summary", { children: [chip, " ", beat] });
  const fold = el("details", { cls: "inner", children: [summary, list] });
  cell.append(fold);
  const chips = new KeyedList(list, (m) => m.id, makeChip);
  let last = [];
  const drawOpen = () => chips.update(fold.open ? last : []);
  fold.addEventListener("toggle", drawOpen);
  return (session) => {
    last = [...session.members].sort(order);
    const { worst, text } = processWords(last);
    setAttr(chip, "data-state", worst);
    setText(chip, text);
    setText(beat, `heartbeat ${age(Math.max(0, ...last.map((m) => m.heartbeat_age_s)))} ago`);
    drawOpen();
  };
}

const hasTotals = (s) => Boolean(s.totals);
const hasSaved = (s) => (s.totals?.hits?.saved_s ?? null) !== null;
const hasCopy = (s) => (s.copy?.load_bytes_per_s ?? s.copy?.store_bytes_per_s ?? null) !== null;

/** The rate of loads, compared with plain copies on the machine. */
const copied = barred(
  (s) => s.copy?.load_bytes_per_s, (s) => s.copy?.ceiling_bytes_per_s, (s) => rate(s.copy?.load_bytes_per_s),
  ({ copy }) => (copy?.ceiling_bytes_per_s ? `of ${rate(copy.ceiling_bytes_per_s)}` : ""),
);

const COLUMNS = [
  { head: "Engine", cls: "wide stacked", make: twoPart(nameOf, (s) => (s.label ? s.instance : "")) },
  {
    head: "Model", cls: "wide stacked",
    make: twoPart(
      (s) => s.model, (s) => [
        `namespace ${s.namespace.slice(0, 8)}`, weightsName(s.weights), s.is_bench && "benchmark",
      ].filter(Boolean).join(", "),
      (s) => `${s.model} · namespace ${s.namespace}`,
    ),
  },
  { head: "Processes", cls: "stacked procs", make: members },
  {
    head: "Loaded", cls: "num share stacked", has: hasTotals,
    make: barred(
      (s) => loadedTokens(s.totals?.hits), (s) => s.totals?.hits?.prompt_tokens,
      (s) => loadedFigure(s.totals), (s) => loadedNote(s.totals), (s) => loadedTitle(s.totals),
    ),
  },
  {
    head: "Read", cls: "num", has: hasTotals, text: ({ totals: t }) => (t ? bytes(t.loaded_bytes) : "–"),
    title: ({ totals: t }) => (t ? `${exact(t.loaded_bytes)} bytes of chunks` : ""),
  },
  { head: "Stored", cls: "num spare", has: hasTotals, text: ({ totals: t }) => (t ? bytes(t.stored_bytes) : "–") },
  { head: "Saved", cls: "num", has: hasSaved, make: savedCell((s) => s.totals?.hits?.saved_s) },
  { head: "Copies at", cls: "num share stacked spare", has: hasCopy, make: copied },
  {
    head: "Holds", cls: "num stacked spare",
    make: twoPart(
      (s) => bytes(s.held_bytes),
      (s) => [s.leases && plural(s.leases, "lease"), s.reservations && plural(s.reservations, "reservation")]
        .filter(Boolean).join(", "),
    ),
  },
  { head: "Attached", cls: "num spare", text: (s) => age(s.age_s) },
];

export function mountSessions(root) {
  const table = new Table(root, {
    label: "Engines",
    columns: COLUMNS,
    keyOf: (s) => s.session,
    limit: 12,
    needsPx: 640,
    allPx: 1000,
    empty: hint("No engine is attached yet.", "kvdock bench"),
  });
  const draw = (bodies) => {
    const looked = (s) => s.totals?.lookup_tokens ?? 0;
    const first = (a, b) => inTrouble(b).length - inTrouble(a).length || looked(b) - looked(a);
    table.update([...enginesOf(bodies)].sort(first));
  };
  draw.digest = (bodies) => {
    const bad = (enginesOf(bodies) ?? []).filter((s) => inTrouble(s).length).length;
    return `${count(bodies.status.sessions)} attached${bad ? `, ${count(bad)} in trouble` : ""}`;
  };
  return draw;
}
