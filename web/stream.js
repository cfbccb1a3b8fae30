// Server-sent events over fetch: an EventSource cannot send the access token. Uses no DOM.

import { ask } from "./api.js";

const AGAIN_MS = 2000;

/**
 * Reads v1/events from what the server keeps on, and goes on until `stop`. Whatever ends it, it comes back with the id
 * of the last event, so that nothing is missed.
 * hear: (events) => void, gets those that came together. say: (trouble) => void, "" while it is well.
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

  /** kinds: names; none: all. Another choice begins with what is kept. */
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
      try {
        if (!this.#lastId) await this.#read("", signal);
        await this.#read("follow=true", signal);
        this.say("");
      } catch (error) {
        if (signal.aborted) return;
        this.say(error instanceof TypeError ? "the connection failed" : error.message);
      }
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }

  async #read(follow, signal) {
    const query = [this.#query, follow].filter(Boolean).join("&");
    const headers = this.#lastId ? { "Last-Event-ID": this.#lastId } : {};
    const answer = await ask(`v1/events${query ? `?${query}` : ""}`, { headers, signal });
    this.say("");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const end = text.lastIndexOf("\n\n");
      if (end < 0) continue;
      const events = text.slice(0, end).split("\n\n").map((piece) => this.#event(piece)).filter(Boolean);
      text = text.slice(end + 2);
      if (events.length && !signal.aborted) this.hear(events);
    }
  }

  /** One event; null for a comment or a `retry`. */
  #event(piece) {
    const fields = new Map(piece.split("\n").map((line) => [line.split(":", 1)[0], line.slice(line.indexOf(":") + 2)]));
    if (fields.has("id")) this.#lastId = fields.get("id");
    return fields.has("data") ? JSON.parse(fields.get("data")) : null;
  }
}
