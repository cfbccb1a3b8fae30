// The cached prefixes, each up to the chunk where its tree of chunks forks. A prefix with branches unfolds: a button in
// its row asks the server for what goes on from there, page by page.

import { get, send } from "../api.js";
import { button, labelled, search, select } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, hint, setAttr, setHidden, setText } from "../dom.js";
import { about, age, bytes, count, plural } from "../format.js";
import { Table } from "../table.js";
import { COSTS, FOR, pin } from "./keep.js";

const DRAWN = 10;
const BRANCHES = 20;
const MOST_BRANCHES = 256;
/** Unfolded branches are fetched again when they are older: the server counts them anew for each answer. */
const OLD_MS = 30_000;
const TYPING_MS = 300;
const SLOW_MS = 60_000;

const shortly = (prefix) => prefix.key.slice(0, 12);
const branches = (p) => p.branches ?? 0;
const placeOf = (p) => `${p.namespace} ${p.fork_key}`;
/** A row that is no prefix, but says something about branches, has no figures. */
const figure = (of) => (p) => (p.says ? "" : of(p));

/** Removes a prefix by its first chunk: no later chunk can be found without it. */
async function remove(prefix) {
  const title = `Remove the prefix ${shortly(prefix)}?`;
  const lines = [
    `None of its ${plural(prefix.tokens, "token")} will be found any more: requests will compute them again.`,
    "The memory of the other chunks is freed when the pool needs it. This cannot be undone.",
  ];
  if (!(await confirmed({ title, lines, verb: "Remove" }))) return "";
  await send("POST", "v1/chunks/delete", { namespace: prefix.namespace, keys: [prefix.key] });
  return "Removed.";
}

/** Keeps the part of a prefix that at least half of its uses found. */
async function keep(prefix) {
  const until = select(FOR);
  const name = el("input", { attrs: { type: "text", maxlength: "64", autocomplete: "off", spellcheck: "false" } });
  const length = plural(prefix.last_tokens, "token");
  const lines = [
    prefix.uses
      ? `Its first ${length}, which at least half of its uses found, are kept for the time chosen below.`
      : `It has not been used yet. The longest prefix that begins with it, ${length}, is kept for the chosen time.`,
    COSTS,
    `To stop sooner, use its key under "Administration": ${prefix.last_key}.`,
  ];
  const title = `Keep the prefix ${shortly(prefix)}?`;
  const asks = el("div", { children: [labelled("For", until), labelled("Name, if it is to have one", name)] });
  if (!(await confirmed({ title, lines, verb: "Keep", asks }))) return "";
  return pin(prefix.namespace, prefix.last_key, until.selectedOptions[0], name.value.trim());
}

/** The first cell: a button that unfolds the prefix, its labels or its key, and where it belongs. */
function named(toggle) {
  return (cell) => {
    let last = null;
    const press = button("▸", () => toggle(last), "unfold");
    press.addEventListener("keydown", ({ key }) => {
      const isOpen = press.getAttribute("aria-expanded") === "true";
      if ((key === "ArrowRight" && !isOpen) || (key === "ArrowLeft" && isOpen)) toggle(last);
    });
    const name = el("span", { cls: "main" });
    const small = el("small");
    const more = button("", () => last.press(), "small");
    cell.append(press, name, " ", small, more);
    return (p) => {
      last = p;
      cell.style.setProperty("--depth", String(p.depth));
      setHidden(press, Boolean(p.says) || !branches(p));
      setHidden(more, !p.press);
      setText(more, p.press ? p.says : "");
      setText(name, p.says ? (p.press ? "" : p.says) : (p.labels ?? []).join(", ") || shortly(p));
      if (p.says) {
        setText(small, "");
        setAttr(cell, "title", "");
        return;
      }
      const beside = [
        p.labels?.length && shortly(p), p.model, p.tenant, p.is_kept && "kept", p.depth && `goes on from ${p.from}`,
      ];
      setText(small, beside.filter(Boolean).join(", "));
      setAttr(cell, "title", `${p.key} · namespace ${p.namespace}`);
      setAttr(press, "aria-expanded", String(Boolean(p.isOpen)));
      setAttr(press, "aria-label", `Branches of the prefix ${shortly(p)}`);
      setText(press, p.isOpen ? "▾" : "▸");
    };
  };
}

/** A cell with a figure and a muted text. */
function pair(main, muted) {
  return (cell) => {
    const first = el("span", { cls: "main" });
    const second = el("small");
    cell.append(first, " ", second);
    return (p) => {
      setText(first, figure(main)(p));
      setText(second, figure(muted)(p));
    };
  };
}

function changes(changed) {
  return (cell) => {
    let last = null;
    const said = el("small", { attrs: { role: "status" } });
    const nodes = [["Keep", keep], ["Remove", remove]].map(([verb, change]) => [verb, button(`${verb}…`, async () => {
      try {
        const done = await change(last);
        setText(said, done);
        if (done) changed();
      } catch (error) {
        setText(said, `Not done: ${error.message}.`);
      }
    }, "small")]);
    const both = el("span", { children: nodes.flatMap(([, node]) => [node, " "]) });
    cell.append(both, said);
    return (p) => {
      last = p;
      setHidden(both, Boolean(p.says));
      if (p.says) return;
      for (const [verb, node] of nodes) setAttr(node, "aria-label", `${verb} the prefix ${shortly(p)}`);
    };
  };
}

/** A dash: there were none since this server's start, and the prefix is older. */
const uses = (p) => (p.uses || (p.age_s ?? null) !== null ? count(p.uses) : "–");

