"""vLLM's own offload with its real tiering manager around a real Scheduler, and kvdock as its secondary tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess, access_file
from schedulers import ITSELF, VERSIONS, Run, Schedulers

from kvdock.api.access.access_file import entry

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("version", [VERSIONS[-1], ITSELF])]
SCENARIOS = "tier_scenarios"
CLEAN = {"bad_reads": 0, "wrong_tokens": 0, "unfinished": 0, "held": 0, "remembered": 0}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_engines_share_what_they_offload(overlap: bool, run: Run) -> None:
    found = run("shares", weights_digest=f"shares {overlap}", overlap=overlap)
    assert found == {**CLEAN, "loaded": [0, 144, 144], "leases": 0, "second": CLEAN}


@pytest.mark.parametrize("windows", [(None, 40), (None, 24, 100)], ids=str)
def test_several_groups_are_shared_as_vllm_wants_them(windows: tuple[int | None, ...], run: Run) -> None:
    found = run("shares", windows=windows, weights_digest=f"groups {windows}")
    assert found == {**CLEAN, "loaded": [0, 144, 144], "leases": 0, "second": CLEAN}


def test_tenants_share_with_themselves_alone(version: str, schedulers: Schedulers, tmp_path: Path) -> None:
    tokens = {"a": "a" * 32, "b": "b" * 32}
    held = {tenant: tmp_path / f"token-{tenant}" for tenant in tokens}
    for tenant, file in held.items():
        file.touch(mode=0o600)
        file.write_text(tokens[tenant])
    path = access_file(tmp_path, *(entry(tenant, token, ["engine"], tenant) for tenant, token in tokens.items()))
    with ServerProcess(access_file=str(path)) as server:
        files = [str(held[tenant]) for tenant in "aba"]
        found = schedulers.run(version, "tenants", server.http, files, module=SCENARIOS)
        assert server.stop() == 0, server.log_text()
    assert found == {**CLEAN, "loaded": [0, 0, 144]}


@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=str)
def test_a_window_in_the_middle_of_a_prompt_is_found(windows: tuple[int | None, ...], run: Run) -> None:
    assert run("goes_another_way", windows) == {**CLEAN, "loaded": [96, 96]}


def test_a_damaged_byte_is_a_miss_and_taken_out_of_use(run: Run) -> None:
    found = run("damaged")
    assert found["damaged"] == 9
    assert found == {**CLEAN, "damaged": 9, "loaded": [0, 9, 144, 0]}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=str)
def test_whatever_happens_no_engine_reads_what_is_wrong(
    windows: tuple[int | None, ...], overlap: bool, run: Run
) -> None:
    loaded = 0
    for seed in range(3):
        found = run("in_trouble", seed, windows, overlap)
        loaded += found["loaded"]
        assert found == {**found, **CLEAN, "leases": 0, "second": CLEAN}, seed
    assert loaded > 0


def test_after_a_change_of_the_weights_nothing_from_before_is_loaded(run: Run) -> None:
    assert run("weights_change") == {**CLEAN, "loaded": [0, 144, 0, 0, 144]}


def test_a_server_that_does_not_answer_is_a_miss(server: ServerProcess, run: Run) -> None:
    assert run("server_halts", server.process.pid) == {**CLEAN, "loaded": [0, 0, 144]}


def test_people_read_what_became_of_its_requests(run: Run) -> None:
    found = run("explained")
    assert found["outcome"] == {"prompt_tokens": 144, "loaded_tokens": 144, "found_tokens": 144}
    assert "not_ended" not in found["sentences"] and found["model"] == "fingerprints"


def test_it_leaves_no_thread_and_no_hold_on_vllms_memory(run: Run) -> None:
    assert run("leaves_nothing") == {"released": True, "threads": []}
