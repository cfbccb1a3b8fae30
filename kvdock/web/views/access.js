// The form for an access token, shown while the server shows this page only totals.

import { setHidden, setText } from "../dom.js";

const byId = (id) => document.getElementById(id);
const REFUSED = "The server does not know this token, or it lacks the scope read.";

/** use: (text) => void, called with each token. Returns {isNew, judged}. */
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
    /** Whether a token was entered that the server has not answered yet. */
    isNew: () => fresh,
    judged(locked) {
      setHidden(byId("locked"), !locked);
      if (fresh && locked) setText(byId("token-refused"), REFUSED);
      fresh = false;
    },
  };
}
