// Tiers below the pool: whether each is used, how full it is, how much was stored and loaded, and what that cost.

import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { age, bytes, count, exact, plural, shareOf } from "../format.js";
import { Table } from "../table.js";

const SILENT_S = 5;

const total = (name) => (tier) => tier.counters[name] ?? 0;
const isKnown = (tier) => Object.keys(tier.counters).length > 0;

/** A column of bytes; a dash for a tier that has never been open. */
function column(head, of) {
  return {
    head,
    cls: "num",
    text: (tier) => (isKnown(tier) ? bytes(of(tier)) : "–"),
    title: (tier) => (isKnown(tier) ? `${exact(of(tier))} bytes` : ""),
  };
}

function state(cell) {
  const chip = el("span", { cls: "chip" });
  const why = el("small");
  cell.append(el("span", { cls: "main", children: [chip] }), " ", why);
  return (tier) => {
    setAttr(chip, "data-state", tier.state === "open" ? "live" : "suspect");
    setText(chip, tier.state === "open" ? "used" : tier.state.replace("_", "-"));
    setText(why, tier.why);
  };
}

/** A bar and a share where the tier knows a limit, and its bytes. */
function fill(cell) {
  const used = el("span");
  const track = el("span", { cls: "track", attrs: { "aria-hidden": "true" }, children: [used] });
  const figure = el("span");
  const sizes = el("small");
  cell.append(el("span", { cls: "main", children: [track, figure] }), " ", sizes);
  return (tier) => {
    setHidden(track, tier.bytes_limit === 0);
    used.style.width = `${tier.bytes_limit ? Math.min(100, (100 * tier.bytes_used) / tier.bytes_limit) : 0}%`;
    const { bytes_used: has, bytes_limit: limit } = tier;
    const unlimited = isKnown(tier) ? bytes(has) : "–";
    setText(figure, limit ? shareOf(has, limit) : unlimited);
    setText(sizes, limit ? `${bytes(has)} of ${bytes(limit)}` : "");
    setAttr(cell, "title", isKnown(tier) ? `${exact(tier.bytes_used)} bytes in ${plural(tier.objects, "part")}` : "");
  };
}

function damaged(cell) {
  const figure = el("span");
  cell.append(figure);
  return (tier) => {
    setText(figure, isKnown(tier) ? count(total("damaged")(tier)) : "–");
    setAttr(cell, "title", "Loaded parts that differed from the stored ones; they are deleted");
    setAttr(figure, "class", total("damaged")(tier) ? "alarm" : "");
  };
}

/** What was written to its storage, and what of a day's limit is left. */
function wear(cell) {
  const figure = el("span");
  const left = el("small");
  cell.append(figure, " ", left);
  return (tier) => {
    setText(figure, isKnown(tier) ? bytes(tier.wear_bytes) : "–");
    const { day_left_bytes: now, day_limit_bytes: limit } = tier;
    setText(left, limit ? `${bytes(now)} of ${bytes(limit)} a day left` : "");
  };
}

const COLUMNS = [
  { head: "Tier", text: (tier) => tier.name },
  { head: "State", cls: "stacked", make: state },
  { head: "How full", cls: "num stacked", make: fill },
  column("To write", (tier) => tier.queued_bytes),
  column("Stored", total("stored_bytes")),
  column("Loaded", total("loaded_bytes")),
  { head: "Damaged", cls: "num", make: damaged },
  { head: "Wear", cls: "num stacked", make: wear },
];

const ENDS = {
  fulfilled: "until all chunks came",
  shortened: "until no more chunks came",
  expired: "until the time was over",
  withdrawn: "until the request went on without",
};

function waitWords({ waiting, waits }) {
  const ended = Object.entries(waits).filter(([, n]) => n);
  const earlier = ended.map(([how, n]) => `${count(n)} ${ENDS[how] ?? how}`).join(", ");
  const now = `${plural(waiting, "request waits", "requests wait")} for lower tiers now.`;
  return earlier ? `${now} Earlier waits: ${earlier}.` : now;
}

/** What stores that charge for requests were asked, and what that cost by the prices in their URLs. */
function requestWords(tiers) {
  const said = tiers.map((tier) => {
    const requests = Object.entries(tier.counters).filter(([name]) => name.startsWith("request_"));
    const asked = requests.reduce((sum, [, n]) => sum + n, 0);
    const cost = tier.dollars ? `, for $${tier.dollars.toFixed(2)}` : "";
    return asked ? ` ${plural(asked, "request")} to ${tier.name}${cost}.` : "";
  });
  return said.join("");
}

function troubleWords({ restarts, silent_s: silent, lost_lookups: lost }) {
  const said = [];
  if (silent > SILENT_S) said.push(`The mover has not reported for ${age(silent)}, so these figures are old.`);
  if (restarts) said.push(`The mover ended and was restarted ${plural(restarts, "time")}.`);
  if (lost) said.push(`${plural(lost, "lookup was", "lookups were")} not sent to the mover, because too many waited.`);
  return said.join(" ");
}

export function mountTiers(root) {
  const table = new Table(root, {
    label: "Lower tiers",
    columns: COLUMNS,
    keyOf: (tier) => tier.name,
    limit: 10,
    needsPx: 720,
    empty: hint("The mover has not reported on its tiers yet."),
  });
  const waits = el("p", { cls: "muted after" });
  const trouble = el("p", { cls: "failed" });
  root.append(waits, trouble);
  const draw = ({ status: { tiers, mover } }) => {
    table.update(tiers);
    setText(waits, waitWords(mover) + requestWords(tiers));
    setText(trouble, troubleWords(mover));
    setHidden(trouble, !troubleWords(mover));
  };
  draw.digest = ({ status: { tiers } }) => {
    const off = tiers.filter((tier) => tier.state === "off").length;
    return off ? `${count(off)} of ${plural(tiers.length, "tier")} off` : plural(tiers.length, "tier");
  };
  return draw;
}
