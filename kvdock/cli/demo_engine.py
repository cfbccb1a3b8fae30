"""The engines of the demo: each reads prompts and writes results as lines of JSON, through two pipes.

    python -m kvdock.cli.demo_engine '[{"name": "A", "address": "unix:/…", "preset": "small", "chunk_tokens": 256,
                                        "reads": 3, "writes": 6}, …]'

One process imports torch and loads the model, which takes most of the time of a start, and forks the others. An
engine's own prefix cache is off, so that all reuse comes from kvdock. A prefill chunk is as long as a kvdock chunk, so
that a run with reuse computes in the same shapes as one without, and gives the same bits. An engine ends when its pipe
is closed, or with SIGTERM; in both cases it detaches from the server. The first engine waits for the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import signal
import sys
from typing import Any

import torch

from kvdock.connectors.engine_connector import ConnectorSettings
from kvdock.connectors.session import Identity
from kvdock.engine import tokenizer as bytes_tokenizer
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import connect
from kvdock.engine.model import Model, Runner
from kvdock.engine.request import Completion, SamplingParams
from kvdock.engine.tokenizer import Tokenizer
from kvdock.engine.trained import smollm2

DRAIN_S = 30.0
LONGEST_PROMPT = 8192


TRAINED = "smollm2"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What all engines have in common. `speaks`: whether answers are text, so that one ends with its first sentence."""

    config: EngineConfig
    model: Model
    tokenizer: Tokenizer
    speaks: bool


def load(name: str, chunk_tokens: int) -> Loaded:
    torch.set_num_threads(1)  # a process whose threads have computed cannot be forked
    trained = smollm2() if name == TRAINED else None
    config = trained.engine() if trained is not None else preset(name)
    config = dataclasses.replace(
        config,
        prefill_chunk_tokens=chunk_tokens,
        max_step_tokens=max(config.max_step_tokens, chunk_tokens + config.max_running),
        num_blocks=max(config.num_blocks, LONGEST_PROMPT // config.block_tokens),
        max_local_hit_tokens=0,
    )
    tokenizer = trained.tokenizer if trained is not None else bytes_tokenizer
    return Loaded(config, Model(config.model), tokenizer, trained is not None)


def build(settings: dict[str, Any], loaded: Loaded) -> Engine:
    """`address` None: an engine without kvdock."""
    config = loaded.config
    kv = KVCache(config)
    connector = None
    if settings["address"] is not None:
        nonce = secrets.token_hex(8)
        identity = Identity(instance=f"demo-{nonce}", member=f"m-{nonce}", label=settings["name"])
        connector = connect(
            config, kv, ConnectorSettings(settings["address"]), identity, chunk_tokens=settings["chunk_tokens"]
        )
    return Engine(config, connector, runner=Runner(config, kv, model=loaded.model), tokenizer=loaded.tokenizer)


def answer(engine: Engine, order: dict[str, Any], *, speaks: bool) -> dict[str, Any]:
    """Serves one prompt, and waits for its stores."""
    sampling = SamplingParams(max_tokens=order["max_tokens"], ignore_eos=not speaks)
    request = engine.add_request(order["prompt"], sampling)
    done: Completion | None = None
    tokens: list[int] = []
    while done is None:
        for output in engine.step():
            tokens.append(output.token)
            done = output.completion
            if done is None and speaks and ends_sentence(engine.tokenizer.decode(tokens)):
                done = engine.abort(request)
    drained = engine.drain(DRAIN_S)
    return {
        "prompt_tokens": len(done.prompt_tokens),
        "tokens": done.output_tokens,
        "text": done.text.strip(),
        "ttft_s": done.metrics.time_to_first_token_s,
        "loaded_tokens": done.metrics.loaded_tokens,
        "loaded_bytes": done.metrics.loaded_tokens * engine.config.model.kv_bytes_per_token,
        "stores_done": drained,
    }


def ends_sentence(text: str) -> bool:
    """A point after a digit may be one within a number."""
    return bool(text.strip()) and (text.endswith(("\n", "?", "!")) or re.search(r"[^\d.]\.$", text) is not None)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def serve(settings: dict[str, Any], loaded: Loaded) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{settings['name']}: %(message)s")
    engine = build(settings, loaded)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        with os.fdopen(settings["reads"]) as prompts, os.fdopen(settings["writes"], "w") as answers:
            print(json.dumps({"ready": settings["name"]}), file=answers, flush=True)
            for line in prompts:
                print(json.dumps(answer(engine, json.loads(line), speaks=loaded.speaks)), file=answers, flush=True)
    finally:
        engine.close()


def main() -> None:
    engines: list[dict[str, Any]] = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the engine has attached, so that it can detach
    mine = engines[0]
    loaded = load(mine["preset"], mine["chunk_tokens"])
    forked: list[int] = []
    for other in engines[1:]:
        pid = os.fork()
        if pid == 0:
            mine = other
            forked.clear()
            break
        forked.append(pid)
    for other in engines:
        if other is not mine:
            os.close(other["reads"])
            os.close(other["writes"])
    try:
        serve(mine, loaded)
    finally:
        for pid in forked:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
