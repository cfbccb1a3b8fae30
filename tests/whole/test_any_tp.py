"""Whole engines of different tensor-parallel sizes share one cache, and only where both are told to.

tests/connectors/test_any_tensor_parallel.py compares what they load byte for byte.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import MARK, Engine
from stories import DIVIDED, TENSOR_PARALLEL
from whole_engines import HITS, NOTHING, OTHERS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [MARK, pytest.mark.any_tp, pytest.mark.timeout(600)]
SHARES = {"extra": {"any_tensor_parallel": True}}


def test_engines_of_one_two_and_four_ranks_read_one_cache(models: dict[str, Path], server: ServerProcess) -> None:
    """Tokens are those of the engine that computed."""
    one, two, four = ({**how, **SHARES} for how in TENSOR_PARALLEL)
    kind, parts = DIVIDED
    with Engine(models[kind], server.unix, **one) as first:
        computed, at_hand = first.generate(PROMPTS)
        assert at_hand == NOTHING
        first.drain()
        with Engine(models[kind], server.unix, **two) as second:
            loaded, at_hand = second.generate(PROMPTS)
            assert at_hand == HITS and tokens_of(loaded) == tokens_of(computed)
            others, at_hand = second.generate(OTHERS)
            assert at_hand == NOTHING
            second.drain()
        loaded, at_hand = first.generate(OTHERS)
        assert at_hand == HITS and tokens_of(loaded) == tokens_of(others)
    with Engine(models[kind], server.unix, **four) as third:
        for prompts, wanted in ((PROMPTS, computed), (OTHERS, others)):
            loaded, at_hand = third.generate(prompts)
            assert at_hand == HITS and tokens_of(loaded) == tokens_of(wanted)
    with Client(server.unix) as client:
        (space,) = client.namespaces().namespaces
    assert (space.manifest.any_tensor_parallel, space.manifest.writers) == (True, parts)


def test_an_engine_without_the_setting_shares_nothing_with_one_that_has_it(
    models: dict[str, Path], server: ServerProcess
) -> None:
    one, two, _ = TENSOR_PARALLEL
    with (
        Engine(models["llama"], server.unix, **two, **SHARES) as sharing,
        Engine(models["llama"], server.unix, **two) as own, Engine(models["llama"], server.unix, **one) as alone,
    ):
        sharing.generate(PROMPTS)
        sharing.drain()
        assert own.generate(PROMPTS)[1] == alone.generate(PROMPTS)[1] == NOTHING
