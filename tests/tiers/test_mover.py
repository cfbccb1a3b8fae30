"""A server with its mover and a tier on disk: what is written there, and what comes back under a lookup."""

from __future__ import annotations

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually, soon
from frozen import frozen
from mover_steps import SteppedServer
from server_fixtures import server_of_few, tiered_engine
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import (
    PART,
    POOL_CHUNKS,
    SETTINGS,
    damage_on_disk,
    flood,
    is_served,
    is_written,
    loads,
    mover,
    movers,
    stored_and_gone,
    written,
)

from kvdock.tiers.mover.tier_handle import FIRST_RATE

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

server = server_of_few
engine = tiered_engine


def test_what_the_pool_let_go_comes_back_under_one_lookup(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 8)
    first = engine.lookup(keys, "r", 20.0)
    assert first.hit_tokens == 0 and first.pending is not None
    found = engine.awaited(keys)
    assert found.hit_tokens == 8 * CHUNK_TOKENS
    engine.read(keys, found)
    engine.release(found)


def test_what_is_behind_a_hit_comes_as_well(engine: TierEngine) -> None:
    keys = engine.chain(8)
    engine.store(keys)
    is_written(engine, keys)
    kept = engine.lookup(keys[:3], "keeps")
    flood(engine)
    first = engine.lookup(keys, "r", 20.0)
    assert first.hit_tokens == 3 * CHUNK_TOKENS and first.pending is not None
    assert first.pending.tokens == 8 * CHUNK_TOKENS
    found = engine.awaited(keys)
    assert (found.lease, found.hit_tokens) == (first.lease, 8 * CHUNK_TOKENS), "one lease holds both"
    engine.read(keys, found)
    engine.release(found)
    engine.release(kept)


