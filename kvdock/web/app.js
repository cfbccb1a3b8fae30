// The page's loop. v1/status is fetched first, once a second; each good answer starts the fetches of the other paths,
// so a path that hangs delays only its own panel. A hidden tab fetches nothing. A path that only folded panels show is
// not fetched, unless it is stats, whoami, sessions or config. Nor is a path that this caller may not call, as whoami
// says: the server counts refused calls. New figures are drawn in the next frame.

import { get, hasToken, Link, Source, useToken } from "./api.js";
import { setAttr, setHidden, setText } from "./dom.js";
import { addNote, mountFold } from "./fold.js";
import { mountAccess } from "./views/access.js";
import { mountAdmin } from "./views/admin.js";
import { mountCached } from "./views/cached.js";
import { mountCurve } from "./views/curve.js";
import { mountDays } from "./views/days.js";
import { mountEvents } from "./views/events.js";
import { mountExplain } from "./views/explain.js";
import { mountGrants } from "./views/grants.js";
import { mountHealth } from "./views/health.js";
import { historyPath, mountHistory } from "./views/history.js";
import { mountPool } from "./views/pool.js";
import { mountRequests } from "./views/requests.js";
import { mountSessions } from "./views/sessions.js";
import { mountTiers } from "./views/tiers.js";
import { mountTiles } from "./views/tiles.js";
import { mountTotals } from "./views/totals.js";
import { mountVerdict } from "./views/verdict.js";

const TICK_MS = 500;
/** How many times longer the figures of a panel out of sight may wait. */
const PATIENT = 3;
const NEVER_SEEN = "Nothing to show yet. Is the server running? Try: kvdock serve";
const byId = (id) => document.getElementById(id);
const every = (seconds) => () => seconds * 1000;

const link = new Link();
/**
 * The intervals are a compromise: five visible tabs cost the server less than one per cent of a core
 * (bench/page.py).
 */
const sources = {
  stats: new Source(historyPath(), (stats) => Math.min(15, Math.max(4, stats?.interval_s ?? 4)) * 1000),
  verdict: new Source("v1/verdict", every(5)),
  whoami: new Source("v1/whoami", every(30)),
  // Fetched before the paths below: where this one is refused, they would be refused as well.
  sessions: new Source("v1/sessions", every(3), "sessions"),
  leases: new Source("v1/leases", every(3)),
  requests: new Source("v1/requests", every(3)),
  segments: new Source("v1/segments?limit=1000", every(4)),
  namespaces: new Source("v1/namespaces?limit=1000", every(10), "namespaces"),
  prefixes: new Source("v1/prefixes?limit=100", every(10)),
  curve: new Source("v1/curve", every(15)),
  hits: new Source("v1/hits", every(30)),
  config: new Source("v1/config", every(30)),
};
let status = null;

/**
 * Each panel: its element's id, the paths that it needs, the paths that it uses if they are known, the paths whose
 * figures may be old, its view, and whether it is shown. Status is always known.
 */
const panels = [
  {
    id: "verdict", needs: [], uses: ["verdict"], glances: ["config"],
    view: (root) => mountVerdict(root, changed),
  },
  { id: "tiles", needs: [], glances: ["stats", "sessions", "leases"], view: mountTiles },
  { id: "history", needs: ["stats"], view: (root) => mountHistory(root, (path) => turn(sources.stats, path)) },
  {
    id: "cached", needs: ["namespaces"], uses: ["prefixes"], glances: ["config"],
    view: (root) => mountCached(root, changed, () => refreshAll(), (path) => turn(sources.prefixes, path)),
  },
  { id: "days", needs: ["hits"], view: mountDays },
  { id: "curve", needs: ["curve"], view: mountCurve, isThere: () => !sources.curve.absent },
  { id: "sessions", needs: ["sessions"], view: mountSessions },
  { id: "requests", needs: ["requests"], view: (root) => mountRequests(root, findRequests, mountExplain()) },
  { id: "grants", needs: ["leases"], uses: ["sessions"], view: mountGrants },
  { id: "events", needs: [], view: mountEvents, isThere: () => may("read") && Boolean(sources.sessions.body) },
  { id: "tiers", needs: [], view: mountTiers, isThere: ({ mover }) => Boolean(mover) },
  { id: "pool", needs: [], uses: ["segments"], view: mountPool },
  { id: "totals", needs: [], view: mountTotals },
  {
    id: "admin", needs: ["config"], uses: ["namespaces"], isThere: () => may("admin") && Boolean(sources.config.body),
    view: (root) => mountAdmin(root, changed),
  },
].map((panel) => {
  const root = byId(panel.id);
  const fold = mountFold(root, () => {
    redraw();
    refreshAll();
  });
  return { uses: [], glances: [], isThere: () => true, ...panel, fold, draw: panel.view(root), note: addNote(root) };
});

const access = mountAccess((text) => {
  become(text);
  ask();
});
const health = mountHealth({ retry: () => ask(), nextInMs: () => nextAt - performance.now() });

function turn(source, path) {
  source.turnTo(path);
  refresh(source);
}

function findRequests(begins) {
  turn(sources.requests, begins ? `v1/requests?request=${encodeURIComponent(begins)}` : "v1/requests");
}

