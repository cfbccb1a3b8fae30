// Sentences about what an operator should look at now, or one that nothing needs attention.

import { el, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { age, bytes, count, plural } from "../format.js";
import { enginesOf, inTrouble, nameOf } from "./sessions.js";

/** An older lease needs attention: a copy takes seconds. */
export const OLD_LEASE_S = 60;
const MOST_NAMES = 3;

function names(all) {
  const more = all.length - MOST_NAMES;
  return all.slice(0, MOST_NAMES).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

/** Each rule: bodies → [tone, sentence, id of the panel] or null. A list that is not known is null. */
const RULES = [
  (bodies) => {
    const bad = (enginesOf(bodies) ?? []).filter((s) => inTrouble(s).length);
    if (!bad.length) return null;
    const states = bad.flatMap(inTrouble).map((m) => m.state);
    const isDead = states.some((state) => state !== "suspect");
    const who = states.length === 1 ? `A process of ${nameOf(bad[0])} is ${states[0]}` : null;
    const many = `${plural(states.length, "process", "processes")} of ${names(bad.map(nameOf))} are suspect or dead`;
    return [isDead ? "bad" : "warn", `${who ?? many}.`, "sessions"];
  },
  ({ leases }) => {
    const old = (leases?.leases ?? []).filter((g) => g.age_s > OLD_LEASE_S);
    if (!old.length) return null;
    const oldest = old.reduce((a, b) => (a.age_s > b.age_s ? a : b));
    const many = `${plural(old.length, "lease is", "leases are")} older than ${age(OLD_LEASE_S)}`;
    return ["warn", `${many}, the oldest ${age(oldest.age_s)}.`, "grants"];
  },
  ({ status: { counters: c } }) => c.mismatches
    ? ["bad", `${plural(c.mismatches, "chunk")} did not match their checksum: check the machine's memory.`, "totals"]
    : null,
  ({ status: { tiers = [] } }) => {
    const off = tiers.filter((tier) => tier.state !== "open");
    return off.length ? ["warn", `Not used now: ${names(off.map((t) => `tier ${t.name}`))}.`, "tiers"] : null;
  },
];

/** One sentence if no rule applies. Without the lists of engines and leases their state is not known. */
function allWell({ status: { sessions, pool, chunks }, sessions: known }) {
  if (!sessions) return "Ready, and no engine is attached.";
  const who = `${plural(sessions, "engine is", "engines are")} attached`;
  if (!known) return `Ready: ${who}. Their state is shown after you enter an access token.`;
  return `Nothing needs attention: ${who}, ${bytes(pool.ready_bytes)} in ${plural(chunks.ready, "chunk")} can be hit.`;
}

export function mountVerdict(root) {
  const list = el("ul");
  root.append(el("div", { attrs: { role: "status" }, children: [list] }));
  const rows = new KeyedList(list, ([, , where]) => where, () => {
    const text = el("span");
    const link = el("a", { text: "Show" });
    const node = el("li", { children: [text, " ", link] });
    const update = ([tone, words, where]) => {
      setAttr(node, "data-tone", tone);
      setText(text, words);
      setHidden(link, !where);
      setAttr(link, "href", `#${where}`);
      setAttr(link, "aria-label", `Show: ${words}`);
    };
    return { node, update };
  });
  return (bodies) => {
    const found = RULES.map((rule) => rule(bodies)).filter(Boolean);
    const well = bodies.status.status === "ok" ? [["good", allWell(bodies), ""]] : [];
    rows.update(found.length ? found : well);
  };
}
