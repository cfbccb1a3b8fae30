// A dialog that explains a request: the server's sentences first, then the figures behind them.

import { get } from "../api.js";
import { button } from "../choice.js";
import { el, setText, withCode } from "../dom.js";
import { age, bytes, clock, count, isLoss, original, plural, rate, savedWords, shareOf, took } from "../format.js";
import { reasonWords, sourceWords } from "../hits.js";

const dialog = () => document.getElementById("explain");

/** Pairs of names and figures; figures that are not known are omitted. */
function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", {
    cls: "pairs",
    children: known.map(([name, value]) =>
      el("div", { children: [el("dt", { text: name }), el("dd", { text: String(value) })] }),
    ),
  });
}

const section = (title, ...children) => el("section", { children: [el("h3", { text: title }), ...children] });

const PATTERNS = 4;
const kindOf = ({ origin, source, why }) => [origin, source, why].filter(Boolean).join(" ");

function runWords({ origin, source, why }) {
  if (origin === "local") return "the engine had";
  return origin === "loaded" ? `loaded from ${sourceWords(source)}` : `computed: ${reasonWords(why)}`;
}

/** The prompt from its first token to its last, as a bar of its runs; the legend sums up those of one kind. */
function promptBar({ prompt_tokens: all, runs }) {
  const kinds = new Map();
  for (const run of runs) {
    const kind = kinds.get(kindOf(run));
    if (kind) kind.tokens += run.tokens;
    else kinds.set(kindOf(run), { tokens: run.tokens, text: runWords(run), cls: classOf(run, kinds) });
  }
  const inOrder = runs.map((run) => `${count(run.tokens)} ${runWords(run)}`).join("; ");
  const bar = el("div", { cls: "bar", attrs: { role: "img", "aria-label": `The prompt from its start: ${inOrder}` } });
  for (const run of runs) {
    const { cls, text } = kinds.get(kindOf(run));
    const piece = el("span", { cls, attrs: { title: `${text} ${count(run.tokens)}` } });
    piece.style.flexGrow = String(run.tokens / Math.max(1, all));
    bar.append(piece);
  }
  const items = [...kinds.values()].map(({ tokens, text, cls }) =>
    el("li", { children: [el("span", { cls: `swatch ${cls}` }), `${text} ${count(tokens)}`] }),
  );
  const legend = el("ul", { cls: "legend", children: items });
  return section(`${plural(all, "token")} in the prompt, in their order`, bar, legend);
}

/** The colour says the origin; the pattern tells several sources or reasons apart. */
function classOf({ origin }, kinds) {
  const same = [...kinds.values()].filter(({ cls }) => cls.includes(origin)).length;
  return `state ${origin} p${same % PATTERNS}`;
}

function lookup(one) {
  const { broke } = one;
  return facts([
    ["At", clock(one.at)],
    ["Engine", one.engine],
    ["Asked for", plural(one.tokens, "token")],
    ["Answered with", `${plural(one.hit_tokens, "token")} (${shareOf(one.hit_tokens, one.tokens)})`],
    ["Waited for", one.last_hit_tokens > one.hit_tokens ? plural(one.last_hit_tokens - one.hit_tokens, "token") : null],
    ["Granted", `${plural(one.chunks, "chunk")}, ${bytes(one.bytes)}`],
    ["Server took", took(one.took_us)],
    ["Reading took", one.loaded_us === null ? null : took(one.loaded_us)],
    ["Ended after", broke && plural(broke.at_tokens, "token")],
    ["Not given", broke && plural(broke.tokens, "token")],
    ["Because", broke?.in_words],
    ["Gone for", broke?.gone_s === null || !broke ? null : age(broke.gone_s)],
    ["Unused before", broke?.unused_s === null || !broke ? null : age(broke.unused_s)],
  ]);
}

function elsewhere({ namespace, tokens, differs }) {
  const head = ["Field", "This request", "That namespace"].map((text) => el("th", { text, attrs: { scope: "col" } }));
  const rows = Object.entries(differs).map(([field, values]) => {
    const name = el("th", { text: field, attrs: { scope: "row" } });
    return el("tr", { children: [name, ...values.map((value) => el("td", { text: JSON.stringify(value) }))] });
  });
  const parts = [el("thead", { children: [el("tr", { children: head })] }), el("tbody", { children: rows })];
  const table = el("table", { cls: "differs", children: parts });
  return section(`Namespace ${namespace.slice(0, 8)} has the first ${plural(tokens, "token")}, and differs`, table);
}

function load({ tokens, took_ms: whole, queue_ms: queue, copy_ms: copy, bytes: n, bytes_per_s: speed }) {
  const ms = (value) => (value === null || value === undefined ? null : took(value * 1000));
  return section("The engine's load", facts([
    ["Tokens", tokens ? count(tokens) : null], ["Bytes", n ? bytes(n) : null], ["Took", ms(whole)],
    ["Waited", ms(queue)], ["Copied for", ms(copy)], ["Copied at", speed ? rate(speed) : null],
  ]));
}

function saved(seconds) {
  return section("Saved", el("p", { cls: isLoss(seconds) ? "alarm" : "", text: `${savedWords(seconds)}.` }));
}

const list = (texts) => el("ul", { cls: "points", children: texts.map((text) => withCode("li", text)) });

function story(e) {
  const parts = [el("ul", { cls: "sentences", children: e.sentences.map(({ text }) => el("li", { text })) })];
  const advice = Object.values(e.advice ?? {});
  if (advice.length) parts.push(section("What may help", list(advice)));
  if (e.outcome?.runs?.length) parts.push(promptBar(e.outcome));
  if (e.load) parts.push(load(e.load));
  if ((e.saved_s ?? null) !== null) parts.push(saved(e.saved_s));
  if (e.lookups.length) parts.push(section(plural(e.lookups.length, "lookup"), ...e.lookups.map(lookup)));
  parts.push(...(e.elsewhere ?? []).map(elsewhere));
  parts.push(section("Where", facts([["Model", e.model], ["Namespace", e.namespace], ["Weights", e.weights || null]])));
  return parts;
}

/** Returns (request, session) => void, which opens a dialog. When it is closed, the browser gives back the focus. */
export function mountExplain() {
  const title = el("h2", { attrs: { id: "explain-title" } });
  const body = el("div", { attrs: { role: "status" } });
  const close = button("Close", () => dialog().close());
  dialog().append(el("header", { children: [title, close] }), body);
  dialog().addEventListener("click", (event) => event.target === dialog() && dialog().close());
  return async (request, session) => {
    setText(title, `Request ${request}`);
    body.replaceChildren(el("p", { cls: "hint", text: "Asking the server…" }));
    dialog().showModal();
    try {
      const whose = session ? `?session=${encodeURIComponent(session)}` : "";
      body.replaceChildren(...story(await get(`v1/requests/${encodeURIComponent(original(request))}/explain${whose}`)));
    } catch (error) {
      body.replaceChildren(el("p", { cls: "failed", text: `The server cannot explain it: ${error.message}.` }));
    }
  };
}
