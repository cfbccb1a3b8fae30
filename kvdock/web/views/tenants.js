// The usage and the quota of each tenant.

import { el, hint } from "../dom.js";
import { bytes, count } from "../format.js";
import { barred, Table } from "../table.js";

const column = (head, field, text) => ({
  head,
  cls: "num share",
  make: barred(
    (t) => t.used[field], (t) => t.quota[field], (t) => text(t.used[field] ?? 0),
    (t) => (t.quota[field] === null ? "" : `of ${text(t.quota[field])}`),
  ),
});

const COLUMNS = [
  { head: "Tenant", cls: "wide", text: (t) => t.name || "the server's own user", title: (t) => t.name },
  column("Bytes", "bytes", bytes),
  column("Chunks", "chunks", count),
  column("Engines", "sessions", count),
  column("Namespaces", "namespaces", count),
  column("Grants", "grants", count),
];

export function mountTenants(root) {
  root.append(el("h3", { text: "Tenants and their quotas" }));
  const table = new Table(root, {
    label: "Tenants", columns: COLUMNS, keyOf: (t) => t.name, limit: 10, empty: hint("No tenant has attached yet."),
  });
  return ({ config }) => table.update(Object.entries(config.tenants).map(([name, view]) => ({ name, ...view })));
}
