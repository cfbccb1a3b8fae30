// The server's verdict: whether it helps, then what goes wrong, the worst first, each with a command that helps. Behind
// it, what only the lists show: processes that are not live, and old leases.

import { send } from "../api.js";
import { button } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { age, count, plural, share } from "../format.js";
import { enginesOf, inTrouble, nameOf } from "./sessions.js";

/** An older lease needs attention: a copy takes seconds. */
export const OLD_LEASE_S = 60;
const MOST_NAMES = 3;
const TONES = { helping: "good", costing: "bad", not_ready: "warn" };
/** The panel that shows more of a finding, by its code. */
const PANELS = {
  loads_cost_time: "days", share_fell: "days", tier_off: "tiers", tier_too_slow: "tiers", mover_silent: "tiers",
  engine_died: "sessions", engine_silent: "sessions", chunks_damaged: "events", engine_misreads: "events",
  thrashing: "curve", shares_nothing: "cached", full_of_one_tenant: "cached",
};
/** Findings about what has happened, which end when an operator has seen them. */
const PAST = new Set(["engine_died", "chunks_damaged", "engine_misreads", "pool_left_out", "server_failed"]);
/** A smaller cost is not named. */
const LEAST_COST = 0.001;

function names(all) {
  const more = all.length - MOST_NAMES;
  return all.slice(0, MOST_NAMES).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

/** Each rule: bodies → a row or null. A list that is not known is null. */
const RULES = [
  (bodies) => {
    const bad = (enginesOf(bodies) ?? []).filter((s) => inTrouble(s).length);
    if (!bad.length) return null;
    const states = bad.flatMap(inTrouble).map((m) => m.state);
    const isDead = states.some((state) => state !== "suspect");
    const who = states.length === 1 ? `A process of ${nameOf(bad[0])} is ${states[0]}` : null;
    const many = `${plural(states.length, "process", "processes")} of ${names(bad.map(nameOf))} are suspect or dead`;
    return { key: "processes", tone: isDead ? "bad" : "warn", text: `${who ?? many}.`, panel: "sessions" };
  },
  ({ leases }) => {
    const old = (leases?.leases ?? []).filter((g) => g.age_s > OLD_LEASE_S);
    if (!old.length) return null;
    const oldest = old.reduce((a, b) => (a.age_s > b.age_s ? a : b));
    const many = `${plural(old.length, "lease is", "leases are")} older than ${age(OLD_LEASE_S)}`;
    return { key: "leases", tone: "warn", text: `${many}, the oldest ${age(oldest.age_s)}.`, panel: "grants" };
  },
];

/** The rows of the server's verdict. What keeps the server from being ready stands above all panels already. */
function told({ verdict, config }) {
  if (!verdict) return [];
  const findings = verdict.findings.filter(({ code }) => code !== "not_ready");
  return [
    { key: "headline", tone: TONES[verdict.effect] ?? "info", text: verdict.headline },
    ...findings.map(({ code, severity, text, remedy, cost_share: cost }) => ({
      key: code, tone: severity, remedy, panel: PANELS[code], canEnd: Boolean(config) && PAST.has(code),
      text: cost >= LEAST_COST ? `${text} Cost: about ${share(cost)} of prompt tokens.` : text,
    })),
  ];
}

async function acknowledge() {
  const lines = ["What has died or was damaged so far is named here no more. Counters and metrics keep it."];
  if (!(await confirmed({ title: "Acknowledge what has happened?", lines, verb: "Acknowledge" }))) return "";
  await send("POST", "v1/acknowledge", {});
  return "Acknowledged.";
}

function makeRow(changed) {
  const [text, said] = [el("span"), el("span", { attrs: { role: "status" } })];
  const remedy = el("code");
  const link = el("a", { text: "Show" });
  const end = button("Acknowledge…", async () => {
    try {
      const done = await acknowledge();
      setText(said, done);
      if (done) changed();
    } catch (error) {
      setText(said, `Not done: ${error.message}.`);
    }
  }, "small");
  const node = el("li", { children: [text, " ", remedy, " ", link, " ", end, " ", said] });
  const update = (row) => {
    setAttr(node, "data-tone", row.tone);
    setText(text, row.text);
    setHidden(remedy, !row.remedy);
    setText(remedy, row.remedy ?? "");
    setHidden(link, !row.panel);
    setAttr(link, "href", `#${row.panel ?? ""}`);
    setAttr(link, "aria-label", `Show: ${row.text}`);
    setHidden(end, !row.canEnd);
  };
  return { node, update };
}

/** changed: () => void, called after the operator has changed something. */
export function mountVerdict(root, changed) {
  const list = el("ul");
  root.append(el("div", { attrs: { role: "status" }, children: [list] }));
  const rows = new KeyedList(list, (row) => row.key, () => makeRow(changed));
  return (bodies) => rows.update([...told(bodies), ...RULES.map((rule) => rule(bodies)).filter(Boolean)]);
}
