"""Whom a connector delays: nobody who has nothing to load, whatever the server does, and nobody else by a step.

Real Schedulers of vLLM 0.24 and 0.33 with steps of 200 ms, as under load: tests/vllm/support/admission_scenarios.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers import ServerProcess
from connector_helpers import mortal
from schedulers import Schedulers, every_version, versions_in_turn

from kvdock.connectors.vllm.setup import Settings

pytestmark = pytest.mark.vllm


def run(schedulers: Schedulers, version: str, scenario: str, *arguments: object, **named: object) -> dict[str, Any]:
    found = schedulers.run(version, scenario, *arguments, module="admission_scenarios", **named)
    assert found["wrong"] == 0
    return found


def pid_of(server: ServerProcess) -> int:
    assert server.process.pid is not None
    return server.process.pid


@versions_in_turn
@pytest.mark.parametrize("state", ["answers", "slow", "stopped", "lost"])
def test_requests_with_nothing_to_load_are_admitted_as_without_a_connector(
    version: str, state: str, schedulers: Schedulers
) -> None:
    with mortal() as server:
        found = run(schedulers, version, "nothing_to_load", server.unix, state, pid_of(server))
    wanted = run(schedulers, version, "nothing_to_load", "", "none")
    assert found["admitted"] == wanted["admitted"]
    if state != "answers":
        assert found["waited_s"] <= Settings.lookup_wait_s, "in one step"


@every_version
def test_requests_with_something_to_load_are_admitted_as_if_every_answer_was_there(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    wanted = run(schedulers, version, "some_to_load", server.unix, "at_once")
    found = run(schedulers, version, "some_to_load", server.unix, "answers")
    assert sorted(found["admitted"]) == sorted(wanted["admitted"]), "a step's order is that in which loads ended"
    assert found["loaded"] == wanted["loaded"] == 3 * 128


@every_version
def test_a_slow_server_delays_nobody_whose_question_had_a_step_of_time(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    wanted = run(schedulers, version, "some_to_load", server.unix, "at_once")
    found = run(schedulers, version, "some_to_load", server.unix, "slow", ahead_s=0.2)
    assert sorted(found["admitted"]) == sorted(wanted["admitted"])
    assert found["loaded"] == wanted["loaded"] == 3 * 128
    assert found["waited_s"] <= Settings.lookup_wait_s


@every_version
@pytest.mark.parametrize("state", ["stopped", "lost"])
def test_without_a_server_everything_is_admitted_as_without_a_connector(
    version: str, state: str, schedulers: Schedulers
) -> None:
    with mortal() as server:
            found = run(schedulers, version, "some_to_load", server.unix, state, pid_of(server))
    wanted = run(schedulers, version, "some_to_load", "", "none")
    assert found["admitted"] == wanted["admitted"] and found["loaded"] == 0
    assert found["waited_s"] <= Settings.lookup_wait_s
