// The server's counters, with the names that the server gives them. A click shows what one counts; counters that are
// zero are folded.

import { el, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { bytes, count, exact, plural, words } from "../format.js";
import { meanings } from "../help.js";

/** Counters that should stay at zero. */
const ALARMING = new Set(["mismatches", "refuted_mismatches"]);
const metricOf = (name) => `kvdock_${name}_total`;

function makeRow([name]) {
  const label = el("span", { text: words(name) });
  const value = el("b");
  const meaning = el("p", { cls: "muted", text: "Asking the server…" });
  const href = `manual/operate/metrics_totals.md#${metricOf(name)}`;
  const link = el("a", { text: "What to do about it", attrs: { href } });
  const summary = el("summary", { children: [label, value] });
  const node = el("details", { cls: "counter", children: [summary, meaning, link] });
  node.addEventListener("toggle", async () => {
    if (node.open) setText(meaning, `${(await meanings()).get(metricOf(name)) ?? "The server gives no description"}.`);
  });
  const update = ([, n]) => {
    setText(value, name.endsWith("_bytes") ? bytes(n) : count(n));
    setAttr(value, "title", exact(n));
    setAttr(node, "data-tone", ALARMING.has(name) && n > 0 ? "bad" : "idle");
  };
  return { node: el("li", { children: [node] }), update };
}

export function mountTotals(root) {
  const list = () => el("ul", { cls: "totals" });
  const [some, none] = [list(), list()];
  const summary = el("summary");
  const fold = el("details", { cls: "inner after", children: [summary, none] });
  root.append(some, fold);
  const rows = [some, none].map((each) => new KeyedList(each, ([name]) => name, makeRow));
  const draw = ({ status }) => {
    const all = Object.entries(status.counters);
    const zeros = all.filter(([, n]) => n === 0);
    rows[0].update(all.filter(([, n]) => n !== 0));
    rows[1].update(zeros);
    setHidden(fold, zeros.length === 0);
    setText(summary, `${plural(zeros.length, "counter is", "counters are")} zero`);
  };
  draw.digest = ({ status: { counters: c } }) => plural(c.lookups ?? 0, "lookup");
  return draw;
}
