// A table whose columns are data. Rows are keyed and reused. On a phone each row becomes a small card (display: block),
// so every cell has its column's name, and every element its role, which it would lose otherwise.

import { el, KeyedList, setAttr, setHidden, setText } from "./dom.js";

/**
 * columns: [{head, cls?, text: item => string, title?: item => string}]
 *       or [{head, cls?, make: cell => (item => void)}] where a cell is more than text.
 * limit: the most rows drawn; the others are counted below the table.
 */
export class Table {
  constructor(root, { label, columns, keyOf, limit, empty }) {
    this.limit = limit;
    const heads = columns.map(({ head, cls = "" }) =>
      el("th", { text: head, cls, attrs: { scope: "col", role: "columnheader" } }),
    );
    const headRow = el("tr", { attrs: { role: "row" }, children: heads });
    const body = el("tbody", { attrs: { role: "rowgroup" } });
    const head = el("thead", { attrs: { role: "rowgroup" }, children: [headRow] });
    this.table = el("table", { cls: "list", attrs: { role: "table", "aria-label": label }, children: [head, body] });
    this.more = el("p", { cls: "muted" });
    this.empty = empty;
    // Before the first update it is not known whether there are rows, so nothing is shown.
    for (const part of [this.table, this.more, empty]) setHidden(part, true);
    root.append(this.table, this.more, empty);
    this.rows = new KeyedList(body, keyOf, () => makeRow(columns));
  }

  update(items) {
    this.rows.update(items.slice(0, this.limit));
    setHidden(this.table, items.length === 0);
    setHidden(this.empty, items.length > 0);
    setHidden(this.more, items.length <= this.limit);
    setText(this.more, `and ${items.length - this.limit} more`);
  }
}

function makeRow(columns) {
  const node = el("tr", { attrs: { role: "row" } });
  const updates = columns.map((column) => {
    const cell = el("td", { cls: column.cls ?? "", attrs: { role: "cell", "data-head": column.head } });
    node.append(cell);
    return column.make ? column.make(cell) : textCell(cell, column);
  });
  return { node, update: (item) => updates.forEach((update) => update(item)) };
}

function textCell(cell, { text, title }) {
  return (item) => {
    setText(cell, text(item));
    if (title) setAttr(cell, "title", title(item));
  };
}

/** A cell with a main text and a muted one beside it. */
export function twoPart(main, muted) {
  return (cell) => {
    const first = el("span", { cls: "main" });
    const second = el("small");
    cell.append(first, " ", second);
    return (item) => {
      setText(first, main(item));
      setText(second, muted(item));
    };
  };
}
