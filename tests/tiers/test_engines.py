"""The small engine with prompts that come from a tier: the bits are those of a load from the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, unique
from connector_helpers import engine_over
from engine_helpers import prompt, run_one, sampling
from same_tokens_helpers import LENGTH, MODELS, STORED, TOKENS, Served, assert_same, served
from tier_stores import clear_once_written
from tp_helpers import engine_of_ranks, shared

from kvdock.engine.config import preset
from kvdock.engine.engine import Engine
from kvdock.engine.ranks import ProcessGroup

pytestmark = [pytest.mark.tiers, pytest.mark.same_tokens, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("disk")
    with ServerProcess(
        pool_bytes=64 * MIB, segment_bytes=64 * MIB, disk_path=str(folder), disk_bytes=256 * MIB, tier_asks=1,
        heartbeat_s=0.1,
    ) as process:
        yield process


def ended(engine: Engine, tokens: list[int], new: int) -> Served:
    found = served(run_one(engine, tokens, sampling(new)))
    assert engine.drain(20.0)
    engine.close()
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_from_a_tier_has_the_bits_of_one_from_the_pool(server: ServerProcess, model: str) -> None:
    config, salt, tokens = preset(MODELS[model]), unique("tier"), prompt(9, LENGTH)
    ended(engine_over(server.unix, config, salt=salt), tokens, 1)
    of_pool = ended(engine_over(server.unix, config, salt=salt), tokens, TOKENS)
    assert of_pool.at_hand == STORED
    clear_once_written(server.unix)
    of_tier = ended(engine_over(server.unix, config, salt=salt), tokens, TOKENS)
    assert of_tier.at_hand == STORED
    assert_same(of_tier, of_pool)


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_two_ranks_read_what_a_tier_has_loaded_once(server: ServerProcess, model: str) -> None:
    process_group = ProcessGroup(2)
    try:
        config, salt, tokens = shared(MODELS[model], 2), unique("ranks"), prompt(10, LENGTH)

        def made() -> Engine:
            return engine_of_ranks(process_group, config, server.unix, salt=salt)

        ended(made(), tokens, 1)
        of_pool = ended(made(), tokens, TOKENS)
        clear_once_written(server.unix)
        of_tier = ended(made(), tokens, TOKENS)
        assert of_tier.at_hand == of_pool.at_hand == STORED
        assert_same(of_tier, of_pool)
    finally:
        process_group.close()
