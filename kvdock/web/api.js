// Calls of the server, the access token that they carry, and the state of the connection to it. Uses no DOM; the time
// that passes is passed in.

import { received } from "./format.js";
import { keep, kept } from "./tab.js";

export const TIMEOUT_MS = 5000;
const SEND_TIMEOUT_MS = 30_000;
const JSON_TYPE = "application/json";
export const POLL_MS = 1000;
export const STALE_MS = 3000;
const REFUSED_MS = 300_000;
const MOST_PAGES = 8;
const BACKOFF_MS = [1000, 2000, 4000, 8000, 10000];

/** The token is kept for this tab: a reload finds it, other tabs do not, and it ends with the tab. It is in no URL. */
const KEPT_AS = "kvdock-token";
let token = kept(KEPT_AS);
/** Whether the server accepted the token in the last call that carried it. */
let isKnown = false;
/**
 * Paths that are open to everybody. They are fetched without the token until the server has accepted it, because an
 * unknown token would be refused. With an accepted token the answers contain more.
 */
const OPEN = new Set(["v1/status", "v1/stats", "v1/verdict"]);

/** From now on calls carry this token; "": none. */
export function useToken(text) {
  token = text;
  isKnown = false;
  keep(KEPT_AS, text);
}

export const hasToken = () => token !== "";

const isOpen = (path) => OPEN.has(path.split("?")[0]);

function headersFor(path) {
  return token && (isKnown || !isOpen(path)) ? { Authorization: `Bearer ${token}` } : {};
}

/** The answer to a fetch; if it is a refusal, throws an Error with a message for the user and the answer's status. */
export async function ask(path, { headers = {}, ...options } = {}) {
  const all = { ...headersFor(path), ...headers };
  const answer = await fetch(path, { cache: "no-store", ...options, headers: all });
  if (all.Authorization) isKnown = answer.status !== 401;
  if (answer.ok) return answer;
  if (all.Authorization && !isKnown && isOpen(path)) return ask(path, { headers, ...options }); // the token was revoked
  const refusal = new Error(`it answered ${answer.status}${await problem(answer)}`);
  throw Object.assign(refusal, { status: answer.status });
}

/** A JSON body; throws an Error whose message can be shown to people, with the answer's status if there was one. */
export function get(path, timeoutMs = TIMEOUT_MS) {
  const headers = { Accept: JSON_TYPE };
  return within(timeoutMs, async (signal) => parsed(await (await ask(path, { signal, headers })).text()));
}

/** Sends a body and resolves to the answer's. Throws as `get` does. */
export function send(method, path, body, timeoutMs = SEND_TIMEOUT_MS) {
  const headers = { Accept: JSON_TYPE, "Content-Type": JSON_TYPE };
  const options = { method, headers, body: JSON.stringify(body) };
  return within(timeoutMs, async (signal) => parsed(await (await ask(path, { ...options, signal })).text()));
}

const parsed = (text) => JSON.parse(received(text));

