"""What people and probes see of lower tiers: status, metrics, the command. None of it waits for the mover."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, NOBODYS, ServerProcess, eventually, raw, soon
from cli_helpers import kvdock
from frozen import frozen
from mover_steps import SteppedServer
from prometheus_client.parser import text_string_to_metric_families
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, SETTINGS, damage_on_disk, flood, is_served, mover, stored_and_gone
from tier_stores import S3Store, has_state, opened

from kvdock.api.tiers.process import pause_s
from kvdock.protocol.admin_schemas import PatchConfig
from kvdock.protocol.reports import MoverView, TierView
from kvdock.protocol.schemas import MOVER_LABEL

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port at which no process answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_the_movers_log_has_the_level_that_a_call_sets(tmp_path: Path) -> None:
    settings = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "log_level": "error"}
    with socket.socket() as redis:
        redis.bind(("127.0.0.1", 0))
        with ServerProcess(**settings, redis_url=f"redis://127.0.0.1:{redis.getsockname()[1]}") as server:
            engine = TierEngine(server.unix, manifest(PART))
            is_served(server, 1)
            keys = stored_and_gone(engine, 2)
            eventually(lambda: tier(engine, "redis").error != "", 30.0)
            assert "kvdock.tiers" not in server.log_text()
            engine.client.configure(PatchConfig(log_level="warning"))
            engine.release(engine.awaited(keys))  # the mover has followed all that was before this
            redis.listen()
            redis.settimeout(30.0)
            redis.accept()[0].close()
            eventually(lambda: " WARNING kvdock.tiers: the tier redis is not used yet: " in server.log_text(), 30.0)
            engine.client.configure(PatchConfig(log_level="info"))
            mover(server).kill()
            eventually(lambda: " INFO kvdock.tiers: the tier disk is used" in server.log_text(), 30.0)
            engine.close()


@pytest.fixture
def server(tmp_path: Path, refusing: int) -> Iterator[ServerProcess]:
    """With a disk that is used, and a Redis that is not there."""
    with ServerProcess(
        **{**SETTINGS, "disk_path": str(tmp_path / "disk"), "redis_url": f"redis://127.0.0.1:{refusing}"}
    ) as process:
        yield process


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[TierEngine]:
    made = TierEngine(server.unix, manifest(PART))
    is_served(server, 1)
    eventually(lambda: [one.state for one in made.client.status().tiers] == ["open", "off"], 30.0)
    yield made
    made.close()


def test_the_mover_s_sessions_are_listed_and_are_no_engines(server: ServerProcess, engine: TierEngine) -> None:
    """They end with their namespaces, and hold leases meanwhile, so the list has them."""
    assert len(engine.client.sessions().sessions) == 2
    assert engine.client.status().sessions == 1
    assert [one.sessions for one in engine.client.namespaces().namespaces] == [1]
    metrics = raw(server.http, "GET", "/metrics", None, NOBODYS)[2].decode()
    found = [one for one in text_string_to_metric_families(metrics) if one.name == "kvdock_sessions"]
    assert [sample.value for one in found for sample in one.samples] == [1]


def view(engine: TierEngine) -> MoverView:
    found = engine.client.status().mover
    assert found is not None
    return found


def tier(engine: TierEngine, name: str = "disk") -> TierView:
    (found,) = [one for one in engine.client.status().tiers if one.name == name]
    return found


def brought_up(engine: TierEngine, keys: list[bytes]) -> None:
    """All of it, in one wait. On a busy machine a tier may say too late what it has: then once more."""
    names = (f"up-{number}" for number in itertools.count())

    def comes() -> bool:
        found = engine.awaited(keys, next(names))
        if found.lease is not None:
            engine.release(found)
        return found.hit_tokens == len(keys) * CHUNK_TOKENS

    eventually(comes, 30.0)


def samples(server: ServerProcess) -> dict[str, float]:
    """By name and labels, as in kvdock_tier_loads_total{disk,done}. They may be a second old."""
    shown = ("tier", "outcome", "reason", "verb")
    text = raw(server.http, "GET", "/metrics", None, NOBODYS)[2].decode()
    return {
        f"{sample.name}{{{','.join(sample.labels[name] for name in shown if name in sample.labels)}}}": sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }


def history(server: ServerProcess, name: str) -> list[float | None]:
    series = json.loads(raw(server.http, "GET", "/v1/stats")[2])["series"]
    (values,) = [one["values"] for one in series if one["name"] == name]
    return list(values)


def test_what_a_tier_did_is_in_status_metrics_and_history(server: ServerProcess, engine: TierEngine) -> None:
    brought_up(engine, stored_and_gone(engine, 8))
    eventually(lambda: tier(engine).counters["load_done"] >= 8, 30.0)
    eventually(lambda: 0 < samples(server)["kvdock_tier_fetch_seconds_count{disk}"] == tier(engine).fetches)
    view, found = tier(engine), samples(server)
    assert view.fetch_s > 0 and view.load_latency_s > 0 and view.load_bytes_per_s > 0
    assert found["kvdock_tier_fetch_seconds_sum{disk}"] == view.fetch_s
    done = found["kvdock_tier_loads_total{disk,done}"]
    assert done == view.counters["load_done"] >= 8 and found["kvdock_tier_loads_total{disk,damaged}"] == 0
    assert found["kvdock_tier_loaded_bytes_total{disk}"] == done * PART
    assert found["kvdock_tier_stores_total{disk,done}"] >= 8 and found["kvdock_tier_wear_bytes_total{disk}"] >= 8 * PART
    assert found["kvdock_tier_used{disk}"] == 1 and found["kvdock_tier_limit_bytes{disk}"] == 256 * MIB
    left_out = found["kvdock_tier_left_out_total{disk,full_queue}"]
    assert left_out == view.counters["left_out_full_queue"] and found["kvdock_tier_waiting_requests{}"] == 0
    eventually(lambda: sum(filter(None, history(server, "tier_loaded_bytes"))) > 0)


def test_every_counter_of_the_mover_is_a_metric(server: ServerProcess, engine: TierEngine) -> None:
    counters = tier(engine).counters
    assert len(counters) > 20
    names = samples(server)
    for counter in counters:
        plain = f"kvdock_tier_{counter}_total{{disk}}"
        labelled = [
            f"kvdock_tier_{metric}_total{{disk,{counter.removeprefix(prefix)}}}"
            for prefix, metric in (("load_", "loads"), ("store_", "stores"), ("left_out_", "left_out"))
            if counter.startswith(prefix)
        ]
        assert [name for name in (plain, *labelled) if name in names], counter


def test_waits_are_counted_by_how_they_ended(server: ServerProcess, engine: TierEngine) -> None:
    """While the mover is stopped nothing comes, so a wait goes on until the test or its own limit ends it."""
    keys = stored_and_gone(engine, 8)
    process = mover(server)
    with frozen(process):
        assert engine.lookup(keys, "up-0", 20.0).pending is not None
        assert view(engine).waiting == 1
    brought_up(engine, keys)
    flood(engine)
    with frozen(process):
        assert engine.lookup(keys, "ends", 20.0).pending is not None
        engine.client.withdraw(engine.attachment.session, ["ends"])
        assert engine.lookup(keys, "late", 0.2).pending is not None
        eventually(lambda: view(engine).waits["expired"] == 1)
    found = view(engine)
    assert found.waits["fulfilled"] >= 1 == found.waits["expired"] == found.waits["withdrawn"] and found.waiting == 0
    assert found.wait_s["fulfilled"] > 0 and found.wait_s["expired"] >= 0.2
    eventually(lambda: samples(server)["kvdock_tier_wait_seconds_count{withdrawn}"] == 1)
    assert samples(server)["kvdock_tier_wait_seconds_sum{expired}"] == found.wait_s["expired"]
    assert {how: sum(counts) for how, counts in found.wait_counts.items()} == found.waits
    assert sum(found.wait_counts["expired"][:4]) == 0, "it has waited for more than 0.1 s"


def test_a_wait_for_what_a_tier_no_longer_has_is_shortened(
    server: ServerProcess, engine: TierEngine, tmp_path: Path
) -> None:
    keys = stored_and_gone(engine, 4)
    damage_on_disk(tmp_path, engine.bytes_of(keys[2]))
    assert engine.awaited(keys).hit_tokens < 4 * CHUNK_TOKENS
    assert view(engine).waits["shortened"] == 1


@pytest.mark.security
def test_a_tier_that_cannot_be_opened_says_why_and_how_only_to_readers(
    server: ServerProcess, engine: TierEngine, refusing: int
) -> None:
    eventually(lambda: tier(engine, "redis").why == "it cannot be opened", 30.0)
    view = tier(engine, "redis")
    assert view.state == "off" and str(refusing) in view.error and view.counters == {}
    nobodys = json.loads(raw(server.http, "GET", "/v1/status", None, NOBODYS)[2])["tiers"]
    assert [(one["name"], one["why"], one["error"]) for one in nobodys] == [
        ("disk", "", ""), ("redis", "it cannot be opened", "")
    ]
    assert {name: value for name, value in samples(server).items() if "redis" in name} == {"kvdock_tier_used{redis}": 0}


def test_a_tier_that_fails_says_so_until_it_works_again(
    server: ServerProcess, engine: TierEngine, tmp_path: Path
) -> None:
    keys, names = stored_and_gone(engine, 2), (f"r{number}" for number in itertools.count())
    (tmp_path / "disk").rename(tmp_path / "away")

    def is_off() -> bool:
        engine.lookup(keys, next(names), 5.0)
        return tier(engine).state == "off"

    eventually(is_off, 30.0)
    view = tier(engine)
    assert view.why == "its calls fail or are late" and str(tmp_path / "disk") in view.error and view.objects > 0
    (tmp_path / "away").rename(tmp_path / "disk")
    eventually(lambda: tier(engine).state == "open", 30.0)
    view = tier(engine)
    assert (view.why, view.error) == ("", "")


def test_the_command_has_a_line_for_each_tier(server: ServerProcess, engine: TierEngine, refusing: int) -> None:
    stored_and_gone(engine, 2)
    eventually(lambda: tier(engine, "redis").error != "", 30.0)
    done = kvdock("status", "--server", server.unix)
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "tier disk used; " in shown and " of at most 256.0 MiB in " in shown and " stored, 0 B loaded" in shown
    assert "tier redis off: it cannot be opened (" in shown and f":{refusing}" in shown
    assert "requests that" not in shown, "no request waits, and none has"
    assert "1 engine attached" in shown, "the mover is not an engine"
    listed = [kvdock("sessions", *form, "--server", server.unix).stdout for form in ((), ("--json",))]
    assert [one.count(MOVER_LABEL) for one in listed] == [0, 1]
    asked = json.loads(kvdock("status", "--json", "--server", server.unix).stdout)
    assert asked["tiers"][1]["error"] and asked["mover"]["restarts"] == 0


def test_what_requests_to_a_store_cost_is_shown(tmp_path: Path) -> None:
    with opened(S3Store, tmp_path) as store:
        without_disk = {name: value for name, value in SETTINGS.items() if name != "disk_bytes"}
        url = f"{store.settings['objects_url']}&read_price=900000&write_price=900000"
        with (
            SteppedServer(tmp_path / "armed", store.environment, **without_disk, objects_url=url) as server,
            closing(TierEngine(server.unix, manifest(PART))) as engine,
        ):
            is_served(server, 1)
            has_state(server.unix, "open")
            engine.store(engine.chain(2))
            eventually(lambda: tier(engine, "objects").counters["store_done"] == 2, 30.0)
            eventually(lambda: samples(server).get("kvdock_tier_requests_total{objects,put}", 0.0) >= 2.0, 30.0)
            assert samples(server)["kvdock_tier_request_dollars_total{objects}"] > 1.8
            shown = " ".join(kvdock("status", "--server", server.unix).stdout.split())
            assert re.search(r"\d+ requests \(\$\d+\.\d\d\)", shown), shown


def test_nothing_that_is_read_waits_for_a_mover_that_stands_still(server: ServerProcess, engine: TierEngine) -> None:
    process = mover(server)
    with frozen(process):
        eventually(lambda: view(engine).silent_s > 1.5, 30.0)
        for path in ("/v1/status", "/metrics", "/v1/stats", "/readyz"):
            with soon():
                assert raw(server.http, "GET", path)[0] == 200
        assert tier(engine).state == "open", "as it was last reported"
        assert samples(server)["kvdock_mover_silent_seconds{}"] > 1
    eventually(lambda: view(engine).silent_s < 1.5, 30.0)


def test_a_mover_that_ran_well_is_started_again_at_once_and_one_that_ends_at_once_later_each_time() -> None:
    pauses_s, ran_s = [0.0], [60.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 60.0, 2.0]
    for seconds in ran_s:
        pauses_s.append(pause_s(pauses_s[-1], seconds))
    assert pauses_s[1:] == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 0.0, 0.2]


def test_tiers_stay_in_sight_while_a_new_mover_starts(server: ServerProcess, engine: TierEngine) -> None:
    stored_and_gone(engine, 2)
    mover(server).send_signal(signal.SIGKILL)
    seen: list[Any] = []

    def restarts() -> bool:
        status = engine.client.status()
        seen.append([(one.name, one.state, one.why, one.objects) for one in status.tiers])
        return status.mover is not None and status.mover.restarts == 1

    eventually(restarts, 30.0)
    assert seen[-1] == [(name, "off", "the mover is being started", 0) for name in ("disk", "redis")]
    eventually(lambda: tier(engine).objects > 0, 30.0)
    assert all(len(tiers) == 2 for tiers in seen)
