"""What options and hints of requests to whole SGLang engines on the CPU do at the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from engines import TP2, Engine
from stories import with_figures
from whole_engines import HITS, OTHERS, PROMPTS

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

PROMPT, OTHER, HIT = PROMPTS[2:], OTHERS[2:], HITS[2:]


def envelope(kind: str, **payload: Any) -> dict[str, Any]:
    """What an orchestrator sends."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


def own(**options: Any) -> dict[str, Any]:
    return {"custom_params": {"kvdock": options}}


def evict_half(client: Client) -> None:
    """One of the two prompts."""
    pool = client.status().pool
    chunk = pool.ready_bytes // (2 * HIT[0] // 64)
    free = pool.limit_bytes - pool.ready_bytes // 2 - chunk // 2  # the segment's header takes less than half a chunk
    assert client.evict(EvictChunks(free_bytes=free)).chunks == HIT[0] // 64


@pytest.mark.parametrize(("hint", "stays"), [
    ({}, OTHER), (own(session_end=True), OTHER),
    (envelope("kv.retain", priority=10, duration=600), PROMPT), (envelope("kv.evict"), OTHER),
], ids=["none", "its session has ended", "retain", "evict"])
def test_a_hint_says_what_is_evicted_first(
    hint: dict[str, Any], stays: list[list[int]], models: dict[str, Path], server: ServerProcess
) -> None:
    """Without one, the older prompt."""
    with Engine(models["llama"], server.unix) as engine, Client(server.unix) as client:
        ends = hint and stays is OTHER  # the newer prompt has the hint, and is evicted first all the same
        for prompt in (OTHER, PROMPT) if ends else (PROMPT, OTHER):
            engine.generate(prompt, **(hint if prompt is PROMPT else {}))
            engine.drain()
        evict_half(client)
        engine.flush()
        gone = PROMPT if stays is OTHER else OTHER
        assert (engine.generate(stays)[1], engine.generate(gone)[1]) == (HIT, [0])


@pytest.mark.parametrize("said", [{}, TP2], ids=["one rank", "two ranks"])
def test_all_pages_of_a_request_are_meant(
    said: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """Those that the engine had before, and those of tokens that it has generated."""
    with Engine(models["llama"], server.unix, **said) as engine, Client(server.unix) as client:
        engine.generate(PROMPT)
        engine.generate(PROMPT, new=70, **envelope("kv.retain", priority=10, duration=600))
        engine.drain()
        eventually(lambda: client.status().pool.retained_bytes > 0)
        pool, chunks = client.status().pool, (len(PROMPT[0]) + 70 - 1) // 64
        assert pool.retained_bytes == pool.ready_bytes and client.status().counters["stored_chunks"] == chunks


def test_a_label_names_what_its_prompts_share(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as engine, Client(server.unix) as client:
        engine.generate(PROMPT, **own(label="review-bot"))
        engine.drain()
        eventually(lambda: [one.labels for one in client.prefixes().prefixes] == [["review-bot"]])


def test_hints_that_cannot_be_read_fail_no_request(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Nor do those of requests that were aborted count."""
    with Engine(models["llama"], server.unix, **with_figures(tmp_path)) as engine, Client(server.unix) as client:
        for hint in (own(priority=3), envelope("kv.prefetch", priority=10), {"custom_params": {"another": "part's"}}):
            engine.generate(PROMPT, **hint)
        assert engine.figures()["kvdock_hints_ignored_total"] == 2
        engine.do("generate", prompts=PROMPT, new=3000, abort_s=0.5, **envelope("kv.retain", priority=10))
        engine.generate(OTHER)
        engine.drain()
        assert client.status().pool.retained_bytes == 0


def test_a_request_may_opt_out_of_loads_and_of_stores(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as engine, Client(server.unix) as client:
        engine.generate(PROMPT, **own(store=False))
        engine.drain()
        assert client.status().counters["stored_chunks"] == 0
        engine.flush()
        assert engine.generate(PROMPT)[1] == [0]
        engine.drain()
        engine.flush()
        lookups = client.status().counters["lookups"]
        assert engine.generate(PROMPT, **own(load=False))[1] == [0]
        assert client.status().counters["lookups"] == lookups
        engine.flush()
        assert engine.generate(PROMPT)[1] == HIT
        eventually(lambda: client.status().hits.requests == 4)
        assert client.status().hits.computed["opted_out"] == len(PROMPT[0]) // 64 * 64
