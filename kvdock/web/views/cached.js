// The cached chunks: sums by model, namespace or tenant, or one row for each prefix.

import { send } from "../api.js";
import { button, choice, labelled, select } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { about, age, bytes, count, plural, weightsName } from "../format.js";
import { summed } from "../hits.js";
import { barred, Table, twoPart } from "../table.js";
import { COSTS, FOR, pin } from "./keep.js";
import { loadedFigure, loadedNote, loadedTitle } from "./shares.js";

const OWN = "the server's own user";
const tenantName = (tenant) => tenant || OWN;
const WAYS = [["model", "Model"], ["namespace", "Namespace"], ["tenant", "Tenant"], ["prefix", "Prefix"]];

/** How namespaces are grouped: the key of a group, its name, and the text beside the name. */
const GROUPS = {
  model: {
    key: (n) => n.manifest.model,
    name: (n) => n.manifest.model,
    beside: (all) => plural(all.length, "namespace"),
  },
  namespace: {
    key: (n) => n.namespace,
    name: (n) => n.namespace.slice(0, 12),
    beside: ([{ manifest, tenant, weights, left_s: left }]) => [
      manifest.model, manifest.adapter && `adapter ${manifest.adapter}`, weightsName(weights),
      tenant && `tenant ${tenant}`, (left ?? null) !== null && `left ${age(left)} ago`,
    ].filter(Boolean).join(", "),
  },
  tenant: { key: (n) => n.tenant, name: (n) => tenantName(n.tenant), beside: (all) => plural(all.length, "namespace") },
};

const sum = (all, field) => all.reduce((so, n) => so + (n[field] ?? 0), 0);
const totals = (all, field) => sum(all.map((n) => n.totals ?? {}), field);
const known = (all, field) => all.map((n) => n[field]).filter((value) => value !== null && value !== undefined);

function grouped(namespaces, way) {
  const { key, name, beside } = GROUPS[way];
  const groups = new Map();
  for (const one of namespaces) {
    if (!groups.has(key(one))) groups.set(key(one), []);
    groups.get(key(one)).push(one);
  }
  const rows = [...groups].map(([id, all]) => ({
    id: `${way} ${id}`,
    name: name(all[0]),
    beside: beside(all) + (all.every((n) => n.is_bench) ? ", benchmark" : ""),
    title: `${key(all[0])}`,
    isKnown: known(all, "bytes").length > 0,
    chunks: sum(all, "chunks"),
    bytes: sum(all, "bytes"),
    oldest_s: Math.max(...known(all, "oldest_s")),
    unused_s: Math.min(...known(all, "unused_s")),
    totals: { lookup_tokens: totals(all, "lookup_tokens"), hits: summed(all.map((n) => n.totals?.hits)) },
    sessions: sum(all, "sessions"),
    pool_bytes: 0,
  }));
  return rows.sort((a, b) => b.bytes - a.bytes || b.sessions - a.sessions);
}

const since = (seconds) => (Number.isFinite(seconds) ? about(seconds) : "–");

const BY_GROUP = [
  { head: "Name", cls: "wide stacked", make: twoPart((g) => g.name, (g) => g.beside, (g) => g.title) },
  {
    head: "Cached", cls: "num share stacked", has: (g) => g.isKnown,
    make: barred((g) => g.bytes, (g) => g.pool_bytes, (g) => bytes(g.bytes), (g) => plural(g.chunks, "chunk")),
  },
  {
    head: "Loaded", cls: "num stacked", has: (g) => g.totals.lookup_tokens > 0 || g.totals.hits.requests > 0,
    make: twoPart(
      (g) => loadedFigure(g.totals), (g) => loadedNote(g.totals), (g) => loadedTitle(g.totals),
    ),
  },
  {
    head: "Last used", cls: "num", has: (g) => g.isKnown, text: (g) => since(g.unused_s),
    title: () => "Time since a request last used one of its chunks",
  },
  {
    head: "Least used", cls: "num", has: (g) => g.isKnown, text: (g) => since(g.oldest_s),
    title: () => "Time since a request last used the chunk that was unused for longest",
  },
  { head: "Engines", cls: "num", text: (g) => count(g.sessions) },
];

const shortly = (prefix) => prefix.key.slice(0, 12);

/** Removes a prefix by its first chunk: no later chunk can be found without it. */
async function remove(prefix) {
  const title = `Remove the prefix ${shortly(prefix)}?`;
  const lines = [
    `None of its ${plural(prefix.tokens, "token")} will be found any more: requests will compute them again.`,
    "The memory of the other chunks is freed when the pool needs it. This cannot be undone.",
  ];
  if (!(await confirmed({ title, lines, verb: "Remove" }))) return "";
  await send("POST", "v1/chunks/delete", { namespace: prefix.namespace, keys: [prefix.key] });
  return "Removed.";
}

