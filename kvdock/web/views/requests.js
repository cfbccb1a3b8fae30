// Recent lookups and stores, the newest first: what they asked for, and where their prompts' tokens came from, once the
// engines have reported the end of their requests. A click on a request explains it.

import { button, labelled, search, select, toggle } from "../choice.js";
import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { bytes, clock, count, dateTime, plural, took } from "../format.js";
import { computedTokens, hasMissed, hitsOf, loadedTokens, loadedWords, mostlyWhy } from "../hits.js";
import { barred, Table, twoPart } from "../table.js";
import { partsTitle } from "./shares.js";

const KINDS = { lookup: "Lookup", store: "Store", ended: "Ended" };

/** What the list may show: value, text, and whether a row belongs to it. */
const SHOWN = [
  ["requests", "requests", (r) => r.kind !== "store"],
  ["missed", "requests that missed something", (r) => r.hits && hasMissed(r.hits)],
  ["ended", "requests without a lookup", (r) => r.kind === "ended"],
  ["store", "stores", (r) => r.kind === "store"],
  ["all", "all", () => true],
];

/** A figure of the ended request; empty until its engine has reported it. */
const reported = (figure) => (r) => (r.hits ? figure(r.hits) : "");
const parts = reported(partsTitle);

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

const ASKED = {
  lookup: "asked for in whole chunks",
  store: "to be stored",
  ended: "in the prompt; nothing was looked up",
};
const NONE_YET = "There is no request yet. Lookups and stores of attached engines are listed here.";
const NONE_SUCH = "No recent request has such an id.";
const NONE_OF_KIND = "No recent request is of this kind.";

const columns = (explain) => [
  { head: "Time", text: (r) => clock(r.at), title: (r) => dateTime(r.at) },
  { head: "Kind", make: kind },
  { head: "Request", cls: "wide stacked", make: named(explain) },
  {
    head: "Asked for", cls: "num spare detail", text: (r) => (r.kind === "ended" ? "–" : count(r.tokens)),
    title: (r) => `${plural(r.tokens, "token")} ${ASKED[r.kind] ?? ""}`,
  },
  { head: "Prompt", cls: "num", text: reported((h) => count(h.prompt_tokens)), title: parts },
  { head: "Own cache", cls: "num", text: reported((h) => count(h.local_tokens)), title: parts },
  {
    head: "Loaded", cls: "num share stacked noted",
    make: barred(
      (r) => (r.hits ? loadedTokens(r.hits) : 0), (r) => r.hits?.prompt_tokens, reported((h) => count(loadedTokens(h))),
      reported(loadedWords), parts,
    ),
  },
  {
    head: "Computed", cls: "num stacked noted",
    make: twoPart(reported((h) => count(computedTokens(h))), reported(mostlyWhy), parts),
  },
  { head: "Bytes", cls: "num spare detail", text: (r) => bytes(r.bytes), title: (r) => plural(r.chunks, "chunk") },
  { head: "Took", cls: "num spare detail", text: (r) => (r.kind === "ended" ? "–" : took(r.took_us)) },
];

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
    const rows = requests.requests.map((r) => ({ ...r, hits: r.outcome && hitsOf(r.outcome) }));
    drawn = rows.sort((a, b) => b.at - a.at);
    draw();
  };
}

function newerWords(drawn, held) {
  const known = new Set(held.map(keyOf));
  const n = drawn.filter((r) => !known.has(keyOf(r))).length;
  return n ? `paused; ${count(n)} newer` : "paused";
}