/** From now on the page asks with that token, or with none. */
function become(token) {
  useToken(token);
  for (const [name, source] of Object.entries(sources)) if (name !== "stats") source.forget();
}

/** Called after a change: fetches all figures at once. */
function changed() {
  for (const source of Object.values(sources)) source.hurry();
  ask();
}

let frame = 0;
function redraw() {
  if (!frame) frame = requestAnimationFrame(draw);
}

/** Whether this caller has the scope; false until the server has said so. */
const may = (scope) => sources.whoami.body?.scopes.includes(scope) ?? false;
const isForReaders = ({ needs }) => needs.some((name) => name !== "stats");
const isLocked = (panel) => (sources.whoami.locked || sources.whoami.body) && !may("read") && isForReaders(panel);

function draw() {
  frame = 0;
  if (!status) return;
  setHidden(byId("first"), true);
  setHidden(byId("main"), false);
  const bodies = { status };
  for (const [name, source] of Object.entries(sources)) bodies[name] = source.body;
  bodies.statsAt = sources.stats.atUnix;
  showWhose(bodies);
  for (const panel of panels) {
    const { id, needs, uses, draw: drawPanel, note, fold, isThere } = panel;
    const shown = isThere(status) && !isLocked(panel);
    setHidden(byId(id), !shown);
    fold.summarise(shown ? (drawPanel.digest?.(bodies) ?? "") : "");
    const isKnown = needs.every((name) => bodies[name]);
    drawPanel.shown?.(shown && isKnown && fold.isOpen && !document.hidden);
    if (!shown || !fold.isOpen) continue;
    const named = isForReaders(panel) ? ["whoami", ...needs, ...uses] : [...needs, ...uses];
    const failing = named.map((name) => sources[name]).find((source) => source.error);
    setHidden(note, !failing);
    if (failing) setText(note, `Not up to date: ${failing.path}: ${failing.error}.`);
    if (isKnown) drawPanel(bodies);
  }
  tick();
}

/** Totals are of all tenants, lists of the caller's own. */
function showWhose({ whoami }) {
  const isPart = Boolean(whoami?.tenant) && may("read") && !may("admin");
  setHidden(byId("whose"), !isPart);
  if (isPart) setText(byId("whose"), `Totals and charts are of all tenants; lists are of the tenant ${whoami.tenant}.`);
}

function tick() {
  const nowMs = performance.now();
  const phase = link.phase(nowMs);
  setAttr(document.body, "data-phase", phase);
  health.update({ phase, link, status, ageS: link.ageMs(nowMs) / 1000 });
  if (phase === "gone" && !status) setText(byId("first"), NEVER_SEEN);
}

async function refresh(source, patience) {
  if (await source.refresh(performance.now(), patience)) redraw();
}

/**
 * The paths that open panels show, each with its patience: a folded panel adds none, and those of a panel out of sight
 * are fetched less often. `config` is there for whoever may change things.
 */
function wanted() {
  const found = new Map(may("admin") ? [["config", 1]] : []);
  const want = (names, patience) => {
    const allowed = names.filter((name) => name !== "config" || may("admin"));
    for (const name of allowed) found.set(name, Math.min(patience, found.get(name) ?? Infinity));
  };
  for (const { fold, needs, uses, glances, draw: drawPanel } of panels.filter((panel) => panel.fold.isOpen)) {
    const resting = drawPanel.resting?.() ?? [];
    const named = [...needs, ...uses].filter((name) => !resting.includes(name) || !sources[name].body);
    want(named, fold.isSeen ? 1 : PATIENT);
    want(glances, PATIENT);
  }
  return found;
}

/**
 * Totals (stats) and the verdict are for everybody. The others are for callers with the scope `read`, so the page asks
 * first who it is; of them, sessions is fetched first, whether a panel shows it or not.
 */
async function refreshAll() {
  const { stats, verdict, whoami, sessions, ...others } = sources;
  refresh(stats, wanted().get("stats"));
  await refresh(whoami);
  refresh(verdict, wanted().get("verdict")); // of a caller whose token is known, or it would tell less
  if (whoami.body || whoami.locked) access.judged(!may("read"));
  forgetRefused();
  if (!may("read")) return;
  const names = wanted();
  await refresh(sessions, names.get("sessions"));
  if (sessions.locked) whoami.hurry(); // the token was revoked, or may do less now
  if (!sessions.body) return;
  for (const [name, source] of Object.entries(others)) if (names.has(name)) refresh(source, names.get(name));
}

/** A token that the server does not know is not sent again. */
function forgetRefused() {
  if (sources.whoami.locked && hasToken()) become("");
}

let asking = false;
let timer = 0;
let nextAt = 0;

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  const askedUnix = Date.now() / 1000;
  try {
    status = await get("v1/status");
    link.good(performance.now());
    health.restarted(link.restarted(status), status);
    refreshAll();
  } catch (error) {
    link.bad(error.message, askedUnix);
  } finally {
    asking = false;
  }
  nextAt = performance.now() + link.delayMs();
  timer = setTimeout(ask, link.delayMs());
  tick();
  redraw();
}

document.addEventListener("visibilitychange", () => {
  redraw();
  ask();
});
window.addEventListener("online", () => ask());
setInterval(() => document.hidden || tick(), TICK_MS);
ask();