def test_who_does_not_wait_gets_what_the_pool_has(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    found = engine.lookup(keys, "r")
    assert found.hit_tokens == 0 and found.pending is None


def test_nobody_waits_for_what_no_tier_has(engine: TierEngine) -> None:
    stored_and_gone(engine, 2)
    assert engine.lookup(engine.chain(4), "r", 20.0).pending is None


def test_what_came_is_held_for_the_request_until_its_lease_ends(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    engine.lookup(keys, "r", 20.0)
    found = engine.awaited(keys)
    flood(engine)
    engine.read(keys, found)
    engine.release(found)
    assert engine.lookup(keys, "later").hit_tokens == 0, "temporary chunks go with their last reader"


def test_what_came_stays_leased_when_the_request_has_grown(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    engine.lookup(keys[:3], "r", 20.0)
    eventually(lambda: loads(engine) == 3 and engine.client.status().reservations == 0, 30.0)
    found = engine.lookup(keys, "r", 20.0)
    assert found.hit_tokens == 3 * CHUNK_TOKENS
    flood(engine)
    engine.read(keys, found)
    assert engine.release(found) == []


def test_every_rank_reads_what_came_once(server: ServerProcess) -> None:
    of = manifest(PART, model="mla", writers=1, readers=2)
    engine = TierEngine(server.unix, of, "mla")
    is_served(server, 1)
    keys = stored_and_gone(engine, 4)
    found = engine.awaited(keys)
    assert found.hit_tokens == 4 * CHUNK_TOKENS
    assert engine.release(found, [0]) == [1], "the other rank still reads"
    flood(engine)
    engine.read(keys, found)
    assert engine.release(found, [1]) == []
    engine.close()


def test_a_part_of_each_writer_comes_back(server: ServerProcess) -> None:
    engine = TierEngine(server.unix, manifest(PART // 2, model="heads", writers=2), "heads")
    is_served(server, 1)
    keys = engine.chain(4)
    engine.store(keys)
    eventually(lambda: written(engine) >= 8, 30.0)
    for _ in range(3):
        engine.store(engine.chain(POOL_CHUNKS // 2))
    found = engine.awaited(keys)
    assert found.hit_tokens == 4 * CHUNK_TOKENS
    engine.read(keys, found)
    engine.close()


def test_two_engines_that_want_one_prompt_cause_one_load(server: ServerProcess, engine: TierEngine) -> None:
    other = TierEngine(server.unix, manifest(PART), "other")
    keys = stored_and_gone(engine, 8)
    engine.lookup(keys, "r", 20.0)
    other.lookup(keys, "r", 20.0)
    mine, theirs = engine.awaited(keys), other.awaited(keys)
    assert mine.hit_tokens == theirs.hit_tokens == 8 * CHUNK_TOKENS
    engine.read(keys, mine)
    other.read(keys, theirs)
    eventually(lambda: loads(engine) >= 8)
    assert loads(engine) == 8
    other.close()


def test_a_request_that_ends_leaves_nothing_behind(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 8)
    engine.lookup(keys, "r", 20.0)
    attachment = engine.session.attachment
    assert attachment is not None
    engine.client.withdraw(attachment.session, ["r"])
    eventually(lambda: engine.client.status().leases == engine.client.status().reservations == 0, 30.0)
    engine.awaited(keys, "again")  # it can be had all the same


def test_only_what_was_asked_for_again_is_written(tmp_path: Path) -> None:
    with ServerProcess(**{**SETTINGS, "tier_asks": 2, "disk_path": str(tmp_path / "disk")}) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        once, again = engine.chain(4), engine.chain(4)
        for keys in (once, again, again):
            engine.lookup(keys, engine.rng.randbytes(4).hex())
            engine.store(keys)
        is_written(engine, again)
        engine.store(engine.chain(1))
        time.sleep(0.5)  # nothing says that a chunk will never be written
        assert written(engine) == 4
        engine.close()


def test_damaged_parts_are_a_miss_and_deleted(server: ServerProcess, engine: TierEngine, tmp_path: Path) -> None:
    keys = stored_and_gone(engine, 4)
    damage_on_disk(tmp_path, engine.bytes_of(keys[2]))
    found = engine.awaited(keys)
    assert found.hit_tokens == 2 * CHUNK_TOKENS, "the chunks before the damaged one are whole"
    engine.read(keys, found)
    engine.release(found)
    eventually(lambda: sum(r.counters.get("damaged", 0) for r in engine.client.status().tiers) == 1)
    assert written(engine) < engine.client.status().counters["stored_chunks"]


def test_a_mover_that_is_killed_is_started_again_and_nothing_is_lost(server: ServerProcess, engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 8)
    first = mover(server)
    engine.lookup(keys, "r", 20.0)
    first.send_signal(signal.SIGKILL)
    eventually(lambda: [one.pid for one in movers(server)] not in ([], [first.pid]), 30.0)
    eventually(lambda: written(engine) >= 8 and engine.client.status().reservations == 0, 30.0)
    is_served(server, 1)
    found = engine.awaited(keys, "again")
    assert found.hit_tokens == 8 * CHUNK_TOKENS
    engine.read(keys, found)


def test_while_the_mover_stands_still_lookups_answer_and_nobody_waits_longer_than_it_may(
    server: ServerProcess, engine: TierEngine
) -> None:
    keys = stored_and_gone(engine, 8)
    process = mover(server)
    with frozen(process):
        with soon():
            assert engine.lookup(keys, "r", 0.5).pending is not None
        eventually(lambda: engine.lookup(keys, "r", 0.5).pending is None)
    names = (f"again-{number}" for number in itertools.count())  # until it has sent a heartbeat it is granted nothing
    eventually(lambda: engine.awaited(keys, next(names)).hit_tokens == 8 * CHUNK_TOKENS, 30.0)


def test_what_waits_is_written_when_the_server_ends_and_found_by_the_next(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "tier_drain_s": 20.0, "drain_s": 20.0}
    with SteppedServer(tmp_path / "armed", **settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        keys = engine.chain(16)
        with server.holding("down.asked"):
            engine.store(keys[:1])
            eventually(lambda: not server.armed.exists(), 30.0)
            engine.store(keys[1:], keys[0])
            eventually(lambda: queued_bytes(engine) >= 15 * PART, 30.0)  # the first may be offered once more
            engine.close()
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "drains" in server.log_text())
            time.sleep(0.5)  # time to end too early: the server checks every .1 s whether it may end
            assert server.process.poll() is None
        assert server.process.wait(30.0) == 0
        assert "were not written" not in server.log_text()
    with ServerProcess(**settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        eventually(lambda: written(engine) == 16, 30.0)
        found = engine.awaited(keys)
        assert found.hit_tokens == 16 * CHUNK_TOKENS
        engine.read(keys, found)
        engine.close()


def test_what_cannot_be_written_in_time_ends_with_the_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "tier_drain_s": 0.5, "drain_s": 20.0}
    with SteppedServer(tmp_path / "armed", **settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        with server.holding("down.asked"):
            engine.store(engine.chain(1))
            eventually(lambda: not server.armed.exists(), 30.0)
            engine.close()
            began_s = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began_s >= 0.5
        assert "has not stopped in time: it is killed" in server.log_text()


def queued_bytes(engine: TierEngine) -> int:
    return sum(report.queued_bytes for report in engine.client.status().tiers)


def test_nobody_waits_for_a_tier_that_is_slower_than_the_engine(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    found = engine.lookup(keys, "fast", 20.0, tokens_per_s=1e9)
    assert found.hit_tokens == 0 and found.pending is None
    mover_of = engine.client.status().mover
    assert mover_of is not None and mover_of.declined == 1
    assert engine.lookup(keys, "slow", 20.0, tokens_per_s=1.0).pending is not None
    assert engine.awaited(keys, "slow").hit_tokens == 4 * CHUNK_TOKENS


def test_a_tier_is_measured_by_what_it_stored(engine: TierEngine) -> None:
    keys = engine.chain(4)
    engine.store(keys)
    is_written(engine, keys)
    (before,) = engine.client.status().tiers
    eventually(lambda: engine.client.status().tiers[0].load_bytes_per_s != FIRST_RATE, 30.0)
    assert before.counters["loaded_bytes"] == 0 == engine.client.status().tiers[0].counters["loaded_bytes"]


def test_a_request_that_asks_soon_after_its_wait_has_what_has_come(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    wait_s, began_s = 2.0, time.monotonic()
    assert engine.lookup(keys, "slow", wait_s).pending is not None
    eventually(lambda: loads(engine) == 4 and engine.client.status().reservations == 0)
    time.sleep(max(0.0, began_s + wait_s + 0.5 - time.monotonic()))  # the engine is busy with something else
    found = engine.lookup(keys, "slow", wait_s)
    assert found.hit_tokens == 4 * CHUNK_TOKENS and found.pending is None
    engine.read(keys, found)
    engine.release(found)


def test_a_burst_for_which_the_pool_is_too_small_waits_its_turn(tmp_path: Path) -> None:
    """As after a restart: more prompts come at once than the pool holds. Each reads what came, and gives it back."""
    prompts, chunks = 12, 8
    with ServerProcess(**SETTINGS, disk_path=str(tmp_path / "disk"), session_cap=1.0, total_cap=1.0) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        wanted = [engine.chain(chunks) for _ in range(prompts)]
        for number, keys in enumerate(wanted):
            engine.store(keys)
            if number % 3 == 2:  # as many as the pool holds
                is_written(engine, [key for keys in wanted[: number + 1] for key in keys])
        flood(engine)

        def ask(number: int) -> int:
            found = engine.awaited(wanted[number], f"burst {number}", 60.0)
            engine.read(wanted[number], found)
            if found.lease is not None:
                engine.release(found)
            return found.hit_tokens // CHUNK_TOKENS

        with ThreadPoolExecutor(prompts) as threads:
            assert list(threads.map(ask, range(prompts))) == [chunks] * prompts
        engine.close()
