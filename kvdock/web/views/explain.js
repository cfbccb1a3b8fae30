// A dialog that explains a request: the server's sentences first, then the figures behind them.

import { get } from "../api.js";
import { button } from "../choice.js";
import { el } from "../dom.js";
import { age, bytes, clock, count, plural, rate, shareOf, took } from "../format.js";

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

/** How many of the prompt's tokens came from the engine's own cache, were loaded, and were computed. */
function tokenBar({ prompt_tokens: all, local_tokens: local, loaded_tokens: loaded }) {
  const computed = all - local - loaded;
  const parts = [["local", "the engine had", local], ["loaded", "loaded", loaded], ["computed", "computed", computed]];
  const bar = el("div", { cls: "bar", attrs: { role: "img", "aria-label": "The prompt's tokens" } });
  const legend = el("ul", { cls: "legend" });
  for (const [id, name, n] of parts.filter((part) => part[2] > 0)) {
    const piece = el("span", { cls: `state ${id}` });
    piece.style.flexGrow = String(n / Math.max(1, all));
    bar.append(piece);
    legend.append(el("li", { children: [el("span", { cls: `swatch state ${id}` }), `${name} ${count(n)}`] }));
  }
  return section(`${plural(all, "token")} in the prompt`, bar, legend);
}

function lookup(one) {
  const { broke } = one;
  return facts([
    ["At", clock(one.at)],
    ["Engine", one.engine],
    ["Found", `${count(one.hit_tokens)} of ${count(one.tokens)} tokens (${shareOf(one.hit_tokens, one.tokens)})`],
    ["Granted", `${plural(one.chunks, "chunk")}, ${bytes(one.bytes)}`],
    ["Server took", took(one.took_us)],
    ["Reading took", one.loaded_us === null ? null : took(one.loaded_us)],
    ["Ended after", broke && plural(broke.at_tokens, "token")],
    ["Because", broke?.in_words],
    ["Gone for", broke?.gone_s === null || !broke ? null : age(broke.gone_s)],
    ["Unused before", broke?.unused_s === null || !broke ? null : age(broke.unused_s)],
  ]);
}

function nearest({ namespace, differs }) {
  const head = ["Field", "This request", "That namespace"].map((text) => el("th", { text, attrs: { scope: "col" } }));
  const rows = Object.entries(differs).map(([field, values]) => {
    const name = el("th", { text: field, attrs: { scope: "row" } });
    return el("tr", { children: [name, ...values.map((value) => el("td", { text: JSON.stringify(value) }))] });
  });
  const parts = [el("thead", { children: [el("tr", { children: head })] }), el("tbody", { children: rows })];
  const table = el("table", { cls: "differs", children: parts });
  return section(`Namespace ${namespace.slice(0, 8)} of the same model has chunks, but differs`, table);
}

function load({ tokens, took_ms: whole, queue_ms: queue, copy_ms: copy, bytes: n, bytes_per_s: speed }) {
  const ms = (value) => (value === null || value === undefined ? null : took(value * 1000));
  return section("The engine's load", facts([
    ["Tokens", tokens ? count(tokens) : null], ["Bytes", n ? bytes(n) : null], ["Took", ms(whole)],
    ["Waited", ms(queue)], ["Copied for", ms(copy)], ["Copied at", speed ? rate(speed) : null],
  ]));
}

function saved(seconds) {
  const words = seconds < 0
    ? `Nothing: loading took ${age(-seconds)} longer than computing would have.`
    : `Computing would have taken ${took(seconds * 1e6)} longer than loading.`;
  return section("Saved", el("p", { text: words }));
}

function story(e) {
  const parts = [el("ul", { cls: "sentences", children: e.sentences.map((text) => el("li", { text })) })];
  if (e.outcome) parts.push(tokenBar(e.outcome));
  if (e.load) parts.push(load(e.load));
  if ((e.saved_s ?? null) !== null) parts.push(saved(e.saved_s));
  if (e.lookups.length) parts.push(section(plural(e.lookups.length, "lookup"), ...e.lookups.map(lookup)));
  if (e.nearest) parts.push(nearest(e.nearest));
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
    title.textContent = `Request ${request}`;
    body.replaceChildren(el("p", { cls: "hint", text: "Asking the server…" }));
    dialog().showModal();
    try {
      const whose = session ? `?session=${encodeURIComponent(session)}` : "";
      body.replaceChildren(...story(await get(`v1/requests/${encodeURIComponent(request)}/explain${whose}`)));
    } catch (error) {
      body.replaceChildren(el("p", { cls: "failed", text: `The server cannot explain it: ${error.message}.` }));
    }
  };
}
