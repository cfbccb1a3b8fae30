// Controls that the panels share: a choice of one among few, a button, a search field, a list to choose from.

import { el } from "./dom.js";
import { visible } from "./format.js";

let groups = 0;

/** Radio buttons that look like a switch. options: [[value, text]]; pick: (value) => void. */
export function choice(label, options, chosen, pick) {
  const name = `choice-${(groups += 1)}`;
  const node = el("fieldset", { cls: "choice", children: [el("legend", { cls: "unseen", text: label })] });
  for (const [value, text] of options) {
    const input = el("input", { attrs: { type: "radio", name, value } });
    input.checked = value === chosen;
    input.addEventListener("change", () => pick(value));
    node.append(el("label", { children: [input, el("span", { text })] }));
  }
  return node;
}

export function button(text, press, cls = "") {
  const node = el("button", { cls, text, attrs: { type: "button" } });
  node.addEventListener("click", press);
  return node;
}

/** A button that stays down; press: (isDown) => void. */
export function toggle(text, isDown, press) {
  const node = button(text, () => {
    const down = node.getAttribute("aria-pressed") !== "true";
    node.setAttribute("aria-pressed", String(down));
    press(down);
  }, "toggle");
  node.setAttribute("aria-pressed", String(isDown));
  return node;
}

/** A control with a label in front of it. text: the label. */
export function labelled(text, control, cls = "filter") {
  return el("label", { cls, children: [el("span", { text }), control] });
}

export function search(placeholder) {
  return el("input", {
    attrs: { type: "search", maxlength: "256", autocomplete: "off", spellcheck: "false", placeholder },
  });
}

/** options: [[value, text]]. */
export function select(options) {
  const node = el("select");
  setOptions(node, options);
  return node;
}

/** Keeps the chosen option, if it still exists. */
export function setOptions(node, options) {
  const isAt = ([value, text], i) => node.options[i].value === value && node.options[i].textContent === visible(text);
  const same = options.length === node.options.length && options.every(isAt);
  if (same) return;
  const { value } = node;
  node.replaceChildren(...options.map(([each, text]) => el("option", { text, attrs: { value: each } })));
  if (options.some(([each]) => each === value)) node.value = value;
}
