"""The same-tokens matrix with several ranks: two processes with half of the heads each.

Shapes and the order of sums differ from those of one process, so the reference is the same two ranks, served by
their engine's own prefix cache. An engine stores the prompt, and another, with fresh memory in both ranks, loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import ServerProcess, unique
from connector_helpers import Spectator, kvdock_of
from engine_helpers import prompt, run_one, sampling
from same_tokens_helpers import (
    LENGTH,
    MODELS,
    STORED,
    TOKENS,
    Damage,
    Served,
    Spoiler,
    assert_same,
    served,
)
from tp_helpers import engine_of_ranks, shared

from kvdock.client.client import Client
from kvdock.engine.engine import Engine
from kvdock.engine.ranks import ProcessGroup

pytestmark = pytest.mark.same_tokens

TWO = [(model, 2) for model in MODELS]
FOUR = [("mha", 4), ("mla", 4)]


def only(*few: tuple[str, int]) -> list[Any]:
    """The others run with --sweeps."""
    return [pytest.param(*one, marks=[] if one in few else [pytest.mark.sweep]) for one in TWO + FOUR]


FEW = only(("mha", 2), ("mla", 4))


@pytest.fixture(scope="module")
def process_groups() -> Iterator[dict[int, ProcessGroup]]:
    found = {size: ProcessGroup(size) for size in (2, 4)}
    yield found
    for process_group in found.values():
        process_group.close()


@pytest.fixture(scope="module")
def place() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as server:
        yield server


def mismatches(place: ServerProcess) -> int:
    with Client(place.unix) as client:
        return client.status().counters["mismatches"]


def with_ranks(
    place: ServerProcess, process_group: ProcessGroup, model: str, damage: Damage, writer: int = 0
) -> tuple[Served, Served]:
    """`writer`: the rank whose bytes are damaged in the server."""
    config, salt, tokens = shared(MODELS[model], process_group.size), unique("ranks"), prompt(8, LENGTH)
    storing = engine_of_ranks(process_group, config, place.unix, salt=salt)
    inner = kvdock_of(storing)
    if damage == "before":
        storing.connector = storing.scheduler.connector = Spoiler(inner, storing.kv)
    run_one(storing, tokens, sampling(1))
    assert storing.drain(20.0)
    if damage == "after":
        with Client(place.unix) as client, Spectator(client, inner.session.manifest) as spectator:
            part = [part for part in spectator.slots(tokens) if part.writer == writer][-1]
            spectator.flip(part, part.length - 100)
    storing.close()

    loading = engine_of_ranks(process_group, config, place.unix, salt=salt)
    found = served(run_one(loading, tokens, sampling(TOKENS)))
    assert loading.drain(20.0)
    loading.close()
    return found, reference(process_group, model, tokens, found.at_hand)


def reference(process_group: ProcessGroup, model: str, tokens: list[int], at_hand: int) -> Served:
    alone: Engine = engine_of_ranks(process_group, shared(MODELS[model], process_group.size), None)
    run_one(alone, tokens, sampling(1))
    found = served(run_one(alone, tokens, sampling(TOKENS, max_local_hit_tokens=at_hand)))
    assert found.at_hand == at_hand, "the reference cannot take the same shapes"
    return found


@pytest.mark.parametrize(("model", "size"), only(("mha", 2), ("gqa", 2), ("hybrid of 3 groups", 2), ("mla", 4)))
def test_ranks_that_load_have_the_same_tokens_and_logits(
    place: ServerProcess, process_groups: dict[int, ProcessGroup], model: str, size: int
) -> None:
    before = mismatches(place)
    found, wanted = with_ranks(place, process_groups[size], model, "none")
    assert found.at_hand == STORED
    assert_same(found, wanted)
    assert mismatches(place) == before


@pytest.mark.parametrize(("model", "size"), FEW)
def test_one_byte_that_no_checksum_can_catch_changes_the_logits(
    place: ServerProcess, process_groups: dict[int, ProcessGroup], model: str, size: int
) -> None:
    before = mismatches(place)
    found, wanted = with_ranks(place, process_groups[size], model, "before")
    assert found.at_hand == STORED
    assert mismatches(place) == before, "the control must not be caught"
    assert not (found.logits == wanted.logits).all(), "the damaged byte was not seen"


@pytest.mark.parametrize(("model", "size"), FEW)
def test_one_byte_damaged_in_the_server_fails_the_load_of_all_ranks(
    place: ServerProcess, process_groups: dict[int, ProcessGroup], model: str, size: int
) -> None:
    """The damage is in the last rank's part, which only that rank reads; a latent has one part, which all read."""
    before = mismatches(place)
    found, wanted = with_ranks(place, process_groups[size], model, "after", writer=0 if model == "mla" else size - 1)
    assert mismatches(place) > before
    assert 0 < found.at_hand < STORED
    assert_same(found, wanted)
