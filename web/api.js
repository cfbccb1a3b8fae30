// Plain GETs, and what the page knows of the line to the server. No DOM here, and time is passed in.

export const TIMEOUT_MS = 5000;
export const POLL_MS = 1000;
export const STALE_MS = 3000;
const BACKOFF_MS = [1000, 2000, 4000, 8000, 10000];

/** A JSON body, or an Error whose message is fit for people. */
export async function get(path, timeoutMs = TIMEOUT_MS) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), timeoutMs);
  try {
    const headers = { Accept: "application/json" };
    const answer = await fetch(path, { signal: abort.signal, cache: "no-store", headers });
    if (!answer.ok) throw new Error(`it answered ${answer.status}${await problem(answer)}`);
    return await answer.json();
  } catch (error) {
    if (abort.signal.aborted) throw new Error(`no answer within ${timeoutMs / 1000} s`);
    if (error instanceof TypeError) throw new Error("the connection failed");
    if (error instanceof SyntaxError) throw new Error("its answer is not JSON");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** The words of an RFC 9457 body, if it is one. */
async function problem(answer) {
  try {
    const body = await answer.json();
    const words = body.detail || body.title;
    return words ? `: ${words}` : "";
  } catch {
    return "";
  }
}

/** One path beside v1/status: its last good body, and since when it fails. One request at a time. */
export class Source {
  body = null;
  error = null;
  #busy = false;
  #nextMs = 0;

  constructor(path, everyMs = () => POLL_MS) {
    this.path = path;
    this.everyMs = everyMs;
  }

  /** Asks if it is due; resolves to true when there is something new to draw. */
  async refresh(nowMs) {
    if (this.#busy || nowMs < this.#nextMs) return false;
    this.#busy = true;
    try {
      this.body = await get(this.path);
      this.error = null;
    } catch (error) {
      this.error = error.message;
    } finally {
      this.#busy = false;
      this.#nextMs = nowMs + this.everyMs(this.body) - POLL_MS / 2;
    }
    return true;
  }
}

/**
 * The line to the server, from the answers to v1/status alone:
 *   connecting → live ⇄ stale (last good answer too old, nothing failed yet) ⇄ gone (the last try failed)
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

  /** `askedUnix`: when the call that failed was made; a call that timed out began to fail then. */
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

  /** "" | "pool" (another pool: its contents are new) | "server" (a new server life on the same pool). */
  restarted({ pool_id, incarnation }) {
    const before = this.#identity;
    this.#identity = { pool_id, incarnation };
    if (!before) return "";
    if (before.pool_id !== pool_id) return "pool";
    return before.incarnation === incarnation ? "" : "server";
  }
}
