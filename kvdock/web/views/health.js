// The top of the page: whether the server is ready, how old the figures are, and what has just happened.
// Sentences in live regions change only when their meaning does; seconds that count up or down stand outside of them.

import { el, KeyedList, setAttr, setHidden, setText } from "../dom.js";
import { clock, visible, wholeAge } from "../format.js";

const byId = (id) => document.getElementById(id);

/** phase → [tone, text] of the pill; while live they follow from the server's own status. */
const PILL = {
  connecting: ["idle", "Connecting"],
  stale: ["warn", "Stale"],
  gone: ["bad", "Unreachable"],
};

/** status → the pill, and what stands above the list of what is degraded. */
const STATES = {
  ok: { pill: ["good", "Ready"] },
  degraded: { pill: ["warn", "Degraded"], head: "The server gives out slots, but:" },
  "not ready": { pill: ["warn", "Not ready"], head: "The server runs but is not ready:" },
};

/** A fact that the server does not report is omitted. */
const FACTS = [
  ["host", (s) => s.host ?? ""],
  ["version", (s) => s.version],
  ["up", (s, ageS) => wholeAge(s.uptime_s + ageS)],
];
const ICONS = { gone: "static/favicon-gone.svg" };
const ICON = "static/favicon.svg";

const RESTARTED = {
  pool: (s, at) => `The server restarted at ${at} with a new pool (${s.pool_id}): the chunks cached before are gone.`,
  server: (s, at) =>
    `The server restarted at ${at} and took over its pool (incarnation ${s.incarnation}): published chunks survived.`,
};

/** retry: () => void, fetches now. nextInMs: () => ms until the next fetch. Returns {update, restarted}. */
export function mountHealth({ retry, nextInMs }) {
  const facts = FACTS.map(([name, text]) => {
    const value = el("dd");
    const node = el("div", { children: [el("dt", { text: name }), value] });
    byId("facts").append(node);
    return { node, value, text };
  });
  const degraded = new KeyedList(byId("degraded-list"), (one) => one.reason, () => {
    const node = el("li");
    return { node, update: (one) => setText(node, degradedWords(one)) };
  });
  byId("banner-retry").addEventListener("click", retry);
  byId("restarted-close").addEventListener("click", () => setHidden(byId("restarted"), true));

  function update({ phase, link, status, ageS }) {
    showPill(phase, status);
    showTab(phase, status);
    if (status) showFacts(facts, status, phase === "live" ? ageS : 0);
    setText(byId("age"), ageWords(phase, link, ageS));
    showBanner(phase, link, nextInMs);
    const list = (phase === "live" && status?.degraded) || [];
    if (list.length) setText(byId("degraded-head"), STATES[status.status].head);
    degraded.update(list);
    setHidden(byId("degraded"), list.length === 0);
  }

  function restarted(kind, status) {
    if (!kind) return;
    setHidden(byId("restarted"), false);
    setText(byId("restarted-text"), RESTARTED[kind](status, clock(Date.now() / 1000)));
  }

  return { update, restarted };
}

function showFacts(facts, status, ageS) {
  setHidden(byId("facts"), false);
  for (const { node, value, text } of facts) {
    setText(value, text(status, ageS));
    setHidden(node, !value.textContent);
  }
}

/** Shows the state in the tab's title and icon, for people who look at another tab. */
function showTab(phase, status) {
  const name = status?.host ? `kvdock on ${status.host}` : "kvdock";
  const said = { gone: "Unreachable: ", stale: "Stale: " }[phase] ?? "";
  const isFine = !status || status.status === "ok" || said;
  const title = visible(said + (isFine ? "" : `${STATES[status.status].pill[1]}: `) + name);
  if (document.title !== title) document.title = title;
  setAttr(byId("icon"), "href", ICONS[phase] ?? ICON);
}

/** It is the same as long as it lasts, but for who has most. */
function degradedWords({ reason, most, since }) {
  return [reason, `since ${clock(since)}`, most].filter(Boolean).join("; ");
}

function showPill(phase, status) {
  const [tone, words] = PILL[phase] ?? STATES[status.status].pill;
  setAttr(byId("pill"), "data-tone", tone);
  setText(byId("pill-text"), words);
}

function ageWords(phase, link, ageS) {
  if (phase === "live") return `updated ${clock(Date.now() / 1000 - ageS)}`;
  return link.hasData ? `figures are ${wholeAge(ageS)} old` : "";
}

function showBanner(phase, link, nextInMs) {
  setHidden(byId("banner"), phase !== "gone");
  if (phase !== "gone") return;
  setText(byId("banner-text"), `The server has been unreachable since ${clock(link.sinceUnix)}: ${link.why}.`);
  const seconds = Math.ceil(nextInMs() / 1000);
  const next = seconds > 0 ? `next in ${seconds}\u00a0s` : "trying now";
  setText(byId("banner-next"), `This page keeps trying (${next}) and recovers by itself.`);
}
