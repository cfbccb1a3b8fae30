"""Requests that run before their loads have ended, and loads whose failure comes too late, in real Schedulers."""

from __future__ import annotations

import pytest
from api_helpers import ServerProcess
from schedulers import SEEDS, Run, every_version, versions_in_turn

from kvdock.client.client import Client

pytestmark = pytest.mark.vllm
SCENARIOS = "layer_scenarios"

every_way = pytest.mark.parametrize(("overlap", "runner"), [(False, 1), (True, 2)])
every_groups = pytest.mark.parametrize("windows", [[None], [None, 48]], ids=["1group", "2groups"])


@pytest.mark.every_minor
@every_version
@every_way
@every_groups
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_a_request_runs_before_its_load_has_ended_and_reads_all_of_it(
    overlap: bool, runner: int, windows: list[int | None], by_layer: bool, run: Run
) -> None:
    found = run("verified", by_layer, windows=windows, overlap=overlap, runner=runner)
    assert (found["reported_verified"], found["loaded"], found["ended"]) == (1, 128, "")
    assert (found["bad_reads"], found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0, 0)


@every_version
def test_a_step_that_is_not_ordered_after_its_load_is_seen(run: Run) -> None:
    """The negative control."""
    found = run("verified", False, orders=False)
    assert found["reported_verified"] == 1 and found["bad_reads"] > 0


@every_version
@pytest.mark.parametrize("left", [False, True], ids=["all the time", "at first"])
def test_a_load_beside_a_request_that_runs_is_reported_when_it_has_ended(left: bool, run: Run) -> None:
    found = run("beside", left)
    assert (found["loaded"], found["beside"], found["reported_verified"]) == (256, 0, 1)
    assert found["bands"] == [False, True]
    assert (found["bad_reads"], found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0, 0)


@every_version
def test_a_reported_load_whose_request_is_gone_is_seen_to_its_end(run: Run) -> None:
    found = run("aborted")
    assert (found["reported_verified"], found["running"], found["held"]) == (1, 0, 0)


@every_version
def test_an_engine_that_does_not_ask_for_each_layer_ends_when_it_was_said_to(run: Run) -> None:
    found = run("verified", True, asks=False)
    assert found["ended"] == "vLLM ran a step without asking for each layer's KV: set load_by_layer to never"


@versions_in_turn
@every_groups
def test_under_pressure_requests_run_before_their_loads_have_ended_and_nothing_wrong_is_read(
    windows: list[int | None], run: Run
) -> None:
    found = run("pressure", windows, 0, SEEDS, verified=True, module="sched_scenarios")
    assert found["wrong"] == {}
    assert found["reported_verified"] > SEEDS // 2 and found["aborted_waiting"] > 0


@every_version
def test_memory_that_changes_after_a_load_was_reported_ends_the_engine_and_nothing_computed_from_it_is_found(
    run: Run
) -> None:
    found = run("changed", overlap=True, runner=2)
    assert found["flipped"] == 1 and found["read"] > 0
    assert found["ended"] == "request alone: the server's memory changed while it was being copied"
    assert (found["bad_reads"], found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0, 0)


@every_version
def test_damage_ends_an_engine_that_cannot_go_back_once_the_server_was_told(server: ServerProcess, run: Run) -> None:
    found = run("damaged", overlap=True, runner=2)
    assert "in the step that runs the request this vLLM has no way to compute them again" in found["ended"]
    assert found["wrong_tokens"] == 0
    with Client(server.unix) as client:
        assert client.status().counters["mismatches"] == 1


@every_version
def test_nothing_is_stored_of_a_step_that_was_undone(run: Run) -> None:
    found = run("undone")
    assert found["excused"] > 0, "the step did read what was damaged"
    assert found["loaded_at_last"] == 128, "all that it might have stored"
    assert (found["bad_reads"], found["wrong_tokens"], found["unfinished"], found["held"]) == (0, 0, 0, 0)
