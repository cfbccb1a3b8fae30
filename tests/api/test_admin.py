"""What operators may do: clear, delete, pin, limits, and lists in pages. None of it frees what an engine holds."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import call, hit_tokens, ok, refused
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, small_pool, unique
from server_fixtures import attached_engine

from kvdock.api.pool import pool as pools
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache, PatchConfig
from kvdock.protocol.errors import ApiError

CHUNK_BYTES = 16384

ONE_NAMESPACE = {"namespaces": 1, "pending_tiers": []}
NO_TIERS = {"tier_chunks": 0, "pending_tiers": [], "is_cleared": False}
"""What a deletion answers of lower tiers where there are none."""

engine = attached_engine(has_own_model=True)


# ------------------------------------------------------------------ clear, delete


def test_clear_takes_one_namespace_and_leaves_the_others(server: ServerProcess, client: Client, engine: Engine) -> None:
    other = attach(client, model=unique("other"))
    chain = keys(40, unique("clear"))
    engine.store(chain)
    other.store(chain)
    body = {"namespace": engine.attached.namespace}
    assert ok(server.http, "POST", "/v1/cache/clear", body) == {"chunks": 40, **ONE_NAMESPACE}
    assert ok(server.http, "POST", "/v1/cache/clear", body) == {"chunks": 0, **ONE_NAMESPACE}
    assert (hit_tokens(engine, chain), hit_tokens(other, chain)) == (0, 40 * 16)
    assert ok(server.http, "POST", "/v1/cache/clear", {})["chunks"] >= 40
    assert hit_tokens(other, chain) == 0
    other.close()


def test_clear_frees_nothing_that_a_reader_holds(server: ServerProcess, client: Client, engine: Engine) -> None:
    chain = keys(4, unique("held"))
    engine.store(chain)
    lease = engine.lookup(chain, request=unique("r")).lease
    ok(server.http, "POST", "/v1/cache/clear", {})
    held = client.status()
    assert held.pool.quarantined_bytes == held.pool.held_bytes == 4 * CHUNK_BYTES and held.chunks.ready == 0
    assert engine.release(lease, 0) == []
    assert client.status().pool.quarantined_bytes == 0


def test_delete_takes_the_named_chunks_only(server: ServerProcess, engine: Engine) -> None:
    chain = keys(6, unique("delete"))
    engine.store(chain)
    body = {"namespace": engine.attached.namespace, "keys": [*chain[3:5], *keys(2, unique("absent"))]}
    assert ok(server.http, "POST", "/v1/chunks/delete", body) == {"chunks": 2, **NO_TIERS}
    assert ok(server.http, "POST", "/v1/chunks/delete", body) == {"chunks": 0, **NO_TIERS}
    assert hit_tokens(engine, chain) == 3 * 16


@pytest.mark.parametrize(("method", "path", "more"), [
    ("POST", "/v1/cache/clear", {}),
    ("POST", "/v1/chunks/delete", {"keys": keys(1)}),
    ("POST", "/v1/pins", {"keys": keys(1), "duration_s": 1}),
])
def test_an_unknown_namespace_is_refused(server: ServerProcess, method: str, path: str, more: dict[str, Any]) -> None:
    assert refused(server.http, method, path, {"namespace": "0" * 64, **more})["code"] == "unknown_namespace"


@pytest.mark.parametrize("body", [
    {"keys": keys(1)}, {"namespace": "0" * 64, "keys": []}, {"namespace": "0" * 64, "keys": ["z" * 64]},
    {"namespace": "0" * 64, "keys": keys(1), "all": True}, {"namespace": "0" * 64, "keys": keys(1) * 4097},
])
def test_delete_refuses_what_does_not_name_chunks(server: ServerProcess, body: dict[str, Any]) -> None:
    assert refused(server.http, "POST", "/v1/chunks/delete", body)["code"] in ("invalid_body", "unknown_namespace")


# ------------------------------------------------------------------ pins


def test_pinned_chunks_outlive_a_flood_until_they_are_unpinned() -> None:
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        kept, space = keys(8, "kept"), engine.attached.namespace
        engine.store(kept)
        body = {"namespace": space, "keys": [*kept, *keys(1, "absent")], "duration_s": 600}
        assert ok(server.http, "POST", "/v1/pins", body) == {"chunks": 8}
        for round_ in range(4):
            engine.store(keys(100, f"flood {round_}"))
        assert hit_tokens(engine, kept) == 8 * 16
        assert ok(server.http, "POST", "/v1/pins", {**body, "duration_s": 0}) == {"chunks": 8}
        for round_ in range(4, 8):
            engine.store(keys(100, f"flood {round_}"))
        assert hit_tokens(engine, kept) < 8 * 16
        engine.close()


def test_a_pin_ends_by_itself() -> None:
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        kept = keys(8, "short")
        engine.store(kept)
        body = {"namespace": engine.attached.namespace, "keys": kept, "duration_s": 0.05}
        assert ok(server.http, "POST", "/v1/pins", body) == {"chunks": 8}

        def flooded() -> bool:
            engine.store(keys(100, unique("flood")))
            return hit_tokens(engine, kept) == 0

        eventually(flooded)
        engine.close()


# ------------------------------------------------------------------ limits


def test_config_shows_every_setting_and_what_is_in_effect(server: ServerProcess) -> None:
    config = ok(server.http, "GET", "/v1/config")
    assert set(config["settings"]) == set(Settings.__struct_fields__)
    assert config["limits"]["pool_bytes"] == config["settings"]["pool_bytes"] == 16 * MIB
    assert config["retiring"] == []


def test_a_lower_cap_shortens_the_next_reservation(server: ServerProcess, client: Client, engine: Engine) -> None:
    before = ok(server.http, "GET", "/v1/config")["limits"]
    after = ok(server.http, "PATCH", "/v1/config", {"session_cap": 4 * CHUNK_BYTES / (16 * MIB)})
    assert after["limits"] == {**before, "session_cap": 4 * CHUNK_BYTES / (16 * MIB)}
    assert after["settings"]["session_cap"] == 1.0
    granted = engine.reserve(keys(8, unique("capped")))
    assert len(granted.chunks) == 4 and granted.limited_by == "held_bytes"
    ok(server.http, "PATCH", "/v1/config", before)
    assert ok(server.http, "GET", "/v1/config")["limits"] == before


@pytest.mark.parametrize(("body", "code"), [
    ({"low_water": 0.5}, "bad_argument"),
    ({"pool_bytes": 8 * MIB}, "bad_argument"),
    ({"pool_bytes": 1 << 50}, "no_memory"),
    ({"session_cap": 0}, "invalid_body"),
    ({"port": 1}, "invalid_body"),
    ({"high_water": 0.5, "session_cap": 2.0}, "invalid_body"),
])
def test_limits_that_do_not_fit_change_nothing(server: ServerProcess, body: dict[str, Any], code: str) -> None:
    def config() -> dict[str, Any]:
        """What calls change: what tenants use changes by itself, when engines of other tests have gone."""
        shown = ok(server.http, "GET", "/v1/config")
        return {**shown, "tenants": {name: view["quota"] for name, view in shown["tenants"].items()}}

    before = config()
    problem = refused(server.http, "PATCH", "/v1/config", body)
    assert problem["code"] == code and (problem["found"] is not None or problem["wanted"] is not None)
    assert config() == before


def test_one_grant_too_many_is_refused_and_a_repeat_of_one_that_is_held_is_not() -> None:
    with ServerProcess(session_grants=3) as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(2, "grants")
        engine.store(chain)
        leases = [engine.lookup(chain, request=f"r{index}").lease for index in range(2)]
        reserved = engine.reserve(keys(1, "third"), store="third")
        body = {"session": engine.session, "member": engine.member, "keys": chain}
        problem = refused(server.http, "POST", "/v1/lookups", {**body, "request": "fourth"})
        assert (problem["code"], problem["status"], problem["found"]) == ("too_many_grants", 429, 3)
        assert refused(
            server.http, "POST", "/v1/reservations", {**body, "keys": keys(1, "x"), "store": "fourth"}
        )["code"] == "too_many_grants"
        assert engine.lookup(chain, request="r0").lease == leases[0]
        assert engine.reserve(keys(1, "third"), store="third").reservation == reserved.reservation
        engine.release(leases[1], 0)
        assert engine.lookup(chain, request="fourth").lease is not None
        engine.close()


# ------------------------------------------------------------------ the pool's size


def segment_ids(address: str) -> list[int]:
    return [segment["id"] for segment in ok(address, "GET", "/v1/segments")["segments"]]


def test_a_lower_limit_removes_segments_once_nobody_holds_any_of_them() -> None:
    """Four segments full of leased chunks: three leave when their readers let go, and not before."""
    with ServerProcess(
        pool_bytes=8 * MIB, segment_bytes=2 * MIB, heartbeat_s=0.5
    ) as server, Client(server.unix) as client:
        engine = attach(client)
        for index in range(4):
            engine.store(keys(120, f"fill {index}"))
        assert segment_ids(server.http) == [0, 1, 2, 3]
        leases = [engine.lookup(keys(120, f"fill {index}"), request=f"r{index}").lease for index in range(4)]
        answer = ok(server.http, "PATCH", "/v1/config", {"pool_bytes": 2 * MIB})
        assert len(answer["retiring"]) == 3 and answer["limits"]["pool_bytes"] == 2 * MIB
        listed = ok(server.http, "GET", "/v1/segments")["segments"]
        assert sorted(one["id"] for one in listed if one["retiring"]) == sorted(answer["retiring"])
        eventually(lambda: client.status().uptime_s > 1)
        assert len(segment_ids(server.http)) == 4, "a segment went while engines held chunks in it"
        assert client.status().pool.held_bytes == 480 * CHUNK_BYTES
        objects = len(server.pool_memory())
        for lease in leases:
            engine.release(lease, 0)
        eventually(lambda: len(segment_ids(server.http)) == 1)
        beat = engine.heartbeat()
        assert set(beat.retired) == set(answer["retiring"]) and beat.segments == 1
        eventually(lambda: len(server.pool_memory()) == objects - 3)
        status = client.status().pool
        assert status.allocated_bytes == status.limit_bytes == 2 * MIB
        assert ok(server.http, "GET", "/v1/config")["retiring"] == []
        late = attach(client)
        assert late.heartbeat().retired == [], "a member is told of segments that were gone before it came"
        ok(server.http, "PATCH", "/v1/config", {"pool_bytes": 6 * MIB})
        for index in range(3):
            engine.store(keys(120, f"again {index}"))
        assert [number for number in segment_ids(server.http) if number > 3] == [4, 5], "segment ids were used again"
        for one in (engine, late):
            one.leave()


@pytest.mark.security
def test_a_limit_that_needs_more_segments_than_a_pool_may_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MAX_SEGMENTS", 8)
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s"), pool_bytes=4 * MIB, segment_bytes=MIB))

    async def change() -> None:
        await pool.grow_first()
        with pytest.raises(ApiError, match="at most 8 segments: serve with a larger segment_bytes") as problem:
            await pool.change_limits({"pool_bytes": 9 * MIB})
        assert (problem.value.code, problem.value.found) == ("bad_argument", 9 * MIB)
        assert problem.value.wanted == f"pool_bytes <= {8 * MIB} with segment_bytes {MIB}"
        assert pool.limit_bytes == 4 * MIB
        await pool.change_limits({"pool_bytes": 8 * MIB})
        await pool.change_limits({"pool_bytes": MIB})

    with closing(pools.open_pool(settings, secrets.randbits)) as pool:
        asyncio.run(change())


_GROWTH = """
import asyncio, json, sys
from kvdock.api.pool import pool as pools
from kvdock.api.settings import Settings
from kvdock.shm.errors import PoolTooSmall

