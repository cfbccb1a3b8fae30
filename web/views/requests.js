// Recent lookups and stores, the newest first: their tokens, how many of them were found, and what became of their
// requests once the engines have told it.

import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { bytes, clock, count, dateTime, exact, plural, shareOf, took } from "../format.js";
import { Table, twoPart } from "../table.js";

const KINDS = { lookup: "Lookup", store: "Store", ended: "Ended" };
const isLookup = (r) => r.kind === "lookup";

/** A figure of the request's outcome; nothing as long as its engine has not told it. */
const told = (figure) => (r) => (r.outcome ? figure(r.outcome) : "");

/** A thin bar and its figure; only a lookup can hit. */
function hitShare(cell) {
  const fill = el("span");
  const track = el("span", { cls: "track", attrs: { "aria-hidden": "true" }, children: [fill] });
  const figure = el("span");
  cell.append(track, figure);
  return (r) => {
    setHidden(track, !isLookup(r));
    fill.style.width = `${r.tokens > 0 ? Math.min(100, (100 * r.hit_tokens) / r.tokens) : 0}%`;
    setText(figure, isLookup(r) ? shareOf(r.hit_tokens, r.tokens) : "–");
  };
}

function kind(cell) {
  const text = el("span", { cls: "kind" });
  cell.append(text);
  return (r) => {
    setAttr(text, "data-kind", r.kind);
    setText(text, KINDS[r.kind] ?? r.kind);
  };
}

const COLUMNS = [
  { head: "Time", text: (r) => clock(r.at), title: (r) => dateTime(r.at) },
  { head: "Kind", make: kind },
  { head: "Request", cls: "wide stacked", make: twoPart((r) => r.request, (r) => r.label || r.session) },
  { head: "Tokens", cls: "num", text: (r) => count(r.tokens), title: tokensTitle },
  { head: "Found", cls: "num", text: (r) => (r.kind === "store" ? "–" : count(r.hit_tokens)) },
  { head: "Share", cls: "num share", make: hitShare },
  { head: "Local", cls: "num", text: told((o) => count(o.local_tokens)), title: () => LOCAL },
  { head: "Loaded", cls: "num", text: told((o) => count(o.loaded_tokens)), title: () => LOADED },
  { head: "Why less", cls: "wide why", text: told((o) => o.why_in_words), title: told((o) => o.why) },
  { head: "Bytes", cls: "num spare", text: (r) => bytes(r.bytes), title: (r) => plural(r.chunks, "chunk") },
  { head: "Took", cls: "num spare", text: (r) => (r.kind === "ended" ? "–" : took(r.took_us)) },
];
const LOCAL = "Tokens that the engine's own cache had";
const LOADED = "Tokens that the engine loaded";
const NONE_YET = "No request yet. Lookups and stores of attached engines are listed here.";
const NONE_SUCH = "None of the last requests has an id that begins so.";

function tokensTitle(r) {
  return exact(r.tokens) + (r.outcome ? `; the prompt has ${exact(r.outcome.prompt_tokens)}` : "");
}

/** An input above the table. begin: (text) => void, is given what ids are to begin with. */
function idFilter(root, begin) {
  const input = el("input", {
    attrs: { type: "search", maxlength: "256", autocomplete: "off", spellcheck: "false", placeholder: "all" },
  });
  const label = el("label", { cls: "filter", text: "Request id begins with ", children: [input] });
  input.addEventListener("input", () => begin(input.value.trim()));
  root.append(label);
  return () => input.value.trim();
}

/** find: (text) => void, has the server asked for requests whose ids begin so. */
export function mountRequests(root, find) {
  const empty = hint(NONE_YET);
  let drawn = [];
  const begins = idFilter(root, (text) => {
    find(text);
    draw();
  });
  const table = new Table(root, {
    label: "Recent requests",
    columns: COLUMNS,
    keyOf: (r) => `${r.at} ${r.kind} ${r.session} ${r.request}`,
    limit: 40,
    empty,
  });

  /** What is there of the last answer at once; the server's answer may have more. */
  function draw() {
    const text = begins();
    setText(empty, text ? NONE_SUCH : NONE_YET);
    table.update(drawn.filter((r) => r.request.startsWith(text)));
  }
  return ({ requests }) => {
    drawn = [...requests.requests].sort((a, b) => b.at - a.at);
    draw();
  };
}
