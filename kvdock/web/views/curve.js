// The share of the tokens asked for that pools of other sizes would find, as columns from the smallest to an unlimited
// one. It is no hit rate: what is found is not always loaded.

import { labelled, select, setOptions } from "../choice.js";
import { el, hint, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { age, bytes, count, plural, share } from "../format.js";
import { tidy } from "../scale.js";

const FACTORS = { 0.25: "¼ ×", 0.5: "½ ×" };
const factorWords = (factor) => (factor === null ? "∞ ×" : (FACTORS[factor] ?? `${factor} ×`));
const sizeWords = (point) => (point.pool_bytes === null ? "any size" : tidy(bytes(point.pool_bytes)));
/** A column is narrow, so a figure may be broken before its unit. */
const breakable = (text) => text.replaceAll("\u00a0", " ");
const WORTH = 0.01;
/** A pool that finds this much more is named, of several that find as much but for AS_GOOD the smallest. */
const MUCH = 0.1;
const AS_GOOD = 0.02;

function makeColumn() {
  const value = el("b");
  const fill = el("span");
  const size = el("span");
  const times = el("small");
  const node = el("li", { children: [value, el("span", { cls: "column", children: [fill] }), size, times] });
  const update = (point) => {
    setAttr(node, "class", point.factor === 1 ? "now" : "");
    setText(value, point.hit_share === null ? "–" : breakable(share(point.hit_share)));
    fill.style.height = `${100 * (point.hit_share ?? 0)}%`;
    setText(size, breakable(sizeWords(point)));
    setText(times, point.factor === 1 ? "now" : factorWords(point.factor));
  };
  return { node, update };
}

/** Whether more memory would help, and whether less would be enough. */
function advice(points) {
  const at = (factor) => points.find((p) => p.factor === factor)?.hit_share ?? null;
  const now = at(1);
  if (now === null) return "";
  const known = points.filter((p) => p.hit_share !== null);
  const better = known.filter((p) => (p.factor ?? Infinity) > 1 && p.hit_share - now >= WORTH);
  const smaller = known.filter((p) => p.factor !== null && p.factor < 1 && now - p.hit_share < WORTH);
  const half = smaller.length ? ` ${sizeWords(smaller[0])} would find as much.` : "";
  if (!better.length) return `More memory would not find more.${half}`;
  const points100 = (p) => Math.round((p.hit_share - now) * 100);
  const last = better.at(-1);
  const limited = better.filter((p) => p.factor !== null);
  const most = Math.max(...limited.map((p) => p.hit_share));
  const enough = limited.find((p) => most - p.hit_share < AS_GOOD);
  const first = enough && enough.hit_share - now >= MUCH ? enough : better[0];
  const largest = last.factor === null ? "an unlimited one" : `one of ${sizeWords(last)}`;
  const beyond = last === first ? "" : `, ${largest} ${points100(last)}`;
  const name = first.factor === null ? "An unlimited pool" : `A pool of ${sizeWords(first)}`;
  return `${name} would find ${points100(first)} percentage points more of what is asked for${beyond}.`;
}

function spaces({ total, tenants, namespaces }) {
  return [
    ["total", "all", total],
    ...tenants.map((t) => [`tenant ${t.tenant}`, t.tenant ? `tenant ${t.tenant}` : "the server's own user", t]),
    ...namespaces.map((n) => [`namespace ${n.namespace}`, `${n.model} (${n.namespace.slice(0, 8)})`, n]),
  ];
}

export function mountCurve(root) {
  const pick = select([["total", "all"]]);
  const words = el("p", { cls: "advice" });
  const label = "Share found of the tokens asked for, by the size of the pool";
  const list = el("ol", { cls: "curve", attrs: { "aria-label": label } });
  const basis = el("p", { cls: "muted after" });
  const empty = hint("There are too few lookups yet: the estimate needs some hundreds of chunks that were looked up.");
  root.append(labelled("Requests of", pick), words, list, basis, empty);
  const columns = new KeyedList(list, (point) => String(point.factor), makeColumn);
  let last = null;
  pick.addEventListener("change", () => last && draw(last));

  function draw(bodies) {
    last = bodies;
    const { curve } = bodies;
    const all = spaces(curve);
    setOptions(pick, all.map(([id, name]) => [id, name]));
    setHidden(pick.parentNode, all.length < 4); // with one tenant and one namespace all three are the same
    const [, , chosen] = all.find(([id]) => id === pick.value) ?? all[0];
    const isThere = chosen.points.some((point) => point.hit_share !== null);
    for (const node of [words, list, basis]) setHidden(node, !isThere);
    setHidden(empty, isThere);
    if (!isThere) return;
    columns.update(chosen.points);
    setText(words, advice(chosen.points));
    const older = curve.half_life_s ? `; a lookup ${age(curve.half_life_s)} ago counts half` : "";
    const asked = `${plural(chosen.lookups, "lookup")} of ${count(chosen.tokens)} tokens`;
    const policy = `the present eviction policy (${curve.eviction})`;
    const error = Math.max(...chosen.points.map((point) => point.error ?? 0));
    const within = error ? ` It may be off by ${(error * 100).toFixed(1)} percentage points.` : "";
    setText(basis, `Estimated for ${policy}, from ${asked} in the last ${age(curve.covers_s)}${older}.${within}`);
  }
  draw.digest = ({ curve }) => (curve ? advice(curve.total.points) : "");
  return draw;
}
