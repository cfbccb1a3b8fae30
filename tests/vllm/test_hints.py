"""Hints of vLLM's requests, through its real Schedulers, at a server with room for some 250 chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from schedulers import Run, Schedulers, every_version, run_where

pytestmark = pytest.mark.vllm
SCENARIOS = "hint_scenarios"

FEW, MANY = 235, 500
"""Chunks of others: they take the place of a few, or of all."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20) as process:
        yield process


run = run_where(lambda found: found.pop("wrong") == 0)


@pytest.mark.parametrize("kind", ["retain", "priority"])
def test_what_a_request_retains_outlives_its_equals(kind: str, run: Run) -> None:
    found = run("pressed", kind, MANY)
    assert found == {"older": 0, "wanted": 10, "other": 4, "retained": 10, "ignored": 0}


def test_a_range_is_retained_with_what_comes_before_it(run: Run) -> None:
    found = run("pressed", "range", MANY)
    assert found == {"older": 0, "wanted": 6, "other": 4, "retained": 6, "ignored": 0}


@pytest.mark.parametrize("kind", ["none", "briefly"])
def test_without_a_wish_or_after_it_nothing_is_retained(kind: str, run: Run) -> None:
    found = run("pressed", kind, MANY)
    assert (found["older"], found["wanted"], found["other"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["evict", "low"])
def test_what_nobody_will_ask_for_goes_first_but_for_what_others_share(kind: str, run: Run) -> None:
    found = run("pressed", kind, FEW)
    assert (found["older"], found["other"]) == (10, 10) and 4 <= found["wanted"] < 10 and found["ignored"] == 0


@pytest.mark.every_minor
@every_version
def test_a_conversations_end_is_said_in_kv_transfer_params(run: Run) -> None:
    found = run("pressed", "params", FEW)
    assert (found["older"], found["other"]) == (10, 10) and 4 <= found["wanted"] < 10


@every_version
def test_without_hints_the_oldest_goes_first(run: Run) -> None:
    found = run("pressed", "none", FEW)
    assert found["older"] < 10 and found["wanted"] == 10 == found["other"]


@pytest.mark.parametrize("kind", ["unknown", "malformed"])
def test_hints_that_cannot_be_read_fail_no_request(kind: str, run: Run) -> None:
    found = run("pressed", kind, 0)
    assert found == {"older": 10, "wanted": 10, "other": 10, "retained": 0, "ignored": 1}


def test_chunks_that_are_still_being_stored_are_retained(run: Run) -> None:
    found = run("stored_late")
    assert found == {"wanted": 8, "is_retained": True, "ignored": 0}


def test_an_aborted_request_wishes_nothing(run: Run) -> None:
    assert run("aborted") == {"aborted": 8, "retained": 0, "ignored": 0}


@every_version
def test_what_will_be_asked_for_is_loaded_from_lower_tiers(
    version: str, schedulers: Schedulers, tmp_path: Path
) -> None:
    with ServerProcess(disk_path=str(tmp_path / "disk"), disk_bytes=64 << 20, tier_asks=1, heartbeat_s=0.2) as server:
        found = schedulers.run(version, "comes_back", server.unix, module=SCENARIOS)
    assert found == {"wrong": 0, "gone": 0, "back": 8, "loaded": 8, "ignored": 0}


@every_version
def test_hints_without_a_server_fail_no_request(version: str, schedulers: Schedulers, tmp_path: Path) -> None:
    found = schedulers.run(version, "without_a_server", f"unix:{tmp_path}/nobody.sock", module=SCENARIOS)
    assert found == {"wrong": 0, "is_finished": True}
