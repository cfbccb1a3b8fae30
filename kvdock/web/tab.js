// What is kept for this tab: a reload finds it, other tabs do not, and it ends with the tab. Uses no DOM.

/** The text that was kept under that name; "": none, or the browser keeps nothing for this page. */
export function kept(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** "": from now on nothing is kept under that name. */
export function keep(name, text) {
  try {
    if (text) sessionStorage.setItem(name, text);
    else sessionStorage.removeItem(name);
  } catch {
    // it ends with the page
  }
}