class Clock:
    now_s = 100.0
    def __call__(self): return self.now_s

async def main():
    clock = Clock()
    settings = Settings.load({"pool_bytes": 3 << 20, "segment_bytes": 1 << 20, "prefault_threads": 1,
                              "table_records": 1024, "table_grants": 64})
    pool = pools.open_pool(settings, __import__("random").Random(int(sys.argv[1])).getrandbits, clock)
    try:
        await pool.grow_first()
        seen = []
        capacity = pool._segments._capacity
        class Short:
            def require(self, size_bytes): raise PoolTooSmall("free memory", found=0, wanted=size_bytes)
        pool._segments._capacity = Short()
        for at_s in (100.0, 100.5, 101.0, 102.5, 103.0):
            clock.now_s = at_s
            before = pool.growth_error
            tried = pool.can_grow()
            await pool.grow_once()
            seen.append([tried, bool(pool.growth_error), pool.segment_count])
        pool._segments._capacity = capacity
        clock.now_s = 110.0
        await pool.grow_once()
        seen.append([True, bool(pool.growth_error), pool.segment_count])
        print(json.dumps(seen))
    finally:
        pool.close()

asyncio.run(main())
"""


def test_a_pool_that_could_not_grow_tries_again_later_and_each_time_waits_longer() -> None:
    """Memory is short for the first tries (at 100, 101 and 103 s), then there is some."""
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, "20261121"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == (
        "[[true, true, 1], [false, true, 1], [true, true, 1], [false, true, 1], [true, true, 1], [true, false, 2]]"
    )


# ------------------------------------------------------------------ pages


def pages(address: str, path: str, field: str, limit: int) -> list[dict[str, Any]]:
    """All items, page by page; each page but the last is full."""
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = ok(address, "GET", f"{path}?limit={limit}{cursor}")
        items += answer[field]
        if answer["next"] is None:
            assert len(answer[field]) <= limit
            return items
        assert len(answer[field]) == limit
        cursor = f"&cursor={answer['next']}"


def test_lists_come_in_pages_that_hold_each_item_once() -> None:
    with ServerProcess(pool_bytes=4 * MIB, segment_bytes=1 * MIB) as server, Client(server.unix) as client:
        engines = [attach(client, model=f"model {index}") for index in range(5)]
        for index, engine in enumerate(engines):
            engine.store(keys(30, f"page {index}"))
            engine.lookup(keys(30, f"page {index}"), request="r")
        for path, field, id_, count in (
            ("/v1/sessions", "sessions", "session", 5), ("/v1/leases", "leases", "grant", 5),
            ("/v1/namespaces", "namespaces", "namespace", 5), ("/v1/segments", "segments", "id", 3),
            ("/v1/requests", "requests", "at", 10),
        ):
            whole = ok(server.http, "GET", path)
            assert whole["next"] is None and len(whole[field]) == count, path
            for limit in (1, 2, 3, count):
                shown = pages(server.http, path, field, limit)
                assert [item[id_] for item in shown] == [item[id_] for item in whole[field]], (path, limit)
        for engine in engines:
            engine.close()


def test_leases_are_listed_oldest_first_and_an_answer_tells_all_ages_of_one_moment() -> None:
    """Whatever the moment, the ages of two leases differ by as much as the leases were opened apart."""
    with ServerProcess() as server, Client(server.unix) as client, closing(attach(client)) as engine:
        for index in range(20):
            engine.store(keys(1, f"age {index}"))
            engine.lookup(keys(1, f"age {index}"), request=f"r{index}")
        for path, field in (("/v1/leases", "leases"), (f"/v1/sessions/{engine.session}", "grants")):
            apart = set()
            for _ in range(200):  # the server's milliseconds change somewhere in a few of the answers
                ages_ms = [round(1000 * lease["age_s"]) for lease in ok(server.http, "GET", path)[field]]
                assert len(ages_ms) == 20 and ages_ms == sorted(ages_ms, reverse=True), path
                apart.add(tuple(older - younger for older, younger in pairwise(ages_ms)))
            assert len(apart) == 1, path


def test_a_page_goes_on_where_it_stopped_though_items_have_gone(client: Client, server: ServerProcess) -> None:
    engines = [attach(client) for _ in range(4)]
    ids = [engine.listed for engine in engines]
    at = ok(server.http, "GET", "/v1/sessions?limit=1000")["sessions"]
    first = next(index for index, item in enumerate(at) if item["session"] == ids[0])
    page = ok(server.http, "GET", f"/v1/sessions?limit={first + 2}")
    assert [item["session"] for item in page["sessions"]][-2:] == ids[:2]
    client.leave(engines[2].session, engines[2].member)
    rest = ok(server.http, "GET", f"/v1/sessions?cursor={page['next']}")
    assert [item["session"] for item in rest["sessions"]] == ids[3:]
    for engine in (engines[0], engines[1], engines[3]):
        client.leave(engine.session, engine.member)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/leases", "/v1/namespaces", "/v1/segments", "/v1/requests"])
@pytest.mark.parametrize(("query", "code"), [
    ("limit=0", "bad_argument"), ("limit=1001", "bad_argument"), ("cursor=-1", "bad_argument"),
    ("cursor=abc", "bad_argument"), (f"cursor={1 << 64}", "bad_argument"), ("offset=3", "unknown_parameter"),
    ("limit=1&limit=2", "bad_argument"),
])
def test_a_page_nobody_can_mean_is_refused(server: ServerProcess, path: str, query: str, code: str) -> None:
    assert refused(server.http, "GET", f"{path}?{query}")["code"] == code


@pytest.mark.parametrize(("query", "said"), [
    ("limit=0", "wanted a number >= 1, found '0'"), ("limit=1.5", "wanted a whole number, found '1.5'"),
])
def test_a_number_that_is_refused_is_named_with_what_was_wanted(
    server: ServerProcess, query: str, said: str
) -> None:
    assert refused(server.http, "GET", f"/v1/requests?{query}")["detail"] == f"query.limit: {said}"


def test_a_session_shows_its_members_what_each_still_holds_and_the_bytes(
    server: ServerProcess, client: Client
) -> None:
    scheduler = attach(client, ranks=[0], writers=2, tensor_parallel=2)
    worker = attach(
        client, instance=scheduler.body.instance, ranks=[1], scheduler=False, writers=2, tensor_parallel=2
    )
    chain = keys(3, unique("detail"))
    scheduler.store(chain, ranks=2)
    lease = scheduler.lookup(chain, request="the request", readers=2).lease
    reservation = scheduler.reserve(keys(1, unique("more"))).reservation
    scheduler.release(lease, 0)
    shown = ok(server.http, "GET", f"/v1/sessions/{scheduler.session}")
    grants = {grant["grant"]: grant for grant in shown["grants"]}
    assert set(grants) == {lease, reservation} and shown["next"] is None
    found = grants[str(lease)]
    assert (found["kind"], found["request"], found["chunks"]) == ("lease", "the request", 3)
    assert found["remaining"] == [1] and found["bytes"] == 3 * 2 * CHUNK_BYTES and found["age_s"] >= 0
    assert grants[str(reservation)]["kind"] == "reservation"
    assert {member["id"]: set(member["grants"]) for member in shown["members"]} == {
        scheduler.member: {reservation}, worker.member: {lease, reservation},
    }
    assert shown["held_bytes"] == 4 * 2 * CHUNK_BYTES and (shown["leases"], shown["reservations"]) == (1, 1)
    assert len(ok(server.http, "GET", f"/v1/sessions/{scheduler.session}?limit=1")["grants"]) == 1
    assert call(server.http, "GET", "/v1/sessions/nobody")[1]["code"] == "unknown_session"
    for member in (worker, scheduler):
        member.leave()


def test_the_eviction_policy_changes_while_the_server_runs() -> None:
    with ServerProcess(eviction="lru") as server, Client(server.unix) as client:
        assert client.config().limits.eviction == "lru"
        assert client.configure(PatchConfig(eviction="adaptive")).limits.eviction == "adaptive"
        assert client.config().settings["eviction"] == "lru", "as it was started"
        assert refused(server.http, "PATCH", "/v1/config", {"eviction": "fifo"})["found"] == "$.eviction"
        assert client.config().limits.eviction == "adaptive"


def test_slots_for_what_was_found_before_a_clear_are_refused(engine: Engine) -> None:
    """As the server's mover asks for them: what it has found below the pool was cleared meanwhile."""
    assert engine.reserve(keys(2), edition=0).reservation is not None
    engine.client.clear(ClearCache(namespace=engine.attached.namespace))
    with pytest.raises(ApiError) as error:
        engine.reserve(keys(2), edition=0)
    assert (error.value.code, error.value.found, error.value.wanted) == ("cleared_meanwhile", 0, 1)
    assert engine.reserve(keys(2), edition=1).reservation is not None
