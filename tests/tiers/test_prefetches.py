"""What lower tiers load ahead of requests, and what stays in the pool of what they loaded for one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from frozen import frozen
from server_fixtures import server_of_few, tiered_engine
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import (
    PART,
    POOL_CHUNKS,
    SETTINGS,
    is_served,
    loads,
    mover,
    stored_and_gone,
)

from kvdock.protocol.admin_schemas import PatchConfig, TierKeep
from kvdock.protocol.schemas import Lookup, LookupAnswer, Prefetch, PrefetchAnswer
from kvdock.tiers.mover.tier_handle import FIRST_RATE

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

SHARE = POOL_CHUNKS // 4
"""Chunks that prefetches may push out."""

server = server_of_few
engine = tiered_engine


def prefetch(engine: TierEngine, keys: list[bytes], **more: float) -> PrefetchAnswer:
    attachment = engine.attachment
    return engine.client.prefetch(Prefetch(
        session=attachment.session, member=attachment.member, keys=b"".join(keys), **more,
    ))


def stored(engine: TierEngine, keys: list[bytes]) -> int:
    """Chunks in the pool from the first on; no use of them."""
    body = Lookup(namespace=engine.attachment.namespace.hex(), keys=b"".join(keys))
    return engine.client.lookup(body).hit_tokens // CHUNK_TOKENS


def count(engine: TierEngine, name: str) -> int:
    return engine.client.status().counters[name]


@contextmanager
def standing_still(server: ServerProcess) -> Iterator[None]:
    process = mover(server)
    with frozen(process):
        yield


# ------------------------------------------------------------------ ahead of requests


def test_what_is_named_comes_before_anybody_asks_and_stays(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 6)
    assert prefetch(engine, keys) == PrefetchAnswer(stored_tokens=0, coming_tokens=6 * CHUNK_TOKENS, why="")
    eventually(lambda: stored(engine, keys) == 6, 30.0)
    found = engine.lookup(keys)
    assert found.hit_tokens == 6 * CHUNK_TOKENS and found.pending is None
    engine.read(keys, found)
    engine.release(found)
    assert stored(engine, keys) == 6, "they are no temporary chunks"
    assert prefetch(engine, keys) == PrefetchAnswer(stored_tokens=6 * CHUNK_TOKENS, coming_tokens=0, why="stored")
    eventually(lambda: count(engine, "prefetched_chunks") == 6)
    assert (count(engine, "prefetches"), count(engine, "prefetches_dropped")) == (2, 0)


def test_prefetches_and_a_lookup_of_the_same_chunks_cause_one_load(server: ServerProcess, engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 6)
    with standing_still(server):  # so that all have come before anything is loaded
        prefetch(engine, keys)
        prefetch(engine, keys[:4])
        assert engine.lookup(keys, "r", 20.0).pending is not None
    found = engine.awaited(keys)
    assert found.hit_tokens == 6 * CHUNK_TOKENS
    engine.read(keys, found)
    eventually(lambda: loads(engine) >= 6)
    assert loads(engine) == 6


def test_it_can_be_said_beforehand_when(engine: TierEngine) -> None:
    keys = engine.chain(4)
    engine.store(keys)
    assert prefetch(engine, keys, after_s=3600).why == "later"
    answer = prefetch(engine, keys, after_s=0.2)
    assert (answer.stored_tokens, answer.coming_tokens, answer.why) == (4 * CHUNK_TOKENS, 0, "later")
    gone = stored_and_gone(engine, 4)
    assert prefetch(engine, gone, after_s=0.01).why == "later"
    eventually(lambda: stored(engine, gone) == 4, 30.0)


def test_what_no_tier_has_is_not_looked_for(engine: TierEngine) -> None:
    stored_and_gone(engine, 2)
    assert prefetch(engine, engine.chain(4)) == PrefetchAnswer(stored_tokens=0, coming_tokens=0, why="absent")


def test_without_tiers_the_answer_says_so() -> None:
    with ServerProcess(pool_bytes=4 << 20, segment_bytes=4 << 20) as server:
        engine = TierEngine(server.unix, manifest(PART))
        assert prefetch(engine, engine.chain(2)).why == "no_tiers"
        assert count(engine, "prefetches") == 1
        engine.close()


def test_prefetches_push_out_no_more_than_a_share_of_the_pool(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 2 * SHARE)
    engine.store(engine.chain(POOL_CHUNKS))

    def all_that_may_come() -> bool:
        """Asks again: a prefetch ends short while the mover leases what it would evict, since it writes it."""
        answer = prefetch(engine, keys)
        assert answer.why == "limited"
        assert answer.coming_tokens <= (SHARE + 2) * CHUNK_TOKENS, "a share, and what is free"
        return answer.coming_tokens <= 2 * CHUNK_TOKENS and stored(engine, keys) >= SHARE

    eventually(all_that_may_come, 60.0)
    assert stored(engine, keys) <= SHARE + 2
    assert count(engine, "prefetches_refused") == count(engine, "prefetches") >= 2
    engine.release(engine.lookup(keys))
    assert prefetch(engine, keys).why == "", "what was asked for counts no more"


def test_free_room_is_filled_beyond_that_share(tmp_path: Path) -> None:
    settings = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "tier_drain_s": 20.0, "drain_s": 20.0}
    with ServerProcess(**settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        keys = stored_and_gone(engine, 2 * SHARE)
        engine.close()
        assert server.stop() == 0
    with ServerProcess(**settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        eventually(lambda: prefetch(engine, keys).why == "", 30.0)
        eventually(lambda: stored(engine, keys) == 2 * SHARE, 30.0)
        engine.close()


def leased(engine: TierEngine, chain: list[bytes], name: str) -> LookupAnswer:
    """Stores all of it, and leases it. While the mover leases other chunks, since it writes them, they cannot go for
    these, and an engine may get no lease: then once more."""
    leases = list[LookupAnswer]()

    def is_leased() -> bool:
        engine.store(chain)
        found = engine.lookup(chain, f"{name}, {len(leases)}")
        if found.lease is not None:
            leases.append(found)
        is_whole = found.hit_tokens == len(chain) * CHUNK_TOKENS
        if found.lease is not None and not is_whole:
            engine.release(found)
        return found.lease is not None and is_whole

    eventually(is_leased)
    return leases[-1]


def test_nothing_that_is_leased_goes_for_a_prefetch(tmp_path: Path) -> None:
    settings = {**SETTINGS, "disk_path": str(tmp_path / "disk"), "session_cap": 1.0, "total_cap": 1.0}
    with ServerProcess(**settings) as server:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        keys = stored_and_gone(engine, 4)
        room = engine.client.status().pool.ready_bytes // PART  # other chunks fill it
        others = [engine.chain(size) for size in (room // 4, room // 4, room // 4, room - 3 * (room // 4))]
        held = [leased(engine, chain, f"holds {at}") for at, chain in enumerate(others)]
        prefetch(engine, keys)
        prefetch(engine, keys[:1], after_s=0.01)  # behind the other one, as they go one by one
        eventually(lambda: count(engine, "prefetched_chunks") + count(engine, "short_reservations") > 0, 30.0)
        for chain, found in zip(others, held, strict=True):
            engine.read(chain, found)
            engine.release(found)
        engine.close()


def test_only_so_many_prefetches_wait(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 1)
    for _ in range(256):
        assert prefetch(engine, keys, after_s=600).why == "later"
    assert prefetch(engine, keys, after_s=600).why == prefetch(engine, keys).why == "limited"
    assert count(engine, "prefetches_refused") == 2


def test_a_prefetch_whose_time_is_over_is_dropped_and_counted(server: ServerProcess, engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    with standing_still(server):
        assert prefetch(engine, keys, deadline_s=0.001).why == ""
        eventually(lambda: count(engine, "prefetches_dropped") == 1, 30.0)  # by the server: the mover says nothing
    names = (f"again {number}" for number in range(1000))
    eventually(lambda: engine.awaited(keys, next(names)).hit_tokens == 4 * CHUNK_TOKENS, 30.0)


def test_a_prefetch_that_a_mover_took_with_it_is_counted(server: ServerProcess, engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 4)
    first = mover(server)
    first.send_signal(signal.SIGSTOP)
    prefetch(engine, keys, deadline_s=600)
    first.send_signal(signal.SIGKILL)
    eventually(lambda: count(engine, "prefetches_dropped") == 1 or stored(engine, keys) == 4, 30.0)


# ------------------------------------------------------------------ what stays of what came for a request


@pytest.mark.parametrize("keep", ["shared", "always"])
def test_what_came_for_one_request_stays_if_the_server_says_so(engine: TierEngine, keep: TierKeep) -> None:
    assert engine.client.configure(PatchConfig(tier_keep=keep)).limits.tier_keep == keep
    keys = stored_and_gone(engine, 4)
    found = engine.awaited(keys)
    engine.read(keys, found)
    engine.release(found)
    assert stored(engine, keys) == (4 if keep == "always" else 0)


@pytest.fixture
def as_mover(server: ServerProcess, engine: TierEngine) -> Iterator[TierEngine]:
    """What the server takes for its mover: the test itself, so that it says when chunks come. The real one rests."""
    (real,) = (one for one in engine.client.sessions().sessions if one.label == "lower tiers")
    made = TierEngine(server.unix, manifest(PART), f"{real.instance}-too")
    yield made
    made.close()


@pytest.mark.parametrize("keep", ["shared", "always"])
def test_what_comes_when_its_request_is_gone_is_treated_likewise(
    engine: TierEngine, as_mover: TierEngine, keep: TierKeep
) -> None:
    engine.client.configure(PatchConfig(tier_keep=keep))
    keys = engine.chain(4)
    as_mover.store(keys, temporary=True)
    assert stored(engine, keys) == (4 if keep == "always" else 0)


def test_what_comes_before_the_chunks_in_front_of_it_waits_for_its_request(
    server: ServerProcess, engine: TierEngine, as_mover: TierEngine
) -> None:
    keys = stored_and_gone(engine, 4)
    with standing_still(server):
        for request in ("takes it", "leaves"):
            assert engine.lookup(keys, request, 20.0).pending is not None
            as_mover.store(keys[2:], keys[1], temporary=True)
            if request == "leaves":
                engine.client.withdraw(engine.attachment.session, [request])
            as_mover.store(keys[:2], temporary=True)
            found = engine.lookup(keys, f"after {request}" if request == "leaves" else request)
            assert found.hit_tokens == (4 if request == "takes it" else 0) * CHUNK_TOKENS
            if found.lease:
                engine.read(keys, found)
                engine.release(found)
    assert stored(engine, keys) == 0


def test_of_two_requests_that_share_a_prefix_the_one_that_ends_takes_nothing_from_the_other(
    server: ServerProcess, engine: TierEngine
) -> None:
    other = TierEngine(server.unix, manifest(PART), "other")
    keys = stored_and_gone(engine, 8)
    with standing_still(server):
        engine.lookup(keys[:6], "gone", 20.0)
        assert other.lookup(keys, "r", 20.0).pending is not None
        engine.client.withdraw(engine.attachment.session, ["gone"])
    found = other.awaited(keys)
    assert found.hit_tokens == 8 * CHUNK_TOKENS
    other.read(keys, found)
    other.release(found)
    eventually(lambda: stored(engine, keys) == 0)
    other.close()


def test_which_tier_has_what_a_request_lacks_and_what_loading_it_would_have_taken(engine: TierEngine) -> None:
    keys = stored_and_gone(engine, 6)
    eventually(lambda: engine.client.status().tiers[0].load_bytes_per_s != FIRST_RATE)  # else it changes meanwhile
    engine.lookup([*keys, *engine.chain(1)], "hurried")  # it waits for nothing
    (tier,) = engine.client.status().tiers
    said = engine.client.explain("hurried")
    took_ms = 1000 * (tier.load_latency_s + 6 * PART / tier.load_bytes_per_s)
    assert said.tier_tokens == 6 * CHUNK_TOKENS
    (loads_in,) = said.tier_loads
    assert loads_in.tier == tier.name and loads_in.load_ms == pytest.approx(took_ms, rel=1e-6)
    (sentence,) = [one for one in said.sentences if one.code == "in_tiers"]
    assert sentence.advice == "wait_for_tiers" and sentence.text == (
        f"The lower tier {tier.name} had {6 * CHUNK_TOKENS} of the missing tokens. Loading them would have taken, at "
        f"the speed that the server expects: from {tier.name} about {took_ms:,.1f} ms."
    )
    engine.lookup(engine.chain(2), "new")
    new = engine.client.explain("new")
    assert (new.tier_tokens, new.tier_loads) == (0, []) and "in_tiers" not in {one.code for one in new.sentences}
