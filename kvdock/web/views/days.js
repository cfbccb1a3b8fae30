// Where prompts' tokens came from, by day, tenant and model: the latest day first.

import { el, hint, setText } from "../dom.js";
import { count, shareOf } from "../format.js";
import { computedTokens, loadedShare, loadedTokens, loadedWords, mostlyWhy, summed } from "../hits.js";
import { barred, savedCell, Table, twoPart } from "../table.js";
import { partsTitle } from "./shares.js";

const tenantOf = (d) => d.tenant || "the server's own user";
const share = ({ hits }, n) => shareOf(n, hits.prompt_tokens);
const title = ({ hits }) => partsTitle(hits);
const hasSaved = ({ hits }) => (hits.saved_s ?? null) !== null;

const COLUMNS = [
  { head: "Day", text: (d) => d.date },
  { head: "Tenant", cls: "wide", has: (d) => d.tenant, text: tenantOf, title: tenantOf },
  { head: "Model", cls: "wide", text: (d) => d.model, title: (d) => d.model },
  { head: "Prompt tokens", cls: "num", text: (d) => count(d.hits.prompt_tokens), title },
  {
    head: "Own cache", cls: "num stacked",
    make: twoPart((d) => count(d.hits.local_tokens), (d) => share(d, d.hits.local_tokens), title),
  },
  {
    head: "Loaded", cls: "num share stacked noted",
    make: barred(
      (d) => loadedTokens(d.hits), (d) => d.hits.prompt_tokens, (d) => count(loadedTokens(d.hits)),
      (d) => [loadedShare(d.hits), loadedWords(d.hits)].filter(Boolean).join(", "), title,
    ),
  },
  {
    head: "Computed", cls: "num stacked noted",
    make: twoPart(
      (d) => count(computedTokens(d.hits)),
      (d) => [share(d, computedTokens(d.hits)), mostlyWhy(d.hits)].filter(Boolean).join(", "), title,
    ),
  },
  { head: "Saved", cls: "num", has: hasSaved, make: savedCell((d) => d.hits.saved_s) },
];

const ABOUT = "Days are those of the server's clock; the next server of the pool keeps them.";

/** The latest day first; of one day, the most prompt tokens first. */
const order = (a, b) => (a.date < b.date) - (a.date > b.date) || b.hits.prompt_tokens - a.hits.prompt_tokens;

export function mountDays(root) {
  const table = new Table(root, {
    label: "Prompt tokens by day", columns: COLUMNS, keyOf: (d) => `${d.date} ${d.tenant} ${d.model}`, limit: 7,
    needsPx: 700, empty: hint("No request has ended yet. Days appear here once engines report ended requests."),
  });
  const about = el("p", { cls: "muted after" });
  root.append(about);
  const draw = ({ hits }) => {
    table.update([...hits.days].sort(order));
    setText(about, hits.days.length ? ABOUT : "");
  };
  draw.digest = ({ hits }) => {
    const last = hits?.days.at(-1)?.date;
    if (!last) return "";
    const all = summed(hits.days.filter((d) => d.date === last).map((d) => d.hits));
    return `${last}: ${loadedShare(all)} of ${count(all.prompt_tokens)} prompt tokens were loaded`;
  };
  return draw;
}
