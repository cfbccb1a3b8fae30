"""Hints of vLLM's requests, through its real Schedulers, at a server with room for some 250 chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from schedulers import Schedulers, every_version

pytestmark = pytest.mark.vllm

NEWER = "0.33.0"
"""The version that has `kv_hints`."""
FEW, MANY = 235, 500
"""Chunks of others: they take the place of a few, or of all."""


@pytest.fixture
def small() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20) as server:
        yield server


def run(schedulers: Schedulers, version: str, scenario: str, *arguments: object) -> dict[str, Any]:
    found = schedulers.run(version, scenario, *arguments, module="hint_scenarios")
    assert found.pop("wrong") == 0
    return found


@pytest.mark.parametrize("kind", ["retain", "priority"])
def test_what_a_request_retains_outlives_its_equals(small: ServerProcess, kind: str, schedulers: Schedulers) -> None:
    found = run(schedulers, NEWER, "pressed", small.unix, kind, MANY)
    assert found == {"older": 0, "wanted": 10, "other": 4, "retained": 10, "ignored": 0}


def test_a_range_is_retained_with_what_comes_before_it(small: ServerProcess, schedulers: Schedulers) -> None:
    found = run(schedulers, NEWER, "pressed", small.unix, "range", MANY)
    assert found == {"older": 0, "wanted": 6, "other": 4, "retained": 6, "ignored": 0}


@pytest.mark.parametrize("kind", ["none", "briefly"])
def test_without_a_wish_or_after_it_nothing_is_retained(
    small: ServerProcess, kind: str, schedulers: Schedulers
) -> None:
    found = run(schedulers, NEWER, "pressed", small.unix, kind, MANY)
    assert (found["older"], found["wanted"], found["other"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["evict", "low"])
def test_what_nobody_will_ask_for_goes_first_but_for_what_others_share(
    small: ServerProcess, kind: str, schedulers: Schedulers
) -> None:
    found = run(schedulers, NEWER, "pressed", small.unix, kind, FEW)
    assert (found["older"], found["other"]) == (10, 10) and 4 <= found["wanted"] < 10 and found["ignored"] == 0


@pytest.mark.every_minor
@every_version
def test_a_conversations_end_is_said_in_kv_transfer_params(
    small: ServerProcess, version: str, schedulers: Schedulers
) -> None:
    found = run(schedulers, version, "pressed", small.unix, "params", FEW)
    assert (found["older"], found["other"]) == (10, 10) and 4 <= found["wanted"] < 10


@every_version
def test_without_hints_the_oldest_goes_first(small: ServerProcess, version: str, schedulers: Schedulers) -> None:
    found = run(schedulers, version, "pressed", small.unix, "none", FEW)
    assert found["older"] < 10 and found["wanted"] == 10 == found["other"]


@pytest.mark.parametrize("kind", ["unknown", "malformed"])
def test_hints_that_cannot_be_read_fail_no_request(small: ServerProcess, kind: str, schedulers: Schedulers) -> None:
    found = run(schedulers, NEWER, "pressed", small.unix, kind, 0)
    assert found == {"older": 10, "wanted": 10, "other": 10, "retained": 0, "ignored": 1}


def test_chunks_that_are_still_being_stored_are_retained(small: ServerProcess, schedulers: Schedulers) -> None:
    found = run(schedulers, NEWER, "stored_late", small.unix)
    assert found == {"wanted": 8, "is_retained": True, "ignored": 0}


def test_an_aborted_request_wishes_nothing(small: ServerProcess, schedulers: Schedulers) -> None:
    assert run(schedulers, NEWER, "aborted", small.unix) == {"aborted": 8, "retained": 0, "ignored": 0}


@every_version
def test_what_will_be_asked_for_is_loaded_from_lower_tiers(
    version: str, schedulers: Schedulers, tmp_path: Path
) -> None:
    with ServerProcess(disk_path=str(tmp_path / "disk"), disk_bytes=64 << 20, tier_asks=1, heartbeat_s=0.2) as server:
        found = run(schedulers, version, "comes_back", server.unix)
    assert found == {"gone": 0, "back": 8, "loaded": 8, "ignored": 0}


@every_version
def test_hints_without_a_server_fail_no_request(version: str, schedulers: Schedulers, tmp_path: Any) -> None:
    assert run(schedulers, version, "without_a_server", f"unix:{tmp_path}/nobody.sock") == {"is_finished": True}
