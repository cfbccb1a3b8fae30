// What an administrator can change. Each change is confirmed first, with what it costs.

import { send } from "../api.js";
import { button, labelled, search, select, setOptions } from "../choice.js";
import { confirmed } from "../confirm.js";
import { el, setHidden, setText } from "../dom.js";
import { bytes, count, plural, weightsName } from "../format.js";
import { parsedBytes } from "../parse.js";
import { COSTS, FOR, pin } from "./keep.js";
import { mountLimits } from "./limits.js";
import { mountTenants } from "./tenants.js";

const ALL = "";
const UNTIL = [...FOR, ["0", "no time: stop keeping it"]];
/** By the setting `on_exit`. */
const AT_ITS_END = {
  keep: "When this server is stopped, it leaves its pool: the next server continues with the cached chunks.",
  remove: "When this server is stopped, all cached chunks are lost. A takeover keeps them: kvdock serve --takeover.",
};
const WHOLE_KEY = /^[0-9a-f]{64}$/;

const freeNow = ({ pool: p }) => p.free_bytes + Math.max(0, p.limit_bytes - p.allocated_bytes);

function nameOf({ namespace, model, manifest, tenant, weights }) {
  return [
    model ?? manifest.model, manifest.adapter, weightsName(weights), tenant, namespace.slice(0, 8),
  ].filter(Boolean).join(" · ");
}

/** What is lost when one namespace, or all, are cleared. */
function lossOf(chosen, { status: { chunks, pool } }) {
  const [n, size] = chosen ? [chosen.chunks, chosen.bytes] : [chunks.ready, pool.ready_bytes];
  const what = n === undefined ? "All its chunks" : `${plural(n, "chunk")} (${bytes(size)})`;
  return [
    `${what} will not be found any more${chosen ? "" : ", of every model and tenant"}.`,
    "Requests that would have loaded them will compute them again. This cannot be undone.",
  ];
}

/** A form: controls, a button, and the result. run: () => promise of a sentence, or "" if nothing was done. */
function action(title, about, controls, verb, run) {
  const said = el("p", { cls: "said", attrs: { role: "status" } });
  const go = button(verb, null);
  go.type = "submit";
  const line = el("div", { cls: "bar-of-controls", children: [...controls, go] });
  const head = [el("h3", { text: title }), el("p", { cls: "muted", text: about })];
  const form = el("form", { cls: "action", children: [...head, line, said] });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      setText(said, await run());
    } catch (error) {
      setText(said, `Not done: ${error.message}.`);
    }
    go.disabled = false;
  });
  return form;
}

/** changed: () => void, is called after each change. */
export function mountAdmin(root, changed) {
  let bodies = null;
  const namespaces = () => bodies.namespaces?.namespaces ?? [];
  const named = (id) => namespaces().find((n) => n.namespace === id) ?? null;
  const grid = el("div", { cls: "actions" });
  const where = select([[ALL, "everything"]]);
  const amount = search("8 GiB");
  const [space, key, until] = [select([]), search("64 hex digits"), select(UNTIL)];
  const atItsEnd = el("p", { cls: "advice" });
  root.append(atItsEnd, grid);
  setHidden(grid, true); // until the first answer

  async function clear() {
    const chosen = named(where.value);
    const title = chosen ? `Clear ${nameOf(chosen)}?` : "Clear the whole cache?";
    if (!(await confirmed({ title, lines: lossOf(chosen, bodies), verb: "Clear" }))) return "";
    const done = await send("POST", "v1/cache/clear", chosen ? { namespace: chosen.namespace } : {});
    changed();
    const tiers = (done.pending_tiers ?? []).join(", ");
    const pending = tiers ? ` Pending in the tiers ${tiers}, which are not used for the namespace until then.` : "";
    return `Cleared ${plural(done.chunks, "chunk")}.${pending}`;
  }

  async function evict() {
    const wanted = parsedBytes(amount.value);
    const missing = wanted - freeNow(bodies.status);
    const lines = missing > 0
      ? [`About ${bytes(missing)} of the ${bytes(bodies.status.pool.ready_bytes)} that can be hit are evicted, the `
          + "least valuable chunks first.", "Chunks that no lower tier has are lost: requests compute them again."]
      : [`${bytes(freeNow(bodies.status))} are free already, so nothing is evicted.`];
    if (!(await confirmed({ title: `Evict until ${bytes(wanted)} are free?`, lines, verb: "Evict" }))) return "";
    const done = await send("POST", "v1/cache/evict", { free_bytes: wanted });
    changed();
    return `Evicted ${plural(done.chunks, "chunk")} (${bytes(done.bytes)}); ${bytes(done.free_bytes)} are free.`;
  }

  async function keep() {
    const text = key.value.trim().toLowerCase();
    if (!WHOLE_KEY.test(text)) throw new Error(`a key has 64 hex digits, this has ${count(text.length)} characters`);
    const ends = until.value === "0";
    const title = `${ends ? "Stop keeping" : "Keep"} ${text.slice(0, 12)}…?`;
    const lines = ends
      ? ["The prefix may then be evicted like any other. Nothing is lost by that alone."]
      : [`The chunk and those before it in its prefix are not evicted for ${until.selectedOptions[0].text}.`,
        COSTS];
    if (!(await confirmed({ title, lines, verb: ends ? "Stop" : "Keep" }))) return "";
    const said = await pin(space.value, text, until.selectedOptions[0]);
    changed();
    return said;
  }

  grid.append(
    action("Clear", "Removes all chunks of one namespace, or of all.", [labelled("What", where)], "Clear…",
      clear),
    action("Free memory", "Evicts the least valuable chunks until this much is free.", [labelled("Free", amount)],
      "Evict…", evict),
    action(
      "Keep a prefix", "Keeps a chunk, and the chunks before it, from being evicted. kvdock keep keeps a whole prompt.",
      [labelled("Namespace", space), labelled("Key of the last chunk", key), labelled("For", until)], "Keep…", keep,
    ),
  );
  const drawLimits = mountLimits(root, action, changed);
  const drawTenants = mountTenants(root);

  return (latest) => {
    bodies = latest;
    setHidden(grid, false);
    setText(atItsEnd, AT_ITS_END[latest.config.settings.on_exit] ?? "");
    const all = namespaces().map((n) => [n.namespace, nameOf(n)]);
    setOptions(where, [[ALL, "everything"], ...all]);
    setOptions(space, all);
    setHidden(space.closest("form"), all.length === 0);
    drawLimits(latest);
    drawTenants(latest);
  };
}
