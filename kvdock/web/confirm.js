// A question before a change. It names what will be lost, and the safe answer has the focus.

import { button } from "./choice.js";
import { el } from "./dom.js";

const dialog = () => document.getElementById("confirm");

/**
 * title: the change; lines: its consequences; verb: the label of the button; asks: a control, if there is something to
 * choose. Resolves to true if the user confirms.
 */
export function confirmed({ title, lines, verb, asks = null }) {
  const node = dialog();
  const no = button("Cancel", () => node.close(""));
  const yes = button(verb, () => node.close("yes"), "danger");
  node.replaceChildren(
    el("h2", { text: title, attrs: { id: "confirm-title" } }),
    ...lines.map((text) => el("p", { text })),
    el("div", { cls: "bar-of-controls", children: asks ? [asks, no, yes] : [no, yes] }),
  );
  node.returnValue = "";
  node.showModal();
  no.focus();
  return new Promise((done) => node.addEventListener("close", () => done(node.returnValue === "yes"), { once: true }));
}
