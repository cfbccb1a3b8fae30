"""What routers learn of whole SGLang engines on the CPU: which pages an engine could load, by SGLang's own hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import Engine
from kv_readers import Belief, ZmqReader, endpoints, streamed
from server_fixtures import fresh_server
from whole_engines import HITS, PROMPTS, prompts_of

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

server = fresh_server(
    pool_bytes=64 << 20, segment_bytes=64 << 20, heartbeat_s=0.1, observe="stream,kv_events",
)

DEVICE, LOADABLE = "GPU", "CPU_PINNED"


class Router:
    """What a router believes of an engine, by medium, and the name, parent and tokens of each page."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._reader = ZmqReader(SimpleNamespace(settings=settings))
        self.there, self.named = {DEVICE: Belief(), LOADABLE: Belief()}, {}

    def of(self, medium: str) -> set[int]:
        for _, _, events in self._reader.heard():
            for event in events:
                if event["type"] == "AllBlocksCleared":
                    for belief in self.there.values():
                        belief.hear([event])
                    continue
                self.there[event["medium"]].hear([event])
                if event["type"] == "BlockStored":
                    self._learn(event)
        return self.there[medium].there

    def _learn(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event.get("parent_block_hash")
        for at, name in enumerate(event["block_hashes"]):
            about = (parent, event["token_ids"][at * size : (at + 1) * size])
            assert self.named.setdefault(name, about) == about, "both media name a page alike"
            parent = name

    def close(self) -> None:
        self._reader.close()


@contextmanager
def telling(model: Path, address: str, **said: Any) -> Iterator[tuple[Engine, Router]]:
    """An engine that publishes, and who reads it."""
    settings = endpoints()
    config = {
        "publisher": "zmq", "endpoint": settings["kv_events_endpoint"], "bind": True,
        "replay_endpoint": settings["kv_events_replay_endpoint"],
    }
    more = said.pop("engine", {})
    with Engine(model, address, engine={"kv_events_config": json.dumps(config), **more}, **said) as engine:
        assert engine.about
        router = Router(settings)
        try:
            yield engine, router
        finally:
            router.close()


def pages(prompts: list[list[int]], new: int = 12) -> int:
    return sum((len(prompt) + new - 1) // 64 for prompt in prompts)


@pytest.mark.parametrize("more", [{}, {"tp_size": 2}], ids=["one rank", "two ranks"])
def test_a_router_believes_what_an_engine_could_load(
    more: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """By the names that SGLang's own events have, whoever stored it, also what an engine has generated itself."""
    binds = {"environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}} if more else {}
    with telling(models["llama"], server.unix, engine=more, **binds) as (engine, router):
        engine.generate(PROMPTS[2:], new=80)
        engine.generate(PROMPTS[:2])
        wanted = pages(PROMPTS[2:], 80) + pages(PROMPTS[:2])
        eventually(lambda: len(router.of(LOADABLE)) == wanted)
        assert router.of(LOADABLE) == router.of(DEVICE), "what it has stored it could load"

        engine.flush()
        eventually(lambda: router.of(DEVICE) == set() and len(router.of(LOADABLE)) == wanted)
        assert engine.generate(PROMPTS)[1] == HITS
        eventually(lambda: len(router.of(DEVICE)) == pages(PROMPTS))
        assert router.of(DEVICE) < router.of(LOADABLE)

        with Client(server.unix) as client:
            assert client.clear(ClearCache()).chunks == wanted
        eventually(lambda: router.of(LOADABLE) == set())


def test_what_others_stored_is_announced_once_it_is_looked_up(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as silent, telling(models["llama"], server.unix) as (engine, router):
        silent.generate(PROMPTS)
        silent.drain()
        assert router.of(LOADABLE) == set()
        assert engine.generate(PROMPTS[1:])[1] == HITS[1:]
        eventually(lambda: len(router.of(LOADABLE)) == pages(PROMPTS[1:]))
        assert router.of(LOADABLE) == router.of(DEVICE)


def test_what_depends_on_more_than_tokens_is_not_announced(models: dict[str, Path], server: ServerProcess) -> None:
    with telling(models["llama"], server.unix) as (engine, router):
        engine.generate(PROMPTS[:1], cache_salt="a tenant's")
        engine.generate(PROMPTS[:1], extra_key="a kind's")
        engine.generate(PROMPTS[1:2])
        engine.drain()
        eventually(lambda: len(router.of(LOADABLE)) == pages(PROMPTS[1:2]))
        assert router.of(LOADABLE) < router.of(DEVICE)


def test_chunks_of_earlier_weights_are_announced_as_removed(models: dict[str, Path], server: ServerProcess) -> None:
    with telling(models["llama"], server.unix) as (engine, router):
        engine.generate(PROMPTS)
        eventually(lambda: len(router.of(LOADABLE)) == pages(PROMPTS))
        engine.change("disk", models["llama-b"], version="other", flush=True)
        eventually(lambda: router.of(LOADABLE) == set())
        engine.generate(PROMPTS[:1])
        eventually(lambda: len(router.of(LOADABLE)) == pages(PROMPTS[:1]))


def test_the_server_names_pages_as_sglang_does(models: dict[str, Path], server: ServerProcess) -> None:
    """Without the sign, because the server's hashes have none."""
    with telling(models["llama"], server.unix) as (engine, router):
        engine.generate([*PROMPTS, prompts_of(700)[2] + PROMPTS[0]])
        engine.drain()
        wanted = pages(PROMPTS) + pages([prompts_of(700)[2] + PROMPTS[0]])
        eventually(lambda: len(router.of(DEVICE)) == wanted)

        def told() -> dict[str, tuple[str | None, list[int]]]:
            events = [event for _, body in streamed(server) for event in body["events"][1:]]
            return {one["block_hashes"][0]: (one["parent_block_hash"], one["token_ids"]) for one in events}

        eventually(lambda: len(told()) == wanted)
        assert told() == {
            unsigned(name): (unsigned(parent) if parent is not None else None, tokens)
            for name, (parent, tokens) in router.named.items()
        }


def unsigned(name: int) -> str:
    return f"{name % (1 << 64):016x}"
