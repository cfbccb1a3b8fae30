// The limits that can be changed while the server runs, with a control for each that fits its kind of value.

import { send } from "../api.js";
import { labelled, search, select } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, KeyedList } from "../dom.js";
import { bytes, words } from "../format.js";
import { parsedBytes, parsedShare, parsedWhole } from "../parse.js";

/** The choices of limits that are not numbers. */
const CHOICES = { eviction: ["adaptive", "lru"], tier_keep: ["shared", "always"],
  log_level: ["debug", "info", "warning", "error"] };
const sizeText = (n) => (n % 2 ** 20 ? `${n} B` : bytes(n).replaceAll("\u00a0", " "));
const shareText = (x) => `${+(x * 100).toFixed(2)} %`;

/** How a limit is written and read, by its name. */
function kindOf(name) {
  if (name.endsWith("_bytes")) return { text: sizeText, value: parsedBytes };
  if (/_(cap|water)$/.test(name)) return { text: shareText, value: parsedShare };
  if (name in CHOICES) return { text: String, value: String };
  return { text: String, value: parsedWhole };
}

function makeField([name]) {
  const { text, value } = kindOf(name);
  const input = name in CHOICES ? select(CHOICES[name].map((each) => [each, each])) : search("");
  let was = null;
  const update = ([, now]) => {
    const isTouched = was !== null && input.value !== text(was);
    was = now;
    if (!isTouched && document.activeElement !== input) input.value = text(now);
  };
  /** [name, new value, present value]; null if they are equal. */
  const change = () => {
    if (input.value === text(was)) return null;
    const wanted = value(input.value);
    return wanted === was ? null : [name, wanted, was];
  };
  return { node: labelled(words(name), input), update, change };
}

/** The consequences of a change, in sentences. */
function costs(changes, { status: { pool } }) {
  const written = (name, value) => kindOf(name).text(value);
  const lines = changes.map(([name, now, was]) => `${words(name)}: ${written(name, was)} → ${written(name, now)}.`);
  const size = changes.find(([name]) => name === "pool_bytes");
  if (size && size[1] < size[2]) {
    const lost = Math.max(0, pool.ready_bytes - size[1]);
    const least = lost ? `At least ${bytes(lost)} that can be hit are` : "Some chunks that can be hit may be";
    lines.push(`${least} evicted: whole segments are emptied and freed.`);
  }
  if (changes.some(([name]) => name === "eviction")) lines.push("The new policy has not learned from earlier uses.");
  return [...lines, "The change lasts until the server ends."];
}

/** action: as in admin.js. */
export function mountLimits(root, action, changed) {
  let bodies = null;
  const grid = el("div", { cls: "limits" });
  const fields = new Map();
  const list = new KeyedList(grid, ([name]) => name, (entry) => {
    const field = makeField(entry);
    fields.set(entry[0], field);
    return field;
  });

  async function apply() {
    const changes = [...fields.values()].map((field) => field.change()).filter(Boolean);
    if (!changes.length) return "All values are as they were.";
    if (!(await confirmed({ title: "Change limits?", lines: costs(changes, bodies), verb: "Change" }))) return "";
    await send("PATCH", "v1/config", Object.fromEntries(changes));
    changed();
    return "Changed.";
  }

  const about = "Changes take effect at once and last until the server ends. The next server reads its own settings.";
  root.append(action("Limits", about, [grid], "Change…", apply));
  return (latest) => {
    bodies = latest;
    list.update(Object.entries(latest.config.limits));
  };
}
