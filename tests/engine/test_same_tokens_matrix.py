"""Every kind of attention in every way of serving has the bits of an engine that uses its own prefix cache.

A cell serves one prompt with kvdock and compares tokens and all logits, bitwise, with an engine alone whose own
prefix cache had as many tokens at hand: then prefill has the same chunks, and equal shapes give equal bits.
A preempted run is two such runs: up to the preemption, and from there with the output as part of the prompt.

Each cell has two controls with one damaged byte. If it was damaged before the checksum was made, it cannot be caught
and must change the logits, so the comparison can see a single byte. If it was damaged later, in shared memory, it
must be caught, and the run must equal one with fewer tokens at hand.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest
import torch
from api_helpers import ServerProcess, unique
from connector_helpers import CHUNK, Spectator, engine_over, kvdock_of
from engine_helpers import make_engine, prompt, run, run_one, sampling
from same_tokens_helpers import (
    LENGTH,
    MODELS,
    STORED,
    TOKENS,
    Damage,
    Served,
    Spoiler,
    assert_same,
    flip_exponent,
    served,
)

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import EngineConnector
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.request import Completion

pytestmark = pytest.mark.same_tokens


def settings(model: str, *, prefill_chunk: int = CHUNK, own_cache: int | None = 0) -> EngineConfig:
    return dataclasses.replace(
        preset(MODELS[model]), num_blocks=200, prefill_chunk_tokens=prefill_chunk, max_local_hit_tokens=own_cache
    )


class Place:
    """The server, the other process, and which damage to do."""

    def __init__(self, server: ServerProcess, elsewhere: ProcessPoolExecutor) -> None:
        self.server, self.elsewhere = server, elsewhere

    def engine(self, config: EngineConfig, salt: str, damage: Damage = "none") -> Engine:
        engine = engine_over(self.server.unix, config, salt=salt)
        if damage == "before":
            engine.connector = engine.scheduler.connector = Spoiler(kvdock_of(engine), engine.kv)
        return engine

    def stored(self, config: EngineConfig, salt: str, tokens: list[int], damage: Damage) -> None:
        """An engine computes and stores the prompt, and leaves."""
        engine = self.engine(config, salt, damage)
        run_one(engine, tokens, sampling(1))
        self.settled(engine, tokens, damage)
        engine.close()

    def settled(self, engine: Engine, tokens: list[int], damage: Damage) -> None:
        """Waits until all is stored; with `after`, damages the last group in the last chunk of the prefix."""
        assert engine.drain(20.0)
        inner = engine.connector.inner if isinstance(engine.connector, Spoiler) else engine.connector
        assert isinstance(inner, EngineConnector)
        if damage == "after":
            with Client(self.server.unix) as client, Spectator(client, inner.session.manifest) as spectator:
                part = spectator.slots(tokens)[-1]
                spectator.flip(part, part.length - 100)

    @property
    def mismatches(self) -> int:
        with Client(self.server.unix) as client:
            return client.status().counters["mismatches"]


@cache
def alone(model: str, prefill_chunk: int) -> Engine:
    """The reference: an engine with only its own prefix cache."""
    own_cache = settings(model, prefill_chunk=prefill_chunk, own_cache=None)
    return make_engine(dataclasses.replace(own_cache, num_blocks=2000))


def reference(engine: Engine, tokens: list[int], at_hand: int, max_tokens: int = TOKENS) -> Served:
    """The prompt with exactly `at_hand` tokens from the engine's own prefix cache."""
    run_one(engine, tokens, sampling(1))
    found = served(run_one(engine, tokens, sampling(max_tokens, max_local_hit_tokens=at_hand)))
    assert found.at_hand == at_hand, "the reference cannot take the same shapes"
    return found


def serve_elsewhere(address: str, model: str, salt: str, tokens: list[int]) -> Served:
    """Served by an engine in the other process."""
    engine = engine_over(address, settings(model), salt=salt)
    found = served(run_one(engine, tokens, sampling(TOKENS)))
    engine.close()
    return found


# ---------------------------------------------------------------------- the ways to be served

Way = Callable[[Place, str, Damage], tuple[Served, Served]]
"""Returns the result and the wanted one."""


def cold(place: Place, model: str, damage: Damage) -> tuple[Served, Served]:
    """Nothing can be loaded; the damage is in the engine's own memory, after the first token."""
    tokens = prompt(1, LENGTH)
    engine = place.engine(settings(model), unique("cold"))
    request = engine.requests[engine.add_request(tokens, sampling(TOKENS), "r")]
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        first = not request.output
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        if damage == "before" and first and request.output:
            block = request.table[-1][-2]
            assert block is not None
            flip_exponent(engine.kv.k[0], block)
    assert engine.drain(20.0)
    engine.close()
    return served(done["r"]), reference(alone(model, CHUNK), tokens, 0)


