// Recent lookups and stores, the newest first: their tokens, how many of them were found, and how their requests ended,
// once the engines have reported it. A click on a request explains it.

import { button, labelled, search, select, toggle } from "../choice.js";
import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { bytes, clock, count, dateTime, exact, plural, shareOf, took } from "../format.js";
import { barred, Table } from "../table.js";

const KINDS = { lookup: "Lookup", store: "Store", ended: "Ended" };
const isLookup = (r) => r.kind === "lookup";

/** What the list may show: value, text, and whether a row belongs to it. */
const SHOWN = [
  ["requests", "requests", (r) => r.kind !== "store"],
  ["missed", "requests that missed something", (r) => isLookup(r) && r.hit_tokens < r.tokens],
  ["ended", "requests without a lookup", (r) => r.kind === "ended"],
  ["store", "stores", (r) => r.kind === "store"],
  ["all", "all", () => true],
];

/** A figure of the request's outcome; empty until its engine has reported it. */
const reported = (figure) => (r) => (r.outcome ? figure(r.outcome) : "");

function kind(cell) {
  const text = el("span", { cls: "kind" });
  cell.append(text);
  return (r) => {
    setAttr(text, "data-kind", r.kind);
    setText(text, KINDS[r.kind] ?? r.kind);
  };
}

/** The request's id, as a button where there is something to explain, and its engine. */
function named(explain) {
  return (cell) => {
    let last = null;
    const name = button("", () => explain(last.request, last.session), "main link");
    const plain = el("span", { cls: "main" });
    const engine = el("small");
    cell.append(name, plain, " ", engine);
    return (r) => {
      last = r;
      const isStore = r.kind === "store";
      setHidden(name, isStore);
      setHidden(plain, !isStore);
      setText(isStore ? plain : name, r.request);
      setText(engine, r.label || r.session);
      setAttr(cell, "title", `${r.request} · ${r.label || r.session}`);
      setAttr(name, "aria-label", `Explain ${r.request}`);
    };
  };
}

const LOCAL = "Tokens that the engine's own cache had";
const LOADED = "Tokens that the engine loaded";
const NONE_YET = "There is no request yet. Lookups and stores of attached engines are listed here.";
const NONE_SUCH = "No recent request has such an id.";
const NONE_OF_KIND = "No recent request is of this kind.";

const columns = (explain) => [
  { head: "Time", text: (r) => clock(r.at), title: (r) => dateTime(r.at) },
  { head: "Kind", make: kind },
  { head: "Request", cls: "wide stacked", make: named(explain) },
  { head: "Tokens", cls: "num", text: (r) => count(r.tokens), title: tokensTitle },
  { head: "Found", cls: "num", text: (r) => (r.kind === "store" ? "–" : count(r.hit_tokens)) },
  {
    head: "Hit rate", cls: "num share",
    make: barred(
      (r) => r.hit_tokens, (r) => (isLookup(r) ? r.tokens : 0),
      (r) => (isLookup(r) ? shareOf(r.hit_tokens, r.tokens) : "–"),
    ),
  },
  { head: "Local", cls: "num spare detail", text: reported((o) => count(o.local_tokens)), title: () => LOCAL },
  { head: "Loaded", cls: "num spare detail", text: reported((o) => count(o.loaded_tokens)), title: () => LOADED },
  { head: "Why less", cls: "wide why", text: reported((o) => o.why_in_words), title: reported((o) => o.why) },
  { head: "Bytes", cls: "num spare detail", text: (r) => bytes(r.bytes), title: (r) => plural(r.chunks, "chunk") },
  { head: "Took", cls: "num spare detail", text: (r) => (r.kind === "ended" ? "–" : took(r.took_us)) },
];

function tokensTitle(r) {
  return exact(r.tokens) + (r.outcome ? `; the prompt has ${exact(r.outcome.prompt_tokens)}` : "");
}

const keyOf = (r) => `${r.at} ${r.kind} ${r.session} ${r.request}`;

/** find: (text) => void, fetches requests whose ids begin with `text`. explain: (request, session) => void. */
export function mountRequests(root, find, explain) {
  let drawn = [];
  let held = null;
  const empty = hint(NONE_YET);
  const input = search("all");
  const pick = select(SHOWN);
  const newer = el("span", { cls: "muted", attrs: { role: "status" } });
  const pause = toggle("Pause", false, (isDown) => {
    held = isDown ? drawn : null;
    draw();
  });
  const bar = [labelled("Request id begins with", input), labelled("Show", pick), pause, newer];
  root.append(el("div", { cls: "bar-of-controls", children: bar }));
  const table = new Table(root, {
    label: "Recent requests", columns: columns(explain), keyOf, limit: 10, empty, needsPx: 640, allPx: 960,
  });
  input.addEventListener("input", () => {
    find(input.value.trim());
    draw();
  });
  pick.addEventListener("change", draw);

  /** Draws the matching rows of the last answer at once; the server's next answer may have more. */
  function draw() {
    const begins = input.value.trim();
    const [, , belongs] = SHOWN.find(([value]) => value === pick.value);
    const shown = (held ?? drawn).filter((r) => r.request.startsWith(begins) && belongs(r));
    setText(empty, begins ? NONE_SUCH : drawn.length ? NONE_OF_KIND : NONE_YET);
    setText(newer, held ? newerWords(drawn, held) : "");
    table.update(shown);
  }
  return ({ requests }) => {
    drawn = [...requests.requests].sort((a, b) => b.at - a.at);
    draw();
  };
}

function newerWords(drawn, held) {
  const known = new Set(held.map(keyOf));
  const n = drawn.filter((r) => !known.has(keyOf(r))).length;
  return n ? `paused; ${count(n)} newer` : "paused";
}