function columns(toggle, changed) {
  return [
    { head: "Prefix", cls: "wide stacked branch", make: named(toggle) },
    {
      head: "Shared tokens", cls: "num stacked",
      make: pair((p) => count(p.shared_tokens ?? p.tokens), (p) => (branches(p) ? `of ${count(p.tokens)}` : "")),
    },
    { head: "Cached", cls: "num stacked", make: pair((p) => bytes(p.bytes), (p) => plural(p.chunks, "chunk")) },
    {
      head: "Branches", cls: "num stacked", has: (p) => branches(p) > 0,
      make: pair((p) => (branches(p) ? count(p.branches) : "–"), (p) => (branches(p) ? bytes(p.branch_bytes) : "")),
    },
    { head: "Uses", cls: "num", text: figure(uses), title: figure(() => "Since this server's start") },
    { head: "Last used", cls: "num", text: figure((p) => about(p.unused_s)) },
    {
      head: "Age", cls: "num", text: figure((p) => about(p.age_s)), title: figure((p) => age(p.age_s ?? 0)),
    },
    { head: "Change", cls: "num changes", has: (p) => p.mayChange, make: changes(changed) },
  ];
}

/** The branches of unfolded prefixes, by placeOf(). redraw: called when some have come. */
class Unfolded {
  #open = new Map();

  constructor(redraw) {
    this.redraw = redraw;
  }

  toggle(prefix) {
    const place = placeOf(prefix);
    const fresh = { atMs: performance.now(), rows: [], count: 0, next: null, error: "" };
    if (!this.#open.delete(place)) this.#fetch(prefix, fresh, BRANCHES);
    this.redraw();
  }

  /** The next draw fetches all again. */
  hurry() {
    for (const one of this.#open.values()) one.atMs = -OLD_MS;
  }

  async #fetch(prefix, one, limit, cursor = "") {
    const place = placeOf(prefix);
    this.#open.set(place, one);
    if (one.isBusy) return;
    one.isBusy = true;
    const ask = new URLSearchParams({ limit, namespace: prefix.namespace, below: prefix.fork_key });
    if (cursor) ask.set("cursor", cursor);
    try {
      const body = await get(`v1/prefixes?${ask}`, SLOW_MS);
      one.rows = cursor ? [...one.rows, ...body.prefixes] : body.prefixes;
      Object.assign(one, { count: body.prefix_count, next: body.next ?? null, error: "" });
    } catch (error) {
      one.error = error.message;
    } finally {
      one.isBusy = false;
      one.atMs = performance.now();
    }
    this.redraw();
  }

  /** The prefix's row, and those of its branches if it is unfolded. */
  rows(prefix, depth = 0, from = "") {
    const one = this.#open.get(placeOf(prefix));
    const row = { ...prefix, depth, from, id: `${from} ${prefix.namespace} ${prefix.key}`, isOpen: Boolean(one) };
    if (!one || !branches(prefix)) return [row];
    if (performance.now() - one.atMs > OLD_MS) {
      this.#fetch(prefix, one, Math.min(MOST_BRANCHES, Math.max(BRANCHES, one.rows.length)));
    }
    const below = one.rows.flatMap((p) => this.rows({ ...p, mayChange: prefix.mayChange }, depth + 1, shortly(prefix)));
    const rest = this.#rest(prefix, one).map((says) => ({ ...says, depth: depth + 1, id: `${row.id} …` }));
    return [row, ...below, ...rest];
  }

  #rest(prefix, one) {
    if (one.error) return [{ says: `The branches are not known: ${one.error}.` }];
    if (!one.rows.length) return [{ says: one.isBusy ? "The branches are being counted…" : "No branch is left." }];
    if (!one.next) return [];
    const says = `${plural(one.count - one.rows.length, "more branch", "more branches")}`;
    return [{ says, press: () => this.#fetch(prefix, one, BRANCHES, one.next) }];
  }
}

/**
 * changed: () => void, called when a prefix was kept or removed. turn: (path) => void, asks for another list.
 * Returns {update(prefixes, mayChange), hide()}.
 */
export function mountPrefixes(root, changed, turn) {
  let shown = [];
  let extra = 0;
  let typing = 0;
  const input = search("Label, model, tenant or key");
  const field = labelled("Search", input);
  const nothing = hint("No prefix is cached.");
  root.append(field);
  const unfolded = new Unfolded(() => draw());
  const done = () => {
    unfolded.hurry();
    changed();
  };
  const table = new Table(root, {
    label: "Prefixes, the most used first", columns: columns((p) => unfolded.toggle(p), done), keyOf: (p) => p.id,
    limit: DRAWN, empty: nothing,
  });
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const text = input.value.trim();
      turn(`v1/prefixes?limit=100${text ? `&search=${encodeURIComponent(text)}` : ""}`);
    }, TYPING_MS);
  });

  function draw() {
    const rows = shown.flatMap((p) => unfolded.rows(p));
    table.limit += rows.length - shown.length - extra; // as many prefixes as before, with their branches
    extra = rows.length - shown.length;
    setText(nothing, input.value.trim() ? "No cached prefix has that text." : "No prefix is cached.");
    table.update(rows);
  }

  return {
    update(prefixes, mayChange) {
      shown = prefixes.map((p) => ({ ...p, mayChange }));
      setHidden(field, false);
      draw();
    },
    hide() {
      setHidden(field, true);
      table.hide();
    },
  };
}
