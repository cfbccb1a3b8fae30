// A table whose columns are data. Rows are keyed and reused. On a narrow screen each row becomes a small card
// (display: block), so every cell repeats its column's name, and every element has the role that it would lose.

import { el, KeyedList, setAttr, setHidden, setText } from "./dom.js";
import { age, isLoss, savedWords } from "./format.js";

/** Each takes less room than the one before: without bars, without the `spare` columns, and as cards. */
const LAYOUTS = [[], ["tight"], ["tight", "brief"], ["cards"]];
const ALL_LAYOUTS = ["tight", "brief", "cards"];
const [TIGHT, BRIEF, CARDS] = [1, 2, 3];
const TIGHT_PX = 1150;

/**
 * columns: [{head, cls?, text: item => string, title?: item => string}]
 *       or [{head, cls?, make: cell => (item => void)}] where a cell is more than text.
 * With `has: item => boolean` a column is there only while some item has it.
 * limit: the rows drawn at first; a button below the table adds as many again. Narrower than needsPx, rows
 * are cards; narrower than allPx, columns of the class `spare` are hidden. Where rows are wider than their card, the
 * next tighter of LAYOUTS is used.
 */
export class Table {
  #items = [];
  #widthPx = 0; // of the card's content
  #widest = 0; // the layout that this width allows for
  #layout = 0; // the one in use

  constructor(root, { label, columns, keyOf, limit, empty, needsPx = 600, allPx = 0 }) {
    this.step = this.limit = limit;
    this.columns = columns;
    this.heads = columns.map(({ head, cls = "" }) =>
      el("th", { text: head, cls, attrs: { scope: "col", role: "columnheader" } }),
    );
    const headRow = el("tr", { attrs: { role: "row" }, children: this.heads });
    const body = el("tbody", { attrs: { role: "rowgroup" } });
    const head = el("thead", { attrs: { role: "rowgroup" }, children: [headRow] });
    this.table = el("table", { cls: "list", attrs: { role: "table", "aria-label": label }, children: [head, body] });
    this.more = el("button", { cls: "more", attrs: { type: "button" } });
    this.more.addEventListener("click", () => {
      this.limit += this.step;
      this.update(this.#items);
    });
    this.empty = empty;
    // Before the first update it is not known whether there are rows, so nothing is shown.
    for (const part of [this.table, this.more, empty]) setHidden(part, true);
    root.append(this.table, this.more, empty);
    new ResizeObserver(([{ contentRect: { width } }]) => {
      this.#widthPx = width;
      this.#widest = width < needsPx ? CARDS : width < allPx ? BRIEF : width < TIGHT_PX ? TIGHT : 0;
      this.#lay(this.#widest);
    }).observe(root);
    this.table.addEventListener("toggle", () => this.#lay(this.#layout), true); // a row has unfolded
    this.rows = new KeyedList(body, ({ item }) => keyOf(item), () => makeRow(columns));
  }

  update(items) {
    const isAsLong = items.length === this.#items.length;
    this.#items = items;
    const shown = this.columns.map(({ has }) => !has || items.some(has));
    this.heads.forEach((head, i) => setHidden(head, !shown[i]));
    this.rows.update(items.slice(0, this.limit).map((item) => ({ item, shown })));
    setHidden(this.table, items.length === 0);
    setHidden(this.empty, items.length > 0);
    setHidden(this.more, items.length <= this.limit);
    setText(this.more, `and ${items.length - this.limit} more`);
    this.#lay(isAsLong ? this.#layout : this.#widest);
  }

  /** Lays the table out in that way, or the first tighter one in which it fits. */
  #lay(layout) {
    if (!this.#widthPx) return; // it is not shown
    for (this.#layout = layout; ; this.#layout += 1) {
      const classes = LAYOUTS[this.#layout];
      for (const each of ALL_LAYOUTS) this.table.classList.toggle(each, classes.includes(each));
      if (this.#layout === CARDS || this.table.offsetWidth <= this.#widthPx + 1) return;
    }
  }

  hide() {
    for (const part of [this.table, this.more, this.empty]) setHidden(part, true);
  }
}

function makeRow(columns) {
  const node = el("tr", { attrs: { role: "row" } });
  const cells = columns.map(({ head, cls = "" }) =>
    el("td", { cls, attrs: { role: "cell", "data-head": head } }),
  );
  node.append(...cells);
  const updates = columns.map((column, i) => (column.make ? column.make(cells[i]) : textCell(cells[i], column)));
  const update = ({ item, shown }) => updates.forEach((each, i) => {
    setHidden(cells[i], !shown[i]);
    if (shown[i]) each(item);
  });
  return { node, update };
}

function textCell(cell, { text, title }) {
  return (item) => {
    setText(cell, text(item));
    if (title) setAttr(cell, "title", title(item));
  };
}

/** A cell with a main text and a muted one beside it. The title has the whole text. */
export function twoPart(main, muted, title = (item) => [main(item), muted(item)].filter(Boolean).join(" · ")) {
  return (cell) => {
    const first = el("span", { cls: "main" });
    const second = el("small");
    cell.append(first, " ", second);
    return (item) => {
      setText(first, main(item));
      setText(second, muted(item));
      setAttr(cell, "title", title(item));
    };
  };
}

/** A cell with saved seconds: with their sign, and marked where loads took longer than computing. */
export function savedCell(of) {
  return (cell) => {
    const figure = el("span", { cls: "main" });
    cell.append(figure);
    return (item) => {
      const seconds = of(item) ?? null;
      setText(figure, seconds === null ? "–" : age(seconds));
      setAttr(figure, "class", seconds !== null && isLoss(seconds) ? "main alarm" : "main");
      setAttr(cell, "title", seconds === null ? "" : savedWords(seconds));
    };
  };
}

/** A cell with a thin bar for a part of a whole, its figure, and a muted text. Without a whole there is no bar. */
export function barred(part, whole, text, muted = () => "", title = null) {
  return (cell) => {
    const fill = el("span");
    const track = el("span", { cls: "track", attrs: { "aria-hidden": "true" }, children: [fill] });
    const figure = el("span", { cls: "main" });
    const small = el("small");
    cell.append(track, figure, " ", small);
    return (item) => {
      const [some, all] = [part(item) ?? 0, whole(item) ?? 0];
      setHidden(track, !(all > 0));
      fill.style.width = `${all > 0 ? Math.min(100, (100 * some) / all) : 0}%`;
      setText(figure, text(item));
      setText(small, muted(item));
      if (title) setAttr(cell, "title", title(item));
    };
  };
}
