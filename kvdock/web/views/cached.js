// The cached chunks: sums by model, namespace or tenant, or one row for each prefix.

import { choice } from "../choice.js";
import { el, hint, setHidden, setText } from "../dom.js";
import { about, age, bytes, count, plural, weightsName } from "../format.js";
import { summed } from "../hits.js";
import { barred, Table, twoPart } from "../table.js";
import { mountPrefixes } from "./prefixes.js";
import { loadedFigure, loadedNote, loadedTitle } from "./shares.js";

const OWN = "the server's own user";
const tenantName = (tenant) => tenant || OWN;
const WAYS = [["model", "Model"], ["namespace", "Namespace"], ["tenant", "Tenant"], ["prefix", "Prefix"]];

/** An older server has no `model`. */
const modelOf = ({ model, manifest }) => model ?? manifest.model;

/** How namespaces are grouped: the key of a group, its name, and the text beside the name. */
const GROUPS = {
  model: {
    key: (n) => modelOf(n),
    name: (n) => modelOf(n),
    beside: (all) => plural(all.length, "namespace"),
  },
  namespace: {
    key: (n) => n.namespace,
    name: (n) => n.namespace.slice(0, 12),
    beside: ([{ model, manifest, tenant, weights, left_s: left }]) => [
      modelOf({ model, manifest }), manifest.adapter && `adapter ${manifest.adapter}`, weightsName(weights),
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
    head: "Oldest", cls: "num", has: (g) => g.isKnown, text: (g) => since(g.oldest_s),
    title: () => "Time since a request last used the chunk that was unused for longest",
  },
  { head: "Engines", cls: "num", text: (g) => count(g.sessions) },
];

/**
 * changed: () => void, called when a prefix was kept or removed. ask: () => void, fetches the figures needed now. turn:
 * (path) => void, asks for other prefixes.
 */
export function mountCached(root, changed, ask, turn) {
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
  const prefixes = mountPrefixes(root, changed, turn);
  root.append(more);
  setHidden(more, true);
  const byPrefixInput = ways.querySelector("[value=prefix]").parentNode;

  function draw(bodies) {
    last = bodies;
    const { status, namespaces, prefixes: found, config } = bodies;
    setHidden(byPrefixInput, !found);
    const isPrefix = way === "prefix" && Boolean(found);
    const whole = status.pool.limit_bytes;
    if (isPrefix) {
      groups.hide();
      prefixes.update(found.prefixes, Boolean(config));
    } else {
      prefixes.hide();
      const all = grouped(bodies.namespaces.namespaces, way in GROUPS ? way : "model");
      groups.update(all.map((one) => ({ ...one, pool_bytes: whole })));
    }
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
