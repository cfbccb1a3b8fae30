// The column "Loaded from kvdock" of several tables: UseTotals, or sums like it, as a figure, a note and a title.

import { count, exact, plural, shareOf } from "../format.js";
import { askedWords, computedTokens, everyWhy, loadedShare, loadedTokens, loadedWords, NOT_REPORTED } from "../hits.js";

/** The share of prompt tokens, or what was asked for where the engine does not report what it loads. */
export function loadedFigure(totals) {
  return totals ? askedWords(totals) || loadedShare(totals.hits) : "–";
}

export function loadedNote(totals) {
  if (!totals) return "";
  if (askedWords(totals)) return "loads not reported";
  return totals.hits?.prompt_tokens ? `of ${count(totals.hits.prompt_tokens)} tokens` : "";
}

/** All that is known of the prompts. */
export function loadedTitle(totals) {
  if (!totals) return "";
  if (askedWords(totals)) return `Asked for ${plural(totals.lookup_tokens, "token")}; ${NOT_REPORTED}`;
  return totals.hits?.prompt_tokens ? partsTitle(totals.hits) : "No request has ended yet";
}

export function partsTitle(hits) {
  const part = (name, n, more) =>
    `${name} ${exact(n)} (${shareOf(n, hits.prompt_tokens)})${more ? `: ${more}` : ""}`;
  return [
    `${plural(hits.prompt_tokens, "prompt token")}`,
    part("own cache", hits.local_tokens, ""),
    part("loaded", loadedTokens(hits), loadedWords(hits)),
    part("computed", computedTokens(hits), everyWhy(hits)),
  ].join(" · ");
}
