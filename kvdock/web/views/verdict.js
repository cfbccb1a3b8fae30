// The server's verdict: whether it helps, then what goes wrong, the worst first, each with a command that helps.

import { send } from "../api.js";
import { button } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { share } from "../format.js";

const TONES = { helping: "good", costing: "bad", not_ready: "warn" };
/** The panel that shows more of a finding, by its code. */
const PANELS = {
  loads_cost_time: "days", share_fell: "days", tier_off: "tiers", tier_not_written: "tiers",
  tier_too_slow: "tiers", mover_silent: "tiers",
  engine_died: "sessions", engine_silent: "sessions", chunks_damaged: "events", engine_misreads: "events",
  thrashing: "curve", shares_nothing: "cached", full_of_one_tenant: "cached", grants_old: "grants",
};
/** Findings about what has happened, which end when an operator has seen them. */
const PAST = new Set(["engine_died", "chunks_damaged", "engine_misreads", "pool_left_out", "server_failed"]);
/** A smaller cost is not named. */
const LEAST_COST = 0.001;

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
  return (bodies) => rows.update(told(bodies));
}
