"""KV cache groups whose block sizes differ, in the real Schedulers of vLLM 0.24 and 0.33 around fingerprinted KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from schedulers import SEEDS, Run, every_mode, every_version, versions_in_turn
from whole_engines import HITS, PROMPTS

from kvdock.client.client import Client

pytestmark = pytest.mark.vllm

SHAPES = {
    "full16-window32": ([None, 48], [16, 32]),
    "full32-window16": ([None, 48], [32, 16]),
    "three": ([None, 48, 32], [16, 32, 8]),
    "window-below-chunk": ([None, 12], [8, 16]),
    "no-multiples": ([None, 40], [16, 24]),  # chunks of 48
}
every_shape = pytest.mark.parametrize(("windows", "sizes"), SHAPES.values(), ids=list(SHAPES))


@every_version
@every_mode
@every_shape
def test_a_prefix_is_loaded_into_blocks_of_each_groups_size(
    load_async: bool, windows: list[int | None], sizes: list[int], run: Run
) -> None:
    found = run("warm", windows, sizes, load_async=load_async)
    assert found["bad_reads"] == found["wrong_tokens"] == found["unfinished"] == found["held"] == 0
    assert found["loaded"] == (144 if 24 in sizes else 128)


@versions_in_turn
@every_mode
@every_shape
def test_under_pressure_blocks_of_no_size_are_read_wrongly(
    load_async: bool, windows: list[int | None], sizes: list[int], run: Run
) -> None:
    found = run("pressure", windows, 0, SEEDS // 2, sizes, likely=0.0, load_async=load_async)
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["preempted"] > 0


@pytest.mark.timeout(400)
def test_a_whole_engine_loads_the_bits_of_its_local_hits_into_blocks_of_two_sizes(
    models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(models["gemma4"], server.unix) as engine:
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]
        engine.drain()
        with Client(server.unix) as client:
            [space] = client.namespaces().namespaces
        assert set(space.manifest.block_sizes) == {32, 64}
        local, at_hand = engine.generate(PROMPTS)
        assert at_hand == HITS
        engine.flush()
        assert engine.generate(PROMPTS) == (local, HITS)


@every_version
@every_shape
def test_two_blocks_that_changed_places_are_seen(windows: list[int | None], sizes: list[int], run: Run) -> None:
    """The negative control: what makes the other tests able to fail."""
    found = run("swapped", windows, sizes, module="size_scenarios")
    assert found["bad_reads"] >= 2 * min(sizes)
