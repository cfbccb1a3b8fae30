"""Engines that compute prompts for one that decodes (--disaggregation-mode), on the CPU: kvdock serves the former, and
Mooncake sends KV to the latter over TCP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from apart import Sender, decoder
from api_helpers import ServerProcess, comes_true, eventually
from engines import TP2, Engine, odd
from whole_engines import CROWD, HITS, NOTHING, OTHERS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

Told = dict[str, Any]
NO_OVERLAP = {"engine": {"disable_overlap_schedule": True}, "environ": {}}
DEFAULT: dict[str, Told] = {"engine": {}, "environ": {}}
TAIL = PROMPTS[2][:128] + OTHERS[2]
"""Computed in three chunks behind a hit of two pages."""


@contextmanager
def nothing_is_left(server: ServerProcess) -> Iterator[None]:
    yield
    with Client(server.unix) as client:
        assert comes_true(lambda: not client.status().leases and not client.status().reservations)


@pytest.mark.parametrize(("kind", "how"), [
    ("llama", DEFAULT), ("llama", NO_OVERLAP), ("window", DEFAULT), ("mla", DEFAULT), ("states", DEFAULT),
    ("llama", TP2),
], ids=["attention", "no overlap", "window", "latent", "states", "two ranks"])
def test_what_is_loaded_is_sent_as_what_was_computed(
    kind: str, how: dict[str, Told], models: dict[str, Path], server: ServerProcess
) -> None:
    """The engine that decodes says what a single engine says, in every bit of its log-probabilities."""
    model = models[kind]
    with Engine(model, None, **how) as alone:
        computed, local = alone.generate(PROMPTS), alone.generate(PROMPTS)
        assert (computed[1], local[1]) == (NOTHING, HITS)
    with (
        nothing_is_left(server),
        decoder(model, **how) as to,
        Sender(model, server.unix, to, **how) as first,
        Sender(model, server.unix, to, **how) as second,
    ):
        assert first.send().decoded() == computed
        first.drain()
        assert second.send().decoded() == local
        first.flush()
        assert first.send().decoded() == local
        with Client(server.unix) as client:
            eventually(lambda: client.status().hits.requests >= 9)
            found = client.status().hits
            assert (found.requests, found.local_tokens, found.loaded) == (9, 0, {"memory": 2 * sum(HITS)})


@pytest.mark.parametrize("how", [DEFAULT, NO_OVERLAP, TP2], ids=["overlap", "no overlap", "two ranks"])
def test_kv_whose_load_failed_is_never_sent(
    how: dict[str, Told], models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """The engine that decodes is told, and does not wait for it until a timeout."""
    damaged = odd("DamagedLinker", tmp_path)
    said: Told = {"engine": how["engine"], "environ": {**how["environ"], **damaged["environ"]}}
    with (
        nothing_is_left(server),
        decoder(models["llama"], **how) as to,
        Sender(
            models["llama"], server.unix, to, **said, linker=damaged["linker"], plugin_of_others="tell_what_is_sent"
        ) as sender,
    ):
        for prompt in (*PROMPTS, TAIL):
            right = sender.send([prompt])
            assert right.rooms[0] in rooms_sent(tmp_path)
            sender.drain()
            sender.flush()
            (tmp_path / "damage").touch()
            failed = sender.send([prompt])
            assert not (tmp_path / "damage").exists(), "it was loaded"
            assert "External KV cache load failed" in failed.prefill["why"][0]
            assert "Failed to get kvcache from prefill instance" in failed.decode["why"][0]
            assert failed.rooms[0] not in rooms_sent(tmp_path)
            sender.flush()
            tokens, cached = sender.send([prompt]).decoded()
            assert tokens_of(tokens) == tokens_of(right.decoded()[0]) and cached[0] < len(prompt) // 64 * 64


def test_many_at_once_are_loaded_and_aborted(models: dict[str, Path], server: ServerProcess) -> None:
    """In a pool that holds a few of them."""
    with (
        nothing_is_left(server),
        decoder(models["llama"], **DEFAULT) as to,
        Sender(models["llama"], server.unix, to, engine={"max_total_tokens": 1536}, environ={}) as sender,
    ):
        computed, _ = sender.send(CROWD).decoded()
        sender.drain()
        sender.flush()
        loaded, cached = sender.send(CROWD, at_once=True).decoded()
        assert tokens_of(loaded) == tokens_of(computed) and sum(cached) >= sum(HITS)
        sender.flush()
        sender.send(CROWD, at_once=True, abort_s=0.1)
        sender.flush()
        assert tokens_of(sender.send(CROWD[:3]).decoded()[0]) == tokens_of(computed[:3])


def rooms_sent(folder: Path) -> list[int]:
    return [json.loads(line)[0] for line in (folder / "sent").read_text().splitlines()]
