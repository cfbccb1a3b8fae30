// The loop. v1/status is fetched first, once a second; each good answer starts the fetches of the other paths, so a
// path that hangs delays only its own panel. A hidden tab fetches nothing. New figures are drawn in the next frame.

import { get, Link, Source, useToken } from "./api.js";
import { setAttr, setHidden, setText } from "./dom.js";
import { mountAccess } from "./views/access.js";
import { mountGrants } from "./views/grants.js";
import { mountHealth } from "./views/health.js";
import { mountHistory } from "./views/history.js";
import { mountPool } from "./views/pool.js";
import { mountRequests } from "./views/requests.js";
import { mountSessions } from "./views/sessions.js";
import { mountTiers } from "./views/tiers.js";
import { mountTiles, mountTotals } from "./views/totals.js";

const TICK_MS = 500;
const NEVER_SEEN = "Nothing to show yet. Is the server running? Try: kvdock serve";
const byId = (id) => document.getElementById(id);

const link = new Link();
const sources = {
  stats: new Source("v1/stats", (stats) => Math.max(1, stats?.interval_s ?? 1) * 1000),
  sessions: new Source("v1/sessions"), // asked before those below: while it is locked, so are they
  leases: new Source("v1/leases"),
  requests: new Source("v1/requests"),
  segments: new Source("v1/segments?limit=1000"),
};
let status = null;

/**
 * Each panel: its element's id, paths that it needs, paths that it uses if known, its view, and for which servers it is
 * there. Status is always known.
 */
const panels = [
  { id: "tiles", needs: [], view: mountTiles },
  { id: "totals", needs: [], view: mountTotals },
  { id: "pool", needs: [], uses: ["segments"], view: mountPool },
  { id: "tiers", needs: [], view: mountTiers, isThere: ({ mover }) => Boolean(mover) },
  { id: "history", needs: ["stats"], view: mountHistory },
  { id: "sessions", needs: ["sessions"], view: mountSessions },
  { id: "grants", needs: ["leases"], uses: ["sessions"], view: mountGrants },
  { id: "requests", needs: ["requests"], view: (root) => mountRequests(root, findRequests) },
].map((panel) => ({ ...panel, draw: panel.view(byId(panel.id)), note: addNote(byId(panel.id)) }));

const access = mountAccess((text) => {
  useToken(text);
  sources.sessions.hurry();
  ask();
});
const health = mountHealth({ retry: () => ask(), nextInMs: () => nextAt - performance.now() });

function findRequests(begins) {
  sources.requests.turnTo(begins ? `v1/requests?request=${encodeURIComponent(begins)}` : "v1/requests");
  refresh(sources.requests);
}

/** A line in the panel that is visible only while one of its paths fails. */
function addNote(root) {
  const note = document.createElement("p");
  note.className = "failed";
  note.hidden = true;
  root.append(note);
  return note;
}

let frame = 0;
function redraw() {
  if (!frame) frame = requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  if (!status) return;
  setHidden(byId("first"), true);
  setHidden(byId("main"), false);
  const { locked } = sources.sessions;
  const bodies = { status };
  for (const [name, source] of Object.entries(sources)) bodies[name] = source.body;
  for (const { id, needs, uses = [], draw: drawPanel, note, isThere = () => true } of panels) {
    setHidden(byId(id), !isThere(status) || (locked && needs.some((name) => name !== "stats")));
    if (!isThere(status)) continue;
    const failing = [...needs, ...uses].map((name) => sources[name]).find((source) => source.error);
    setHidden(note, !failing);
    if (failing) setText(note, `Not up to date: ${failing.path}: ${failing.error}.`);
    if (needs.every((name) => bodies[name])) drawPanel(bodies);
  }
  tick();
}

function tick() {
  const nowMs = performance.now();
  const phase = link.phase(nowMs);
  setAttr(document.body, "data-phase", phase);
  health.update({ phase, link, status, ageS: link.ageMs(nowMs) / 1000 });
  if (phase === "gone" && !status) setText(byId("first"), NEVER_SEEN);
}

async function refresh(source) {
  if (await source.refresh(performance.now())) redraw();
}

/** Totals are for everybody. The other paths are asked only while the first of them is not locked. */
async function refreshAll() {
  const { stats, sessions, ...others } = sources;
  refresh(stats);
  if (sessions.locked && !access.isNew()) return;
  await refresh(sessions);
  access.judged(sessions.locked);
  if (sessions.body) Object.values(others).forEach(refresh);
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

document.addEventListener("visibilitychange", () => ask());
window.addEventListener("online", () => ask());
setInterval(() => document.hidden || tick(), TICK_MS);
ask();
