"""An exclusive pool and vLLM's real Schedulers: what a running request has on the GPU goes first, and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess
from schedulers import SEEDS, Schedulers, every_version

pytestmark = pytest.mark.vllm

ALL = 20


@pytest.fixture
def small() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20) as server:
        yield server


def run(schedulers: Schedulers, version: str, *arguments: object) -> dict[str, int]:
    found: dict[str, int] = schedulers.run(version, "while_it_runs", *arguments, module="exclusive_scenarios")
    assert found.pop("wrong") == 0
    return found


@every_version
@pytest.mark.parametrize("end", ["generates", "aborted"])
def test_what_a_request_has_on_the_gpu_goes_first_and_is_stored_again(
    version: str, end: str, small: ServerProcess, schedulers: Schedulers
) -> None:
    found = run(schedulers, version, small.unix, True, end)
    assert found["during"] < ALL and found["after"] == ALL


@every_version
def test_another_engine_of_the_namespace_finds_what_runs(
    version: str, small: ServerProcess, schedulers: Schedulers
) -> None:
    assert run(schedulers, version, small.unix, True, "generates", "same")["during"] == ALL


@every_version
def test_an_engine_of_another_namespace_changes_nothing(
    version: str, small: ServerProcess, schedulers: Schedulers
) -> None:
    assert run(schedulers, version, small.unix, True, "generates", "other")["during"] < ALL


@every_version
def test_under_pressure_an_exclusive_pool_harms_nothing(
    version: str, small: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(
        version, "pressure", small.unix, [None], 0, SEEDS, exclusive=True, likely=0.1, overlap=True, late=True
    )
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["preempted"] > 0 and found["stores_at_once"] > 0
