// The descriptions of the server's metrics, from /metrics; fetched once, when the user asks for one.

import { ask } from "./api.js";

let asked = null;

/** A promise of a Map from a metric's name to its meaning; empty if the server cannot be asked. */
export function meanings() {
  asked ??= ask("metrics").then((answer) => answer.text()).then(parsed).catch(() => {
    asked = null;
    return new Map();
  });
  return asked;
}

function parsed(text) {
  const lines = text.split("\n").filter((line) => line.startsWith("# HELP "));
  return new Map(lines.map((line) => {
    const [name, ...rest] = line.slice("# HELP ".length).split(" ");
    return [name, rest.join(" ").replaceAll("\\n", " ").replaceAll("\\\\", "\\")];
  }));
}
