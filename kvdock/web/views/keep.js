// Keeping a prefix for a while: the administration does it by a key, the list of prefixes by a button.

import { send } from "../api.js";

export const FOR = [["3600", "an hour"], ["43200", "12 hours"], ["604800", "a week"]];
export const COSTS = "Other chunks are evicted instead, and so much less room is left for new ones.";

/**
 * Keeps that chunk, and so what precedes it. until: the chosen option of a list, seconds and their name; 0: no longer.
 * Resolves to a sentence that says what became of it.
 */
export async function pin(namespace, key, until) {
  const done = await send("POST", "v1/pins", { namespace, keys: [key], duration_s: Number(until.value) });
  if (!done.chunks) return "No chunk of that key can be hit in this namespace.";
  return until.value === "0" ? "Unpinned." : `Kept for ${until.text}.`;
}
