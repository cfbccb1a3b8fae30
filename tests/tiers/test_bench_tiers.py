"""`python -m bench.tiers` on little data: every figure that it promises, and a line for what is left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(240)]

DISK = {
    "disk_store_gb_s", "disk_load_gb_s", "disk_store_spread", "disk_load_spread", "plain_write_gb_s",
    "plain_write_spread", "disk_store_share_of_plain",
}
FIO = {
    f"{kind}_{what}_{figure}" for kind in ("fio", "fio_huge") for what in ("write", "read")
    for figure in ("gb_s", "spread")
} | {f"disk_{what}_share{ending}" for what in ("store", "load") for ending in ("", "_of_huge")}
LOOKUPS = {
    "lookup_512_idle_tier_ms", "lookup_512_no_tier_ms", "lookup_ratio_under_load", "lookup_ratio_beside_other_work",
}


def run(folder: Path, *arguments: str, python: tuple[str, ...] = ("-m", "bench.tiers")) -> tuple[dict[str, float], str]:
    """(figures, what it wrote to stderr)."""
    done = subprocess.run(
        [
            sys.executable, *python, "--json", "--path", str(folder), "--mib", "32", "--store-mib", "8", "--rounds",
            "1", "--calls", "5", "--part-kib", "64", *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(folder.iterdir()) == [], "nothing is left in the folder"
    found: dict[str, float] = json.loads(done.stdout)
    assert all(figure > 0 for name, figure in found.items() if name != "idle_bytes_per_min")
    return found, done.stderr


@pytest.mark.sweep
def test_the_disk_and_what_it_does_to_lookups_are_measured(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "disk", "lookups")
    assert set(found) == DISK | LOOKUPS | (FIO if shutil.which("fio") else set())


FAR = {
    "warm_found_share", "warm_wait_s", "cold_wait_round_trips", "cold_again_wait_ms", "idle_bytes_per_min",
    "warm_load_gb_s", "gets_gb_s", "warm_load_share_of_gets",
}  # fmt: skip


@pytest.mark.sweep
def test_a_store_at_some_distance_costs_what_was_promised(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "far")
    assert set(found) == FAR
    assert found["idle_bytes_per_min"] == 0
    assert found["warm_found_share"] == 1.0
    assert 1 <= found["cold_wait_round_trips"] <= 2
    assert found["cold_again_wait_ms"] < 25, "it was asked for once more"


WEEKS = {
    "hot_kept_share_disk", "hot_kept_share_redis", "burst_served_share", "cpu_store_s_per_gb_64k",
    "cpu_load_s_per_gb_64k", "cpu_s_per_gb_64k", "open_1tb_first_hit_s", "open_1tb_bytes_per_record",
    "longest_exchange_ms", "exchanges_above_2_ms",
    *(f"{what}_beside_{name}" for name in ("start", "disk", "nothing") for what in (
        "longest_lookup_ms", "longest_lookup_work_ms", "longest_turn_ms", "lookups_above_2_ms",
    )),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_what_tiers_keep_in_weeks_of_service_is_measured(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "weeks")
    assert set(found) == WEEKS
    assert found["hot_kept_share_disk"] >= 0.95 and found["hot_kept_share_redis"] >= 0.95


def test_stores_are_started_and_measured_or_left_out_with_a_line(tmp_path: Path) -> None:
    kinds = ("redis", "objects", "objects_s3", "mooncake")
    found, log = run(tmp_path, "--only", *kinds)
    left_out = {kind for kind in kinds if f"bench.tiers: {kind} is left out: " in log}
    assert left_out <= {"mooncake", "redis"}, "what needs no program but those of the tests is there"
    served = set(kinds) - left_out
    assert set(found) == {f"{kind}_{verb}_gb_s" for kind in served for verb in ("store", "load")}


def test_a_store_that_cannot_be_started_is_left_out_with_a_line(tmp_path: Path) -> None:
    without = (
        "-c", "import os, sys; os.environ['PATH'] = ''; from bench.tiers.__main__ import main; main(sys.argv[1:])"
    )
    found, log = run(tmp_path, "--only", "redis", "objects", python=without)
    assert set(found) == {"objects_store_gb_s", "objects_load_gb_s"}
    assert "bench.tiers: redis is left out: redis-server is not installed\n" in log


def test_a_store_of_the_users_is_measured_by_its_url(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "path"
    store.mkdir()
    path.mkdir()
    found, _ = run(path, "--url", store.as_uri())
    assert set(found) == {"objects_store_gb_s", "objects_load_gb_s"}