/** Keeps the part of a prefix that at least half of its uses found. */
async function keep(prefix) {
  const until = select(FOR);
  const length = plural(prefix.last_tokens, "token");
  const lines = [
    prefix.uses
      ? `Its first ${length}, which at least half of its uses found, are kept for the time chosen below.`
      : `It has not been used yet. The longest prefix that begins with it, ${length}, is kept for the chosen time.`,
    COSTS,
    `To stop sooner, use its key under "Administration": ${prefix.last_key}.`,
  ];
  const title = `Keep the prefix ${shortly(prefix)}?`;
  if (!(await confirmed({ title, lines, verb: "Keep", asks: labelled("For", until) }))) return "";
  return pin(prefix.namespace, prefix.last_key, until.selectedOptions[0]);
}

function byPrefix(changed) {
  const changes = (cell) => {
    let last = null;
    const said = el("small", { attrs: { role: "status" } });
    const nodes = [["Keep", keep], ["Remove", remove]].map(([verb, change]) => [verb, button(`${verb}…`, async () => {
      try {
        const done = await change(last);
        setText(said, done);
        if (done) changed();
      } catch (error) {
        setText(said, `Not done: ${error.message}.`);
      }
    }, "small")]);
    cell.append(el("span", { children: nodes.flatMap(([, node]) => [node, " "]) }), said);
    return (prefix) => {
      last = prefix;
      for (const [verb, node] of nodes) setAttr(node, "aria-label", `${verb} the prefix ${shortly(prefix)}`);
    };
  };
  return [
    {
      head: "Prefix", cls: "wide stacked",
      make: twoPart(
        shortly, (p) => [p.model, p.tenant].filter(Boolean).join(", "),
        (p) => `${p.key} · namespace ${p.namespace}`,
      ),
    },
    { head: "Tokens", cls: "num", text: (p) => count(p.tokens) },
    { head: "Cached", cls: "num stacked", make: twoPart((p) => bytes(p.bytes), (p) => plural(p.chunks, "chunk")) },
    { head: "Uses", cls: "num", text: (p) => count(p.uses) },
    { head: "Last used", cls: "num", text: (p) => about(p.unused_s) },
    { head: "Age", cls: "num", text: (p) => about(p.age_s), title: (p) => age(p.age_s ?? 0) },
    { head: "Change", cls: "num changes", has: (p) => p.mayChange, make: changes },
  ];
}

/** changed: () => void, called when a prefix was kept or removed. ask: () => void, fetches the figures needed now. */
export function mountCached(root, changed, ask) {
  let way = "model";
  let last = null;
  const ways = choice("Sum up by", WAYS, way, (chosen) => {
    way = chosen;
    if (last) draw(last);
    if (way === "prefix") ask();
  });
  const more = el("p", { cls: "muted after" });
  root.append(ways);
  const groups = new Table(root, {
    label: "What is cached", columns: BY_GROUP, keyOf: (g) => g.id, limit: 10,
    empty: hint("Nothing is cached yet: no engine has attached."),
  });
  const prefixes = new Table(root, {
    label: "Prefixes, the most used first", columns: byPrefix(changed), keyOf: (p) => `${p.namespace} ${p.key}`,
    limit: 10, empty: hint("No prefix is cached."),
  });
  root.append(more);
  setHidden(more, true);
  const byPrefixInput = ways.querySelector("[value=prefix]").parentNode;

  function draw(bodies) {
    last = bodies;
    const { status, namespaces, prefixes: found, config } = bodies;
    setHidden(byPrefixInput, !found);
    const isPrefix = way === "prefix" && Boolean(found);
    const whole = status.pool.limit_bytes;
    const [shown, other] = isPrefix ? [prefixes, groups] : [groups, prefixes];
    other.hide();
    shown.update(
      isPrefix
        ? found.prefixes.map((p) => ({ ...p, mayChange: Boolean(config) }))
        : grouped(bodies.namespaces.namespaces, way in GROUPS ? way : "model").map((one) => ({
          ...one, pool_bytes: whole,
        })),
    );
    setHidden(more, isPrefix ? found.prefixes.length >= found.prefix_count : !namespaces.next);
    setText(more, isPrefix
      ? `The most used of ${plural(found.prefix_count, "prefix", "prefixes")}.`
      : "There are more namespaces than these sums include.");
  }
  /** Paths that need not be fetched now. */
  draw.resting = () => (way === "prefix" ? [] : ["prefixes"]);
  draw.digest = ({ status: { pool, chunks } }) => `${bytes(pool.ready_bytes)} in ${plural(chunks.ready, "chunk")}`;
  return draw;
}
