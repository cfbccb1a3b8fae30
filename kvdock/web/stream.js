// Server-sent events over fetch: an EventSource cannot send the access token. Uses no DOM.
//
// New events are read every few seconds. An open stream would cost the server more: it would wake for the events that
// requests cause, fifty times a second.

import { ask, TIMEOUT_MS } from "./api.js";
import { received } from "./format.js";

const AGAIN_MS = 3000;
/** The wait after a refusal: the server sends no events, or none to this page, and counts refused calls. */
const REFUSED_MS = 300_000;

/**
 * Reads v1/events, from the oldest event that the server has kept, until `stop`. Each read sends the id of the last
 * event, so that no event is missed.
 * hear: (events) => void, called with the events of one read. say: (trouble) => void, "" if there is none.
 */
export class EventReader {
  #abort = null;
  #lastId = "";
  #query = "";

  constructor(hear, say) {
    this.hear = hear;
    this.say = say;
  }

  get isRunning() {
    return this.#abort !== null;
  }

  /** kinds: names; none: all. Another choice begins with the kept events again. */
  start(kinds) {
    const query = kinds.length ? `kinds=${kinds.join(",")}` : "";
    if (this.isRunning && query === this.#query) return;
    this.stop();
    if (query !== this.#query) this.#lastId = "";
    this.#query = query;
    this.#abort = new AbortController();
    this.#run(this.#abort.signal);
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  async #run(signal) {
    while (!signal.aborted) {
      let waitMs = AGAIN_MS;
      try {
        await this.#read(signal);
        this.say("");
      } catch (error) {
        if (signal.aborted) return;
        this.say(error instanceof TypeError ? "the connection failed" : error.message);
        if (error.status >= 400 && error.status < 500) waitMs = REFUSED_MS;
      }
      await new Promise((done) => setTimeout(done, waitMs));
    }
  }

  async #read(signal) {
    const headers = this.#lastId ? { "Last-Event-ID": this.#lastId } : {};
    const soon = AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]);
    const answer = await ask(`v1/events${this.#query ? `?${this.#query}` : ""}`, { headers, signal: soon });
    const text = received(await answer.text());
    if (signal.aborted) return;
    const events = text.split("\n\n").map((piece) => this.#event(piece)).filter(Boolean);
    if (events.length) this.hear(events);
  }

  /** One event; null for a comment or a `retry`. */
  #event(piece) {
    const fields = new Map(piece.split("\n").map((line) => [line.split(":", 1)[0], line.slice(line.indexOf(":") + 2)]));
    if (fields.has("id")) this.#lastId = fields.get("id");
    return fields.has("data") ? JSON.parse(fields.get("data")) : null;
  }
}
