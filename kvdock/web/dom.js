// The only module that makes elements and text. Text is set through textContent, so a label is never markup, and
// characters that cannot be seen, or that turn text around, are shown as escapes.
// Nothing is written that has not changed, so a selection survives the next answer and an idle page has no layout work.

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, text and attributes; children are nodes, or strings as text. */
export function el(tag, { cls = "", text = null, attrs = {}, children = [] } = {}) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== null) node.textContent = visible(text);
  for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, readable(name, value));
  node.append(...children.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

/** Attributes whose text people see or hear; the others are kept as they are. */
const READ = new Set(["title", "aria-label", "aria-valuetext", "data-head", "placeholder"]);
const readable = (name, value) => (READ.has(name) ? visible(value) : String(value));

export function svg(tag, attrs = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, value);
  return node;
}

export function setText(node, text) {
  const shown = visible(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export function setAttr(node, name, value) {
  const text = readable(name, value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** A sentence that suggests what to do next; `command` is shown as code. */
export function hint(text, command = "") {
  const node = el("p", { cls: "hint", text: command ? text + " Try: " : text });
  if (command) node.append(el("code", { text: command }));
  return node;
}

/**
 * The children of `parent`, one for each item, reused by key, so there are never more nodes than items.
 * `make(item)` returns {node, update(item)}; a repeated key gets an ordinal, so no item is lost.
 */
export class KeyedList {
  #rows = new Map();

  constructor(parent, keyOf, make) {
    this.parent = parent;
    this.keyOf = keyOf;
    this.make = make;
  }

  get size() {
    return this.#rows.size;
  }

  update(items) {
    const next = new Map();
    for (const item of items) {
      const base = String(this.keyOf(item));
      let key = base;
      for (let n = 2; next.has(key); n += 1) key = `${base} #${n}`;
      const row = this.#rows.get(key) ?? this.make(item);
      row.update(item);
      next.set(key, row);
    }
    for (const [key, row] of this.#rows) if (next.get(key) !== row) row.node.remove();
    this.#place(next);
    this.#rows = next;
  }

  #place(rows) {
    let at = this.parent.firstChild;
    for (const { node } of rows.values()) {
      if (node === at) at = at.nextSibling;
      else this.parent.insertBefore(node, at);
    }
  }
}