async function within(timeoutMs, call) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), timeoutMs);
  try {
    return await call(abort.signal);
  } catch (error) {
    if (abort.signal.aborted) throw new Error(`no answer within ${timeoutMs / 1000} s`);
    if (error instanceof TypeError) throw new Error("the connection failed");
    if (error instanceof SyntaxError) throw new Error("its answer is not JSON");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** The text of a refusal whose body is problem details (RFC 9457); else empty. */
async function problem(answer) {
  try {
    const body = parsed(await answer.text());
    const words = body.detail || body.title;
    return words ? `: ${words}` : "";
  } catch {
    return "";
  }
}

/** A path other than v1/status: its last good body, and the error of the last fetch. One request at a time. */
export class Source {
  body = null;
  /** When the body came, in Unix seconds. */
  atUnix = 0;
  error = null;
  /** The server refuses the path to this page, because the token is missing or lacks the scope. */
  locked = false;
  /** The server does not have the path, or it is switched off. */
  absent = false;
  /** The last fetch was refused. The server counts such calls, so the path is seldom fetched again. */
  isRefused = false;
  #busy = false;
  /** How often the path or the caller has changed. An answer from before the last change is not used. */
  #turn = 0;
  /** When the last fetch ended. */
  #doneMs = -Infinity;

  /** everyMs: body => ms between two fetches. list: the field of a body that comes in pages, at most MOST_PAGES. */
  constructor(path, everyMs = () => POLL_MS, list = "") {
    this.path = path;
    this.everyMs = everyMs;
    this.list = list;
  }

  /** Makes the next call fetch without waiting. */
  hurry() {
    this.#doneMs = -Infinity;
  }

  /** Another caller asks from now on: what the last one was told is forgotten. */
  forget() {
    this.body = this.error = null;
    this.locked = this.absent = this.isRefused = false;
    this.#turn += 1;
    this.hurry();
  }

  /** Changes the path; the last body stays until the first answer of the new path. */
  turnTo(path) {
    this.path = path;
    this.#turn += 1;
    this.hurry();
  }

  /**
   * Fetches if it is time; resolves to true when there is something new to draw. patience: how many times longer than
   * usual it may wait.
   */
  async refresh(nowMs, patience = 1) {
    const waitMs = this.isRefused ? REFUSED_MS : this.everyMs(this.body) * patience;
    if (this.#busy || nowMs < this.#doneMs + waitMs - POLL_MS / 2) return false;
    this.#busy = true;
    const turn = this.#turn;
    try {
      const body = await this.#whole(this.path);
      if (turn !== this.#turn) return false;
      this.body = body;
      this.atUnix = Date.now() / 1000;
      this.error = null;
      this.locked = this.absent = this.isRefused = false;
    } catch (error) {
      if (turn !== this.#turn) return false;
      this.isRefused = error.status >= 400 && error.status < 500;
      this.locked = error.status === 401 || error.status === 403;
      this.absent = error.status === 404;
      if (this.locked || this.absent) this.body = null;
      this.error = this.locked || this.absent ? null : error.message;
    } finally {
      this.#busy = false;
      this.#doneMs = turn === this.#turn ? nowMs : -Infinity;
    }
    return true;
  }

  async #whole(path) {
    const body = await get(path);
    const mark = path.includes("?") ? "&" : "?";
    for (let page = 1; this.list && body.next && page < MOST_PAGES; page += 1) {
      const more = await get(`${path}${mark}cursor=${encodeURIComponent(body.next)}`);
      body[this.list].push(...more[this.list]);
      body.next = more.next;
    }
    return body;
  }
}

/**
 * The state of the connection, which follows from the answers to v1/status alone:
 *   connecting → live ⇄ stale (the last good answer is old, nothing has failed) ⇄ gone (the last fetch failed)
 */
export class Link {
  #goodMs = null;
  #failures = 0;
  #identity = null;
  sinceUnix = null;
  why = "";

  good(nowMs) {
    this.#goodMs = nowMs;
    this.#failures = 0;
    this.sinceUnix = null;
    this.why = "";
  }

  /** `askedUnix`: when the failed fetch began, because a server that does not answer was unreachable from then on. */
  bad(why, askedUnix) {
    this.#failures += 1;
    this.sinceUnix ??= askedUnix;
    this.why = why;
  }

  get hasData() {
    return this.#goodMs !== null;
  }

  phase(nowMs) {
    if (this.#failures) return "gone";
    if (!this.hasData) return "connecting";
    return this.ageMs(nowMs) > STALE_MS ? "stale" : "live";
  }

  ageMs(nowMs) {
    return this.hasData ? nowMs - this.#goodMs : 0;
  }

  delayMs() {
    return this.#failures ? BACKOFF_MS[Math.min(this.#failures, BACKOFF_MS.length) - 1] : POLL_MS;
  }

  /** "" | "pool" (another pool, with new contents) | "server" (the server restarted and took over its pool). */
  restarted({ pool_id, incarnation }) {
    const before = this.#identity;
    this.#identity = { pool_id, incarnation };
    if (!before) return "";
    if (before.pool_id !== pool_id) return "pool";
    return before.incarnation === incarnation ? "" : "server";
  }
}
