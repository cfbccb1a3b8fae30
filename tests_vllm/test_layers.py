"""Loads by layer in real Schedulers: who loads so, and what damage costs."""

from __future__ import annotations

import pytest
from api_helpers import ServerProcess
from schedulers import VERSIONS, Schedulers

from kvdock.api.client import Client

pytestmark = pytest.mark.vllm

every_version = pytest.mark.parametrize("version", VERSIONS)
every_way = pytest.mark.parametrize(("overlap", "runner"), [(False, 1), (True, 2)])


@every_version
@every_way
def test_a_request_that_is_alone_loads_in_its_step_and_others_in_the_background(
    version: str, overlap: bool, runner: int, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(
        version, "alone_and_together", server.unix, module="layer_scenarios", overlap=overlap, runner=runner
    )
    assert found["alone"] == {"sync_loads": 1}
    assert found["async_loads"] >= 1 and found["sync_loads"] == 1
    assert (found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0)


@every_version
def test_damage_ends_an_engine_that_cannot_go_back_once_the_server_was_told(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "damaged", server.unix, module="layer_scenarios", overlap=True, runner=2)
    assert "in the step that runs the request this vLLM has no way to compute them again" in found["ended"]
    assert found["wrong_tokens"] == 0
    with Client(server.unix) as client:
        assert client.status().counters["mismatches"] == 1


@every_version
def test_nothing_is_stored_of_a_step_that_was_undone(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "undone", server.unix, module="layer_scenarios")
    assert found["excused"] > 0, "the step did read what was damaged"
    assert (found["bad_reads"], found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0, 0)
