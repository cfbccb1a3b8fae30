"""The real Schedulers of vLLM 0.24 and 0.33 around fingerprinted KV: nothing wrong is read, nobody waits for ever.

Each scenario is described where it is: sched_scenarios.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from schedulers import SEEDS, VERSIONS, Run, every_mode, every_version, minor, versions_in_turn

pytestmark = pytest.mark.vllm

ONE, TWO, THREE = [None], [None, 48], [None, 48, 32]
LOCAL = [None, -80]
BY_REQUEST = 30
"""Since this minor version vLLM takes failed loads by request, and so for several groups."""
CROWDS = [(41, 2), (63, 2), (139, 2)]
"""Runs of `crowd` that stood still in both versions."""

every_groups = pytest.mark.parametrize("windows", [ONE, TWO, THREE], ids=["1group", "2groups", "3groups"])
and_local = pytest.mark.parametrize("windows", [ONE, TWO, THREE, LOCAL], ids=["1group", "2groups", "3groups", "local"])


@pytest.mark.every_minor
@every_version
@every_mode
@and_local
@pytest.mark.parametrize(("overlap", "runner"), [(False, 1), (True, 2)])
def test_a_prefix_is_loaded_and_every_position_is_right(
    load_async: bool, windows: list[int | None], overlap: bool, runner: int, run: Run
) -> None:
    found = run("warm", windows, load_async=load_async, overlap=overlap, runner=runner)
    assert found == {
        "bad_reads": 0, "wrong_tokens": 0, "unfinished": 0, "held": 0, "remembered": 0, "loaded": 128, "preempted": 0,
        "async_loads" if load_async else "sync_loads": 1,
    }


def ours(loaded: int) -> list[object]:
    """Loaded tokens, the manifest's hash function, and tokens that the server finds by keys of tokens and of hashes."""
    return [loaded, "blake2b-256", 160, 0]


def theirs(loaded: int, algorithm: str = "sha256") -> list[object]:
    return [loaded, f"vllm {algorithm}", 0, 160]


@pytest.mark.parametrize(("version", "algorithm", "seeds", "found"), [
    ("0.24.0", "sha256", [None, None], [ours(0), ours(128)]),  # vLLM's hashes are random here
    ("0.33.0", "sha256", [None, None], [theirs(0), theirs(128)]),
    ("0.24.0", "sha256", ["7", "7", "8", None], [theirs(0), theirs(128), theirs(0), ours(0)]),
    ("0.33.0", "sha256", ["7", "7", "8", None], [theirs(0), theirs(128), theirs(0), theirs(0)]),
    ("0.24.0", "sha256_cbor", ["7", "7"], [theirs(0, "sha256_cbor"), theirs(128, "sha256_cbor")]),
    ("0.33.0", "sha256_cbor", [None, None], [theirs(0, "sha256_cbor"), theirs(128, "sha256_cbor")]),
])
def test_keys_are_made_from_vllms_hashes_where_other_processes_make_the_same_and_from_tokens_else(
    algorithm: str, seeds: list[str | None], found: list[object], run: Run
) -> None:
    assert run("hashing", algorithm, seeds) == {"found": found}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_scheduler_that_hashes_otherwise_than_its_workers_is_refused(run: Run) -> None:
    assert "the same PYTHONHASHSEED" in run("two_seeds")["refused"]


@pytest.mark.every_minor
@versions_in_turn
@every_mode
@and_local
def test_under_pressure_nothing_wrong_is_read_and_all_requests_end(
    load_async: bool, windows: list[int | None], run: Run
) -> None:
    """What runs in the background runs between steps, so each seed is what it is, and fast."""
    found = run("pressure", windows, 0, SEEDS, load_async=load_async)
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["preempted"] > 0 and found["sync_loads"] > 0
    assert found["aborted_running"] > 0 and found["aborted_waiting"] > 0 and found["forgotten"] > 0
    if load_async:
        assert found["async_loads"] > 0