def warm(place: Place, model: str, damage: Damage) -> tuple[Served, Served]:
    """The engine that stored the prompt serves it again, with its own prefix cache off."""
    tokens, salt = prompt(2, LENGTH), unique("warm")
    engine = place.engine(settings(model), salt, damage)
    run_one(engine, tokens, sampling(1))
    place.settled(engine, tokens, damage)
    found = served(run_one(engine, tokens, sampling(TOKENS)))
    assert engine.drain(20.0)
    engine.close()
    return found, reference(alone(model, CHUNK), tokens, found.at_hand)


def other_process(place: Place, model: str, damage: Damage) -> tuple[Served, Served]:
    tokens, salt = prompt(3, LENGTH), unique("elsewhere")
    place.stored(settings(model), salt, tokens, damage)
    found = place.elsewhere.submit(serve_elsewhere, place.server.unix, model, salt, tokens).result()
    return found, reference(alone(model, CHUNK), tokens, found.at_hand)


def preempted(place: Place, model: str, damage: Damage) -> tuple[Served, Served]:
    """All free blocks are taken, until the request has none for its next token and is preempted; then it resumes."""
    tokens = prompt(4, LENGTH)
    engine = place.engine(settings(model), unique("preempted"), damage)
    request = engine.requests[engine.add_request(tokens, sampling(TOKENS), "r")]
    while len(request.output) < 3:
        engine.step()
    pool = engine.scheduler.blocks.pool
    taken: list[int] = []
    while request.metrics.preemptions == 0:
        taken += pool.allocate(len(pool.free))
        engine.step()
    known = list(request.tokens)
    assert 3 < len(request.output) < TOKENS
    place.settled(engine, known, damage)
    pool.release(taken)
    done = run(engine)["r"]
    engine.close()
    found = dataclasses.replace(served(done), at_hand=done.metrics.loaded_tokens)
    before = reference(alone(model, CHUNK), tokens, 0, len(known) - LENGTH)
    after = reference(alone(model, CHUNK), known, found.at_hand, TOKENS - len(before.output))
    return found, Served(before.output + after.output, torch.cat([before.logits, after.logits]), found.at_hand)


def chunked_prefill(place: Place, model: str, damage: Damage) -> tuple[Served, Served]:
    """Prefill in halves of a chunk, while another request decodes and leaves budget for one half in each step."""
    tokens, salt = prompt(5, LENGTH), unique("chunked")
    config = dataclasses.replace(settings(model, prefill_chunk=CHUNK // 2), max_step_tokens=CHUNK // 2 + 16)
    place.stored(config, salt, tokens, damage)
    engine = place.engine(config, salt)
    engine.add_request(prompt(6, 40), sampling(60), "company")
    engine.step()
    engine.add_request(prompt(7, 150), sampling(2), "more company")
    engine.add_request(tokens, sampling(TOKENS), "r")
    done = run(engine)
    assert engine.drain(20.0)
    engine.close()
    found = served(done["r"])
    return found, reference(alone(model, CHUNK // 2), tokens, found.at_hand)


WAYS: list[Way] = [cold, warm, other_process, preempted, chunked_prefill]
LOADING = WAYS[1:]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The other process is spawned, so it inherits nothing."""
    spawn = multiprocessing.get_context("spawn")
    with (
        ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as server,
        ProcessPoolExecutor(1, spawn) as elsewhere,
    ):
        yield Place(server, elsewhere)


def name_of(item: object) -> str:
    return getattr(item, "__name__", str(item)).replace("_", " ")


@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_and_logits(place: Place, model: str, way: Way) -> None:
    before = place.mismatches
    found, wanted = way(place, model, "none")
    assert found.at_hand >= (0 if way is cold else STORED)
    assert_same(found, wanted)
    assert place.mismatches == before


@pytest.mark.sweep("model")
@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_one_byte_that_no_checksum_can_catch_changes_the_logits(place: Place, model: str, way: Way) -> None:
    before = place.mismatches
    found, wanted = way(place, model, "before")
    assert place.mismatches == before, "the control must not be caught"
    assert not torch.equal(found.logits, wanted.logits), "the damaged byte was not seen"
    if way is not cold:
        assert found.at_hand >= STORED


@pytest.mark.sweep("model")
@pytest.mark.parametrize("way", LOADING, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_one_byte_damaged_in_the_server_is_caught_and_computed_again(place: Place, model: str, way: Way) -> None:
    before = place.mismatches
    found, wanted = way(place, model, "after")
    assert place.mismatches == before + 1
    assert 0 < found.at_hand <= STORED
    assert_same(found, wanted)
