// Live events: those that the server has kept, then new ones. They are read only while the panel is open.

import { labelled, select, toggle } from "../choice.js";
import { el, hint, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { age, bytes, clock, count, dateTime, took, words } from "../format.js";
import { EventReader } from "../stream.js";

const MOST = 100;
const KEPT = 500;
/** Kinds of events about memory that come every second in a full pool. */
const OFTEN = new Set(["evicted", "quarantined", "freed"]);
const MEMORY = [
  "evicted", "mismatched", "mismatch_refuted", "quarantined", "freed", "grown", "growth_failed", "shrunk",
  "generation_raised", "tiers_pending", "limits_changed",
];
const ENGINES = ["attached", "suspect", "recovered", "dead", "left"];
const SERVER = ["adopted", "ready", "reread", "draining", "ended"];
const REQUESTS = [
  "looked_up", "leased", "loaded", "cancelled", "request_ended", "reserved", "stored", "committed", "aborted",
  "refused",
];

/** The choices: value, text, kinds of events; no kinds: all. */
const CHOICES = [
  ["notable", "all but requests", [...ENGINES, ...MEMORY.filter((kind) => !OFTEN.has(kind)), ...SERVER, "refused"]],
  ["engines", "engines", ENGINES],
  ["memory", "memory", MEMORY],
  ["server", "the server", SERVER],
  ["requests", "requests", REQUESTS],
  ["all", "everything", []],
];
const BAD = new Set(["dead", "mismatched", "mismatch_refuted", "growth_failed"]);
const WARN = new Set(["suspect", "refused", "aborted", "draining", "gap"]);
/** Fields that are shown elsewhere in the row, or not at all. */
const LEFT_OUT = new Set(["kind", "seq", "at", "tenant", "session", "label"]);
/** Fields whose values are codes. */
const CODES = new Set(["why", "limited_by"]);
/** A key or a namespace, of which only the first digits are shown. */
const LONG_HEX = /^[0-9a-f]{64}$/;
const UNITS = [["_bytes", bytes], ["_us", took], ["_s", age], ["bytes", bytes]];

function figure(name, value) {
  if (typeof value === "number") return (UNITS.find(([end]) => name.endsWith(end))?.[1] ?? count)(value);
  if (Array.isArray(value)) return value.join(", ") || "none";
  if (value && typeof value === "object") {
    const change = ([key, one]) => `${unitless(key)} ${[one].flat().map((each) => figure(key, each)).join(" → ")}`;
    return Object.entries(value).map(change).join(", ") || "none";
  }
  if (CODES.has(name)) return words(value).toLowerCase();
  return LONG_HEX.test(value) ? `${value.slice(0, 12)}…` : String(value);
}

const unitless = (name) => words(name.replace(/_(bytes|us|s)$/, "")).toLowerCase();

function sentence(event) {
  const said = Object.entries(event).filter(([name, value]) => !LEFT_OUT.has(name) && value !== null && value !== "");
  return said.map(([name, value]) => `${unitless(name)} ${figure(name, value)}`).join(" · ");
}

function makeRow() {
  const [when, kind, who, what] = [el("time"), el("b"), el("span", { cls: "who" }), el("span", { cls: "what" })];
  const node = el("li", { children: [when, kind, who, what] });
  const update = (event) => {
    const tone = BAD.has(event.kind) ? "bad" : WARN.has(event.kind) ? "warn" : "idle";
    setAttr(node, "data-tone", tone);
    setText(when, clock(event.at));
    setAttr(when, "title", dateTime(event.at));
    setText(kind, words(event.kind));
    setText(who, event.label || event.session || "");
    setAttr(who, "title", event.label || event.session || "");
    setText(what, sentence(event));
    setAttr(what, "title", sentence(event));
  };
  return { node, update };
}

export function mountEvents(root) {
  let kept = [];
  let waiting = 0;
  let isShown = false;
  const pick = select(CHOICES);
  const follow = toggle("Follow", true, () => {
    waiting = 0;
    draw();
  });
  const note = el("span", { cls: "muted", attrs: { role: "status" } });
  const list = el("ol", { cls: "events", attrs: { "aria-label": "Events, the newest first", tabindex: "0" } });
  const empty = hint("Nothing has happened yet.");
  const trouble = el("p", { cls: "failed" });
  const bar = [labelled("Show", pick), follow, note];
  root.append(el("div", { cls: "bar-of-controls", children: bar }), list, empty, trouble);
  const rows = new KeyedList(list, (event) => event.seq, makeRow);
  setHidden(list, true);
  setHidden(trouble, true);

  const reader = new EventReader(hear, (text) => {
    setHidden(trouble, !text);
    setText(trouble, text ? `No events: ${text}.` : "");
  });
  const isFollowing = () => follow.getAttribute("aria-pressed") === "true";

  function hear(events) {
    kept = [...events.reverse(), ...kept].slice(0, KEPT);
    if (!isFollowing()) waiting += events.length;
    draw();
  }
  let frame = 0;
  function draw() {
    if (!frame) frame = requestAnimationFrame(show);
  }
  function show() {
    frame = 0;
    setText(note, isFollowing() ? "" : `paused; ${count(waiting)} newer`);
    if (!isFollowing()) return;
    rows.update(kept.slice(0, MOST));
    setHidden(list, kept.length === 0);
    setHidden(empty, kept.length > 0);
  }
  function read() {
    if (isShown) reader.start(CHOICES.find(([value]) => value === pick.value)[2]);
    else reader.stop();
  }
  pick.addEventListener("change", () => {
    kept = [];
    waiting = 0;
    read();
    draw();
  });

  const update = () => {};
  /** Called at each drawing with whether the panel is visible. */
  update.shown = (now) => {
    if (now === isShown) return;
    isShown = now;
    read();
  };
  return update;
}