@every_version
@every_groups
def test_under_pressure_with_real_threads_nothing_wrong_is_read(windows: list[int | None], run: Run) -> None:
    found = run("pressure", windows, 0, SEEDS // 8, by_hand=False)
    assert found["wrong"] == {}
    assert found["loaded"] > 0


@versions_in_turn
@every_groups
def test_misfortune_with_every_other_load_harms_nothing(version: str, windows: list[int | None], run: Run) -> None:
    """Where this vLLM has a way back from a failed load, loads are damaged as they begin; stored chunks everywhere."""
    found = run("pressure", windows, 0, SEEDS, likely=0.2)
    assert found["wrong"] == {}
    assert found["damaged"] > 0 and found["loaded"] > 0
    if len(windows) == 1 or minor(version) >= BY_REQUEST:
        assert found["damaged_loads"] > 0 and found["aborted_waiting_for_remote_kvs"] > 0


@pytest.mark.every_minor
@every_version
def test_an_aborted_load_gives_its_blocks_back(run: Run) -> None:
    found = run("abort")
    assert found["held"] == found["bad_reads"] == found["unfinished"] == 0 and found["loaded"] > 0


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_damaged_as_its_load_begins_is_computed(overlap: bool, run: Run) -> None:
    found = run("load_error", ONE, overlap=overlap)
    assert found["damaged_loads"] == found["async_loads"] >= 1
    assert found["bad_reads"] == found["wrong_tokens"] == found["unfinished"] == 0


@pytest.mark.every_minor
@pytest.mark.parametrize("version", [each for each in VERSIONS if minor(each) >= BY_REQUEST])
def test_a_load_of_several_groups_that_failed_is_computed(run: Run) -> None:
    found = run("load_error", THREE)
    assert found["damaged_loads"] == found["async_loads"] >= 1
    assert found["bad_reads"] == found["wrong_tokens"] == found["unfinished"] == 0


@pytest.mark.every_minor
@every_version
@every_mode
@every_groups
def test_chunks_damaged_before_they_are_asked_for_are_computed(
    load_async: bool, windows: list[int | None], run: Run
) -> None:
    """With several groups, and without loads in the background, vLLM hears of no load at all: it is a miss."""
    found = run("damaged_before", windows, load_async=load_async)
    assert found["bad_reads"] == found["wrong_tokens"] == found["unfinished"] == 0
    assert found["damaged"] >= 4 * len(windows)
    first, _, third = found["loads"]
    assert first == (128 if load_async and windows == ONE else 0)
    assert third == 128, "what was computed is stored, and loaded, in its place"


@every_version
def test_loads_that_cannot_be_preempted_stop_vllm_without_our_cap_and_never_with_it(run: Run) -> None:
    """vLLM's reservation counts blocks that windows have left behind, so requests that hold blocks while they load can
    wait for each other for ever. kvdock/connectors/vllm/tables.py prevents it."""
    assert run("crowd", CROWDS, capped=False)["stuck"] != []
    capped = run("crowd", CROWDS, capped=True)
    assert capped["stuck"] == []
    assert capped["loaded"] > 0 and capped["unfinished"] == capped["bad_reads"] == capped["wrong_tokens"] == 0


@pytest.mark.every_minor
@versions_in_turn
@pytest.mark.parametrize("windows", [ONE, TWO], ids=["1group", "2groups"])
def test_what_is_loaded_beside_a_step_under_way_is_not_overwritten_by_it(windows: list[int | None], run: Run) -> None:
    """kvdock/connectors/vllm/worker.py tells which loads must come after the step, and the others come before it."""
    found = run("pressure", windows, 0, SEEDS, likely=0.2, overlap=True, late=True)
    assert found["wrong"] == {}
    assert found["loaded"] > 0 and found["preempted"] > 0
    ordered = ["loads_at_once", "loads_after_stores"] + ["loads_after"] * (windows == TWO)
    assert all(found.get(name, 0) > 0 for name in ordered), found


@pytest.mark.every_minor
@every_version
def test_blocks_filled_in_the_wrong_order_are_seen(run: Run) -> None:
    """The negative control: what makes the other tests able to fail."""
    found: dict[str, Any] = run("wrong_order")
    assert found["bad_reads"] > 0 and found["wrong_tokens"] > 0
