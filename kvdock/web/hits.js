// Where the tokens of prompts came from: the engine's own cache, kvdock, or a computation, which has a reason. The
// figures are HitTotals and PromptRun of kvdock/protocol/hits.py. Pure functions.

import { count, plural, shareOf } from "./format.js";

/** Why tokens were computed, in a few words; the server's explanation of a request has whole sentences. */
const REASONS = {
  never_stored: "never stored",
  room: "evicted for a store",
  ahead: "evicted to have room",
  quota: "evicted: the tenant's quota",
  shrunk: "evicted: the pool shrank",
  cleared: "cache cleared",
  evicted: "evicted by an operator",
  deleted: "deleted",
  mismatched: "damaged",
  unread: "left the pool unread",
  read: "left the pool after one read",
  weights: "evicted: weights not run",
  store_declined: "store declined: others used sooner",
  tier_slow: "a lower tier was too slow",
  being_stored: "another engine was storing it",
  partial: "stored in part",
  held_bytes: "the engine holds its limit",
  pinning: "memory not page-locked",
  draining: "the server was drained",
  late: "the answer was late",
  unverified: "not verified in time",
  load_failed: "the load failed",
  declined_short: "too short to load",
  declined_dear: "computing expected to be quicker",
  not_loaded: "found, but not loaded",
  not_asked: "not asked for",
  opted_out: "the request opted out",
  bypassed_adapter: "adapter not known",
  bypassed_media: "media not known",
  bypassed_embeddings: "embeddings not at hand",
  bypassed_growing: "the prompt grows",
  bypassed_unready: "not hashed in time",
  short: "shorter than a chunk",
  tail: "after the last whole chunk",
  other: "the engine's own reason",
};
const SOURCES = { memory: "memory", waited: "another engine's store" };
/** Reasons that follow from a prompt's length alone: nothing could have been loaded. */
const EXPECTED = new Set(["short", "tail"]);

export const reasonWords = (why) => REASONS[why] ?? why;
/** Where loaded tokens came from; any source but memory and a wait is a lower tier. */
export const sourceWords = (source) => SOURCES[source] ?? `tier ${source}`;

const sum = (amounts) => Object.values(amounts ?? {}).reduce((all, n) => all + n, 0);
export const loadedTokens = (hits) => sum(hits?.loaded);
export const computedTokens = (hits) => sum(hits?.computed);

/** The sums of one request, from the runs of its prompt. */
export function hitsOf(outcome) {
  const hits = { prompt_tokens: outcome.prompt_tokens, local_tokens: 0, loaded: {}, computed: {} };
  const add = (to, name, tokens) => (to[name] = (to[name] ?? 0) + tokens);
  for (const { origin, source, why, tokens } of outcome.runs) {
    if (origin === "local") hits.local_tokens += tokens;
    else if (origin === "loaded") add(hits.loaded, source, tokens);
    else add(hits.computed, why, tokens);
  }
  return hits;
}

/** The sums of several HitTotals. saved_s: null while none of them knows it. */
export function summed(all) {
  const whole = { requests: 0, prompt_tokens: 0, local_tokens: 0, loaded: {}, computed: {}, saved_s: null };
  for (const hits of all.filter(Boolean)) {
    for (const field of ["requests", "prompt_tokens", "local_tokens"]) whole[field] += hits[field] ?? 0;
    for (const field of ["loaded", "computed"]) {
      for (const [name, n] of Object.entries(hits[field] ?? {})) whole[field][name] = (whole[field][name] ?? 0) + n;
    }
    if ((hits.saved_s ?? null) !== null) whole.saved_s = (whole.saved_s ?? 0) + hits.saved_s;
  }
  return whole;
}

/** [[name, tokens]], most tokens first, without zeros. */
const ranked = (amounts) => Object.entries(amounts ?? {}).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);

/** "memory", or "memory 1,024, tier disk 512" if there are several; "" if nothing was loaded. */
export function loadedWords({ loaded }) {
  const all = ranked(loaded);
  if (all.length === 1) return sourceWords(all[0][0]);
  return all.map(([source, n]) => `${sourceWords(source)} ${count(n)}`).join(", ");
}

/** The largest reason why tokens were computed; "" if none were. */
export function mostlyWhy({ computed }) {
  const [first] = ranked(computed);
  return first ? reasonWords(first[0]) : "";
}

/** All reasons with their tokens. */
export function everyWhy({ computed }) {
  return ranked(computed).map(([why, n]) => `${reasonWords(why)}: ${plural(n, "token")}`).join("; ");
}

/** Whether tokens were computed that could have been loaded, had kvdock or the engine had them in time. */
export function hasMissed({ computed }) {
  return ranked(computed).some(([why]) => !EXPECTED.has(why));
}

/** What an engine asked for that does not report what it loads; "" for others. totals: UseTotals, or sums like it. */
export function askedWords({ lookup_tokens: asked, hits }) {
  return asked > 0 && !(hits?.requests > 0) ? `asked for ${count(asked)}` : "";
}

export const NOT_REPORTED = "what was loaded is not reported";

/** The share of the prompt tokens that were loaded; a dash if there were none. */
export const loadedShare = (hits) => shareOf(loadedTokens(hits), hits?.prompt_tokens ?? 0);
