// A panel that can be folded: its heading stays, with a summary of its contents.

import { el, setText } from "./dom.js";

const AROUND = "200px";

/**
 * Sections that are no <details> are always open. The others start open where the screen is at least as wide as their
 * `data-from` says, in pixels; "never": folded. changed: () => void, called when the panel is opened or comes into
 * sight.
 */
export function mountFold(root, changed) {
  const isFold = root instanceof HTMLDetailsElement;
  const words = el("span", { cls: "digest" });
  if (isFold) {
    root.open = innerWidth >= Number(root.dataset.from);
    root.querySelector("summary").append(words);
    root.addEventListener("toggle", () => root.open && changed());
  }
  let isSeen = true;
  new IntersectionObserver(([{ isIntersecting }]) => {
    if (isIntersecting === isSeen) return;
    isSeen = isIntersecting;
    if (isSeen) changed();
  }, { rootMargin: AROUND }).observe(root);
  return {
    /** Whether the panel is in sight, or nearly. */
    get isSeen() {
      return isSeen;
    },
    get isOpen() {
      return !isFold || root.open;
    },
    summarise(text) {
      setText(words, text);
    },
  };
}

/** A line in the panel that is visible only while one of its paths fails. */
export function addNote(root) {
  const note = el("p", { cls: "failed" });
  note.hidden = true;
  root.append(note);
  return note;
}
