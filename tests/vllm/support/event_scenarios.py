"""What a router hears of an engine that publishes KV cache events, over vLLM's own publisher: each scenario's figures
are what it believes, as tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from sched_engine import SchedEngine
from sched_scenarios import prompt
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

PATIENCE_S = 20.0
SOME_HEARTBEATS_S = 0.5
"""The server is to be started with much shorter ones."""
Block = tuple[int, bytes]
"""KV cache group and hash."""


class Router:
    """Knows of each medium the blocks that are there, each as (the one before it, its tokens)."""

    def __init__(self, engine: SchedEngine) -> None:
        self._engine = engine
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(engine.config.kv_events_config.endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.there: dict[str, dict[Block, tuple[bytes | None, list[int]]]] = {"GPU": {}, "CPU": {}}
        self.ever: dict[Block, tuple[bytes | None, list[int]]] = {}
        """All blocks that the GPU has announced."""
        self.wrong: list[str] = []
        self.kinds: set[str | None] = set()

    def hears(self, wanted: Callable[[], bool]) -> bool:
        """While the engine idles: what is told comes with its steps."""
        until = time.monotonic() + PATIENCE_S
        while not wanted() and time.monotonic() < until:
            self._engine.step()
            while self._socket.poll(20):
                for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                    self._hear(event)
        return wanted()

    def stays(self) -> None:
        """Over some heartbeats nothing is told."""
        before, until = dict(self.there["CPU"]), time.monotonic() + SOME_HEARTBEATS_S
        self.hears(lambda: time.monotonic() > until or self.there["CPU"] != before)
        if self.there["CPU"] != before:
            self.wrong.append("told of what it has not met")

    def _hear(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.there["GPU"].clear()
            return
        there = self.there[event.medium]
        hashes = [(event.group_idx, one) for one in event.block_hashes]
        if not isinstance(event, BlockStored):
            self.wrong += [f"removed, was not there: {one}" for one in hashes if one not in there]
            for one in hashes:
                there.pop(one, None)
            return
        before, size = event.parent_block_hash, event.block_size
        if len(event.token_ids) != size * len(hashes):
            self.wrong.append(f"{len(hashes)} blocks of {size} with {len(event.token_ids)} tokens")
        for at, (group, one) in enumerate(hashes):
            block = before, list(event.token_ids[at * size : (at + 1) * size])
            if event.medium == "GPU":
                self.ever[group, one] = block
            else:
                self.kinds.add(event.kv_cache_spec_kind)
                if (group, one) in there:
                    self.wrong.append(f"stored twice: {one!r}")
                if self.ever.get((group, one), block) != block:
                    self.wrong.append(f"not what the engine's own events said: {one!r}")
            there[group, one] = block
            before = one

    def prefix(self, group: int, medium: str) -> list[int]:
        """The tokens of the one chain of blocks that is there."""
        by_parent = {before: (one, tokens) for (of, one), (before, tokens) in self.there[medium].items() if of == group}
        made: list[int] = []
        one: bytes | None = None
        while one in by_parent:
            one, tokens = by_parent.pop(one)
            made += tokens
        assert not by_parent, "blocks whose parent is not there"
        return made

    def close(self) -> None:
        self._socket.close()


def believed(address: str, windows: list[int | None], sizes: list[int]) -> dict[str, Any]:
    """An engine stores, is reset, and stores again; another one loads it. Of each: as many tokens of the prompt as a
    router thinks are in the server."""
    tokens, full = prompt(1, 150), windows.index(None)
    settings: dict[str, Any] = {
        "windows": windows, "sizes": sizes, "events": True, "weights_digest": os.urandom(8).hex(),
    }
    engine = SchedEngine(address, **settings)
    router = Router(engine)
    told: dict[str, Any] = {}

    def tell(name: str, router: Router, wanted: int) -> None:
        router.hears(lambda: len(router.prefix(full, "CPU")) == wanted)
        prefix = router.prefix(full, "CPU")
        told[name] = len(prefix) if prefix == tokens[: len(prefix)] else f"other tokens: {prefix}"

    engine.complete("cold", tokens)
    tell("stored", router, 128)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    tell("reset", router, 0)
    engine.complete("again", tokens)
    tell("again", router, 128)
    other = SchedEngine(address, **settings)
    listener = Router(other)
    listener.stays()
    other.complete("warm", tokens)
    tell("loaded", listener, 128)
    third = SchedEngine(address, **settings)
    computing = Router(third)
    third.add("computed", tokens).skip_reading_prefix_cache = True  # as with log-probabilities of the prompt
    third.run()
    tell("there already", computing, 128)
    told["loaded_tokens"] = [other.loaded_tokens, third.loaded_tokens]
    told["groups"] = sorted({group for group, _ in listener.there["CPU"]})
    told["kinds"], told["wrong"] = sorted(map(str, router.kinds)), router.wrong + listener.wrong + computing.wrong
    for one in (router, listener, computing, engine, other, third):
        one.close()
    return told
