// Keeps a prefix for a while: by a key under "Administration", by a button in the list of prefixes.

import { send } from "../api.js";

export const FOR = [["3600", "an hour"], ["43200", "12 hours"], ["604800", "a week"]];
export const COSTS = "Other chunks are evicted instead, and less memory is left for new ones.";

/**
 * Keeps that chunk, and with it the chunks before it. until: the chosen option, with seconds as its value; 0: stop
 * keeping it. name: a label for what is kept; "": none. Resolves to a sentence with the result.
 */
export async function pin(namespace, key, until, name = "") {
  const body = { namespace, keys: [key], duration_s: Number(until.value) };
  const done = await send("POST", "v1/pins", name ? { ...body, name } : body);
  if (!done.chunks) return "No chunk of that key can be hit in this namespace.";
  return until.value === "0" ? "Not kept any more." : `Kept for ${until.text}.`;
}
