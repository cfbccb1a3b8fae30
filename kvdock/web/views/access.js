// The form for an access token, shown while the server shows this page only totals.

import { setHidden, setText } from "../dom.js";

const byId = (id) => document.getElementById(id);
const REFUSED = "The server does not know this token, or it lacks the scope read.";

/** use: (text) => void, called with each token. Returns {judged}. */
export function mountAccess(use) {
  let fresh = false;

  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("token").value.trim();
    byId("token").value = "";
    if (!text) return;
    fresh = true;
    setText(byId("token-refused"), "");
    use(text);
  });

  return {
    /** Called when the server has said whether this caller may see the lists. */
    judged(locked) {
      const hadFocus = byId("locked").contains(document.activeElement);
      setHidden(byId("locked"), !locked);
      if (!locked && hadFocus) byId("main").focus({ preventScroll: true }); // or the focus would be nowhere
      if (fresh && locked) setText(byId("token-refused"), REFUSED);
      fresh = false;
    },
  };
}
