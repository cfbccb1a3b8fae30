"""The engines of the demo: each reads prompts and writes results as lines of JSON, through two pipes.

    python -m kvdock.cli.demo_engine '[{"name": "A", "address": "unix:/…", "preset": "small", "chunk_tokens": 256,
                                        "reads": 3, "writes": 6}, …]'

One process imports torch, which takes most of the time of a start, and forks the others. An engine's own prefix cache
is off, so that all reuse comes from kvdock. A prefill chunk is as long as a kvdock chunk, so that a run with reuse
computes in the same shapes as one without, and gives the same bits. An engine ends when its pipe is closed, or with
SIGTERM; in both cases it detaches from the server. The first engine waits for the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import signal
import sys
from typing import Any

from kvdock.connectors.engine_connector import ConnectorSettings
from kvdock.connectors.session import Identity
from kvdock.engine.config import preset
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import connect
from kvdock.engine.request import SamplingParams

DRAIN_S = 30.0
LONGEST_PROMPT = 8192


def build(settings: dict[str, Any]) -> Engine:
    """`address` None: an engine without kvdock."""
    config = preset(settings["preset"])
    chunk = settings["chunk_tokens"]
    config = dataclasses.replace(
        config,
        prefill_chunk_tokens=chunk,
        max_step_tokens=max(config.max_step_tokens, chunk + config.max_running),
        num_blocks=max(config.num_blocks, LONGEST_PROMPT // config.block_tokens),
        max_local_hit_tokens=0,
    )
    kv = KVCache(config)
    if settings["address"] is None:
        return Engine(config, None, kv=kv)
    nonce = secrets.token_hex(8)
    identity = Identity(instance=f"demo-{nonce}", member=f"m-{nonce}", label=settings["name"])
    connector = connect(
        config, kv, ConnectorSettings(settings["address"]), identity, chunk_tokens=chunk
    )
    return Engine(config, connector, kv=kv)


def answer(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    """Serves one prompt, and waits for its stores."""
    done = engine.generate([order["prompt"]], SamplingParams(max_tokens=order["max_tokens"], ignore_eos=True))[0]
    drained = engine.drain(DRAIN_S)
    return {
        "prompt_tokens": len(done.prompt_tokens),
        "tokens": done.output_tokens,
        "text": done.text,
        "ttft_s": done.metrics.time_to_first_token_s,
        "loaded_tokens": done.metrics.loaded_tokens,
        "loaded_bytes": done.metrics.loaded_tokens * engine.config.model.kv_bytes_per_token,
        "stores_done": drained,
    }


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def serve(settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{settings['name']}: %(message)s")
    engine = build(settings)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        with os.fdopen(settings["reads"]) as prompts, os.fdopen(settings["writes"], "w") as answers:
            print(json.dumps({"ready": settings["name"]}), file=answers, flush=True)
            for line in prompts:
                print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)
    finally:
        engine.close()


def main() -> None:
    engines: list[dict[str, Any]] = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the engine has attached, so that it can detach
    mine = engines[0]
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
        serve(mine)
    finally:
        for pid in forked:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
