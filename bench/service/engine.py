"""One vLLM instance that serves its share of a trace in a closed loop, for bench.service.

    python -m bench.service.engine FILE

FILE is JSON: connector, engine, environment, model, requests, concurrency, and perhaps rounds. It prints {"ready":
true} when it is ready, waits for a line, serves, and answers with the measurements; with rounds, once for each request.
Times are those of the frontend, and the engine's core runs in a process of its own, with vLLM's own loop.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from bench.vllm.engine import ENVIRONMENT, randomise, transfer

WARM_TOKENS, WARM_NEW = 200, 8


def build(said: dict[str, Any]) -> Any:
    """Starts vLLM; a configuration in place of a folder gets random weights."""
    from vllm import LLM

    options = {
        "skip_tokenizer_init": True, "seed": 0, "disable_log_stats": True, **said["engine"], **transfer(said),
    }
    if isinstance(said["model"], str):
        return LLM(model=said["model"], **options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(said["model"]))
        llm = LLM(model=folder, load_format="dummy", **options)
    llm.apply_model(randomise)
    return llm


class Loop:
    """`concurrency` requests at a time, each of (prompt, how many tokens it generates, whether its session ends).
    `weights`: their name for kvdock, "" for other connectors. Random weights come after the engine's start, and those
    are private unless requests name them."""

    def __init__(self, engine: Any, weights: str = "") -> None:
        self.engine, self.weights = engine, weights
        self.began_s: dict[str, float] = {}
        self.token_s: dict[str, list[float]] = {}
        """By request: the times at which its tokens came."""
        self.cached: dict[str, int] = {}
        self.finished: set[str] = set()

    def submit(self, name: str, ids: list[int], new_tokens: int, is_last: bool = False) -> None:
        from vllm import SamplingParams

        self.began_s[name], self.token_s[name] = time.perf_counter(), []
        self.engine.add_request(
            name, {"prompt_token_ids": ids},
            SamplingParams(
                max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
                extra_args={
                    "kv_transfer_params": {"kvdock": {"weights": self.weights, "session_end": is_last}}
                } if self.weights else None,
            ),
        )

    def step(self) -> None:
        for output in self.engine.step():
            name, now_s = output.request_id.split("-")[0], time.perf_counter()
            seen, tokens = self.token_s[name], len(output.outputs[0].token_ids)
            if tokens and not seen:
                self.cached[name] = output.num_cached_tokens or 0
            seen += [now_s] * (tokens - len(seen))
            if output.finished:
                self.finished.add(name)

    def serve(self, requests: list[tuple[list[int], int, bool]], concurrency: int, first: int = 0) -> dict[str, Any]:
        """Serves all requests. `first`: the number of the first one."""
        begun_s, queue = time.perf_counter(), deque(enumerate(requests, first))
        before = len(self.finished)
        while queue or self.engine.has_unfinished_requests():
            while queue and len(self.began_s) - len(self.finished) < concurrency:
                number, (ids, new_tokens, is_last) = queue.popleft()
                self.submit(f"r{number}", ids, new_tokens, is_last)
            self.step()
        names = [f"r{number}" for number in range(first, first + len(requests))]
        assert len(self.finished) - before == len(requests), "every request ends"
        return {
            "took_s": time.perf_counter() - begun_s,
            "tokens": [len(ids) for ids, _, _ in requests],
            "cached": [self.cached[name] for name in names],
            "began_s": [self.began_s[name] - begun_s for name in names],
            "ttft_s": [self.token_s[name][0] - self.began_s[name] for name in names],
            "gaps_s": [b - a for name in names for a, b in itertools.pairwise(self.token_s[name])],
        }


def main() -> None:
    said = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which carries the answers
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for randomise
    os.environ.update(ENVIRONMENT | own_process | said["environment"])
    llm = build(said)
    ours = (said["connector"] or {}).get("kv_connector") == "KvdockConnector"
    loop = Loop(llm.llm_engine, "random" if ours else "")
    loop.submit("warm", [5] * WARM_TOKENS, WARM_NEW)
    while loop.engine.has_unfinished_requests():
        loop.step()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    requests = said["requests"]
    size = 1 if said.get("rounds") else len(requests)
    for first in range(0, len(requests), max(1, size)):
        sys.stdin.readline()
        found = loop.serve(requests[first : first + size], said["concurrency"], first)
        print(json.dumps(found), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
