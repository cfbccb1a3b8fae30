"""Whole engines of different tensor-parallel sizes share one cache, and only where both are told to.

tests/connectors/test_any_tensor_parallel.py compares what they load byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import Engine
from stories import KEEPS, several
from whole_engines import HITS, NOTHING, OTHERS, PROMPTS, tokens_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.any_tp, pytest.mark.timeout(600)]
SHARES = {"extra": {"any_tensor_parallel": True}}


def workers(count: int) -> dict[str, Any]:
    return several(count, 1) if count > 1 else {}


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma", marks=pytest.mark.sweep)])
def test_engines_of_one_two_and_four_workers_read_one_cache(
    kind: str, models: dict[str, Path], server: ServerProcess
) -> None:
    """The model has two KV heads, so two of four workers have each. Tokens are those of the engine that computed."""
    with Engine(models[kind], server.unix, **SHARES) as one:
        computed, at_hand = one.generate(PROMPTS)
        assert at_hand == NOTHING
        one.drain()
        with Engine(models[kind], server.unix, **workers(2), **SHARES) as two:
            loaded, at_hand = two.generate(PROMPTS)
            assert at_hand == HITS and tokens_of(loaded) == tokens_of(computed)
            others, at_hand = two.generate(OTHERS)
            assert at_hand == NOTHING
            two.drain()
        loaded, at_hand = one.generate(OTHERS)
        assert at_hand == HITS and tokens_of(loaded) == tokens_of(others)
    with Engine(models[kind], server.unix, **workers(4), **SHARES) as four:
        for prompts, wanted in ((PROMPTS, computed), (OTHERS, others)):
            loaded, at_hand = four.generate(prompts)
            assert at_hand == HITS and tokens_of(loaded) == tokens_of(wanted)
    with Client(server.unix) as client:
        (space,) = client.namespaces().namespaces
    assert (space.manifest.any_tensor_parallel, space.manifest.writers) == (True, 2)


def test_an_engine_without_the_setting_shares_nothing_with_one_that_has_it(
    models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models["llama"], server.unix, **workers(2), **SHARES) as two, \
            Engine(models["llama"], server.unix) as apart:
        two.generate(PROMPTS)
        two.drain()
        assert apart.generate(PROMPTS)[1] == NOTHING
