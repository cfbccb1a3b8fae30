"""What a tenant may use: limits over a real server, quotas that change while it runs, and two tenants of one pool."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import call, ok, refused
from adoption_helpers import next_at
from api_helpers import (
    MIB,
    Engine,
    ServerProcess,
    access_file,
    attach,
    eventually,
    kept_of,
    keys,
    manifest,
    small_pool,
    unique,
)
from server_fixtures import fresh_server

from kvdock._core import MAX_MEMBERS, MAX_NAMESPACES, MAX_SESSION_MEMBERS, MAX_SESSIONS
from kvdock.api.access.access_file import entry
from kvdock.api.access.peer import Peer, of_user
from kvdock.api.clock import ServerClock
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.pool.quotas import Quotas, default_quota, tenant_id
from kvdock.api.pool.registry import Names, NamespaceRecord, Registry, SessionRecord, digest16
from kvdock.api.pool.sessions import Drain, Sessions
from kvdock.api.record.counters import Counters
from kvdock.api.record.history import History
from kvdock.api.record.timings import Pulse
from kvdock.api.reports.degraded import MEMBERS_HELD, NAMESPACES_HELD, SESSIONS_HELD, Lack, Rounds
from kvdock.api.reports.status import Probes
from kvdock.api.settings import Settings
from kvdock.api.tiers.mover_client import Prefetches
from kvdock.client.client import Client
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import MAX_QUOTAS, Quota
from kvdock.protocol.errors import ApiError

pytestmark = pytest.mark.security

CHUNK_BYTES = 16384
USER = of_user(os.geteuid()).identity

server = fresh_server()


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    one = attach(client)
    yield one
    one.close()


def limit(server: ServerProcess, **quota: int) -> dict[str, Any]:
    """Limits the server's own user; what GET shows of it afterwards."""
    shown: dict[str, Any] = ok(server.http, "PATCH", "/v1/config", {"tenants": {"": quota}})["tenants"][""]
    return shown


def used(server: ServerProcess) -> dict[str, int]:
    amounts: dict[str, int] = ok(server.http, "GET", "/v1/config")["tenants"][""]["used"]
    return amounts


# ------------------------------------------------------------------ sessions, namespaces, grants


def test_one_session_too_many_is_refused_and_who_is_attached_may_attach_again(
    server: ServerProcess, client: Client, engine: Engine
) -> None:
    assert limit(server, sessions=1)["used"]["sessions"] == 1
    with pytest.raises(ApiError) as error:
        attach(client)
    assert (error.value.code, error.value.status, error.value.found, error.value.wanted) == (
        "quota_exceeded", 429, 1, "< 1"
    )
    assert client.attach(engine.body).session == engine.session
    client.leave(engine.session, engine.member)
    attach(client).close()


def test_one_namespace_too_many_is_refused_until_one_is_empty(
    server: ServerProcess, client: Client, engine: Engine
) -> None:
    assert limit(server, namespaces=1)["used"]["namespaces"] == 1
    attach(client).close()  # the same manifest
    with pytest.raises(ApiError, match="as many namespaces as it may have") as error:
        attach(client, model="another")
    assert error.value.code == "quota_exceeded" and used(server)["namespaces"] == 1
    eventually(lambda: len(client.sessions().sessions) == 1)
    client.leave(engine.session, engine.member)
    attach(client, model="another").close()


def test_one_grant_too_many_is_refused_and_a_repeat_of_one_that_is_held_is_not(
    server: ServerProcess, client: Client, engine: Engine
) -> None:
    """The limit is for all sessions of the tenant together."""
    chain, other = keys(2), attach(client)
    engine.store(chain)
    limit(server, grants=2)
    lease = engine.lookup(chain, request="a").lease
    reserved = other.reserve(keys(1, "new"), store="b").reservation
    body = {"session": engine.session, "member": engine.member}
    for path, more in (("/v1/lookups", {"request": "c", "keys": chain}),
                       ("/v1/reservations", {"store": "c", "keys": keys(1, "c")})):
        problem = refused(server.http, "POST", path, {**body, **more})
        assert (problem["code"], problem["status"], problem["found"]) == ("quota_exceeded", 429, 2)
    assert engine.lookup(chain, request="a").lease == lease
    assert other.reserve(keys(1, "new"), store="b").reservation == reserved
    assert engine.release(lease, 0) == [] and used(server)["grants"] == 1
    assert engine.lookup(chain, request="c").lease
    other.close()


def test_a_session_of_before_a_restart_comes_back_also_when_its_tenant_may_have_no_more() -> None:
    with ServerProcess(on_exit="keep") as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(3))
        server.stop(signal.SIGKILL)
        with next_at(server) as second:
            shown = limit(second, sessions=1, namespaces=1)
            assert (shown["used"]["sessions"], shown["used"]["chunks"]) == (1, 3)
            assert client.attach(engine.body).session == engine.session
            with pytest.raises(ApiError, match="quota_exceeded"):
                attach(client)
            engine.close()


def test_a_member_of_before_a_restart_comes_back_also_when_its_tenant_may_have_no_more() -> None:
    with ServerProcess(on_exit="keep") as server, Client(server.unix) as client:
        engine = attach(client)
        server.stop(signal.SIGKILL)
        with next_at(server) as second:
            assert limit(second, members=1)["used"]["members"] == 1
            assert client.attach(engine.body).session == engine.session
            with pytest.raises(ApiError, match="as many members"):
                attach(client, instance=engine.body.instance, ranks=[1], scheduler=False)
            engine.close()


# ------------------------------------------------------------------ bytes and chunks


def test_a_store_beyond_the_quota_is_cut_short_and_counted(server: ServerProcess, engine: Engine) -> None:
    limit(server, chunks=3)
    granted = engine.reserve(keys(5))
    assert (len(granted.chunks), granted.limited_by) == (3, "quota")
    assert engine.client.status().counters["quota_reservations"] == 1


def test_a_lowered_quota_evicts_while_the_server_runs_but_not_what_is_leased(
    server: ServerProcess, engine: Engine
) -> None:
    for index in range(40):
        engine.store(keys(5, f"fill {index}"))
    leased = keys(5, "fill 0")
    lease = engine.lookup(leased).lease
    ok(server.http, "POST", "/v1/pins", {
        "namespace": engine.attached.namespace, "keys": keys(5, "fill 1"), "duration_s": 600,
    })
    shown = limit(server, bytes=10 * CHUNK_BYTES)
    assert shown["quota"] == dict.fromkeys(("chunks", "namespaces", "sessions", "members", "grants")) | {
        "bytes": 10 * CHUNK_BYTES
    }
    eventually(lambda: used(server)["bytes"] == 10 * CHUNK_BYTES)
    assert engine.lookup(keys(5, "fill 1"), request="pinned").hit_tokens == 5 * 16, "what is not pinned went first"
    limit(server, bytes=CHUNK_BYTES)
    time.sleep(0.1)  # rounds of the keeper
    assert used(server)["bytes"] == 10 * CHUNK_BYTES, "all of it is leased"
    assert engine.release(lease, 0) == []
    eventually(lambda: used(server)["bytes"] == 5 * CHUNK_BYTES)
    assert engine.reserve(keys(1, "more")).limited_by == "quota"


@pytest.mark.parametrize(("body", "code"), [
    ({"pool_bytes": 2 * MIB, "tenants": {"a": {"bytes": 1}}}, "bad_argument"),
    ({"tenants": {"a": {"bytes": 1}, "b": {"bytes": -1}}}, "invalid_body"),
    ({"tenants": {"a": {"bytes": 1}, "b": {"byte": 1}}}, "invalid_body"),
    ({"tenants": {"a": {"bytes": 1}, "x" * 65: {}}}, "invalid_body"),
    ({"tenants": {"a": {"bytes": 1}, "A b": {}}}, "invalid_body"),
    ({"tenants": {"a": {"bytes": 1 << 60}}}, "invalid_body"),
    ({"tenants": {"a": {"sessions": (1 << 20) + 1}}}, "invalid_body"),
    ({"tenants": {f"t{number}": {} for number in range(MAX_QUOTAS + 1)}}, "invalid_body"),
])
def test_quotas_that_cannot_be_change_nothing(server: ServerProcess, body: dict[str, Any], code: str) -> None:
    before = ok(server.http, "GET", "/v1/config")
    assert refused(server.http, "PATCH", "/v1/config", body)["code"] == code
    assert ok(server.http, "GET", "/v1/config") == before


def test_the_most_quotas_are_put_and_many_more_are_refused_before_one_is_decoded(server: ServerProcess) -> None:
    counts = dict.fromkeys(("chunks", "namespaces", "sessions", "members", "grants"), 1 << 20)
    largest = {"bytes": (1 << 60) - 1, **counts}
    asked = {f"{number:064}": largest for number in range(3 * MAX_QUOTAS)}
    problem = refused(server.http, "PATCH", "/v1/config", {"tenants": asked})
    assert problem["found"] == "$" and "too many values" in problem["detail"]
    shown = ok(server.http, "PATCH", "/v1/config", {"tenants": dict(list(asked.items())[:MAX_QUOTAS])})["tenants"]
    assert len(shown) == MAX_QUOTAS


def test_only_so_many_tenants_have_a_quota_of_their_own(server: ServerProcess) -> None:
    ok(server.http, "PATCH", "/v1/config", {"tenants": {f"t{number}": {"chunks": 1} for number in range(100)}})
    more = {f"more-{number}": {"chunks": 1} for number in range(MAX_QUOTAS - 99)}
    problem = refused(server.http, "PATCH", "/v1/config", {"tenants": more})
    assert (problem["code"], problem["found"], problem["wanted"]) == ("bad_argument", MAX_QUOTAS + 1, MAX_QUOTAS)
    shown = ok(server.http, "GET", "/v1/config")["tenants"]
    assert len(shown) == 100 and shown["t7"]["quota"]["chunks"] == 1
    gone = {f"t{number}": None for number in range(100)}
    assert "t7" not in ok(server.http, "PATCH", "/v1/config", {"tenants": gone})["tenants"]
    ok(server.http, "PATCH", "/v1/config", {"tenants": more})


# ------------------------------------------------------------------ two tenants


class Shared:
    """A pool and what the server keeps of sessions, without its sockets."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self.pool, self.table = pool, pool.table
        self.registry = Registry(pool.table.first_incarnation, self.pool.secret)
        self.quotas = Quotas(pool.table, default_quota(settings))
        self.sessions = Sessions(
            pool, self.registry, Names(1), self.quotas, Drain(settings, pool, time.monotonic), ServerClock()
        )
        self.locks: list[MemberLiveness] = []

    def attach(self, tenant: str, **more: Any) -> SessionRecord:
        self.locks.append(MemberLiveness(self.pool.lock_path, source=random.Random(len(self.locks))))
        body = s.AttachSession(
            instance=unique("engine"), manifest=manifest(model=f"model of {tenant}", **more),
            member=s.Member(id=unique("m"), ranks=[0], scheduler=True, lock_offset=self.locks[-1].offset),
        )
        return self.sessions.attach(body, tenant, USER)

    def join(self, session: SessionRecord, member: str) -> None:
        """One more process attaches to the session."""
        self.locks.append(MemberLiveness(self.pool.lock_path, source=random.Random(len(self.locks))))
        self.sessions.attach(s.AttachSession(
            instance=session.instance, manifest=session.namespace.manifest,
            member=s.Member(id=member, ranks=[], scheduler=False, lock_offset=self.locks[-1].offset),
        ), session.tenant, USER)

    def namespace(self, tenant: str, number: int) -> int:
        """One that a session is in. Returns the session's member."""
        digest, made = digest16(unique("namespace")) * 2, manifest(layers=1 + number)
        space = self.table.add_namespace(
            digest, chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 16384)], tenant=tenant_id(tenant),
        )
        self.registry.add_namespace(space, digest, made, tenant)
        session = self.table.open_session(digest16(unique("session")), space, 0)
        return self.table.add_member(session, digest16(unique("member")), [0], True, 0)

    def store(self, session: SessionRecord, name: str) -> str:
        """One chunk; what limited the call."""
        member = next(iter(session.members.values()))
        granted = self.table.reserve(
            session.table_id, member.table_id, digest16(unique("store")), b"", bytes.fromhex(keys(1, name)[0]),
            groups=0, temporary=False, deadline_ms=1000, now_ms=0,
        )
        if granted.grant:
            self.table.commit(session.table_id, granted.grant, 0, [(0, 0, 1)], 0)
        return granted.limited


@contextmanager
def shared(**overrides: object) -> Iterator[Shared]:
    settings = Settings.load(small_pool(**overrides))
    pool = open_pool(settings, random.Random(time.time_ns()).getrandbits)
    try:
        asyncio.run(pool.grow_first())
        one = Shared(pool, settings)
        yield one
        for lock in one.locks:
            lock.close()
    finally:
        pool.close()


def test_a_tenant_that_fills_its_quota_leaves_the_others_alone() -> None:
    with shared(tenant_bytes="128KiB", tenant_sessions=2, tenant_namespaces=1) as pool:
        pool.quotas.put("team-b", Quota(chunks=20))
        a, b, own = (pool.attach(tenant) for tenant in ("team-a", "team-b", ""))
        for number in range(16):
            assert pool.store(b, f"b{number}") == pool.store(own, f"own{number}") == ""
        for number in range(64):
            assert pool.store(a, f"a{number}") == ""
        views = asyncio.run(pool.quotas.views())
        assert {name: view.used.chunks for name, view in views.items()} == {"team-a": 8, "team-b": 16, "": 16}
        assert [views[name].quota.bytes for name in ("team-a", "team-b", "")] == [128 << 10, None, None]
        assert a.tenant == "team-a"
        with pytest.raises(ApiError, match="as many namespaces"):
            pool.attach("team-a", layers=3)
        pool.attach("team-a")
        with pytest.raises(ApiError, match="as many sessions"):
            pool.attach("team-a")
        pool.attach("team-b")
        pool.attach("team-b")
        pool.table.check_integrity()


def probes_of(pool: Shared) -> Probes:
    history = History(10, 1.0, kept=None)
    return Probes(
        Settings.load(small_pool()), pool.sessions, Pulse(time.perf_counter_ns), history, lambda: 1_764_000_000.0
    )


def told(probes: Probes, peer: Peer) -> list[tuple[str, str]]:
    """What is degraded, with who has most of it, after a round."""
    asyncio.run(probes.rounds.look())
    return [(one.reason, one.most) for one in probes.rounds.told(probes.lacks(), peer)]


OWN_USER = of_user(os.geteuid())
ANOTHER = Peer("a reader", frozenset({"read"}), "team-c", is_unix=False)


def test_a_server_without_room_for_members_says_so_and_which_tenant_has_most() -> None:
    with shared() as pool:
        one, _ = pool.attach("team-a"), pool.attach("team-b")
        probes = probes_of(pool)
        assert told(probes, OWN_USER) == []
        for number in range(MAX_MEMBERS - 2):
            if number % MAX_SESSION_MEMBERS == 0:
                session = pool.table.open_session(digest16(unique("session")), one.namespace.table_id, 0)
            pool.table.add_member(session, digest16(unique("member")), [], False, 0)
        assert probes.ready().reasons == [MEMBERS_HELD]
        assert told(probes, OWN_USER) == [(MEMBERS_HELD, f"most are of tenant team-a: {MAX_MEMBERS - 1} members")]
        assert told(probes, ANOTHER) == [(MEMBERS_HELD, "")]


def test_a_server_without_room_for_sessions_says_so_and_which_tenant_has_most() -> None:
    with shared() as pool:
        one, _ = pool.attach("team-a"), pool.attach("team-b")
        probes = probes_of(pool)
        for _ in range(MAX_SESSIONS - 2):
            assert probes.ready().reasons == []
            pool.table.open_session(digest16(unique("session")), one.namespace.table_id, 0)
        assert probes.ready().reasons == [SESSIONS_HELD]
        assert told(probes, OWN_USER) == [(SESSIONS_HELD, f"most are of tenant team-a: {MAX_SESSIONS - 1} sessions")]
        assert told(probes, ANOTHER) == [(SESSIONS_HELD, "")]


def test_a_server_without_room_for_namespaces_says_so_and_which_tenant_has_most() -> None:
    with shared() as pool:
        probes = probes_of(pool)
        members = [pool.namespace(f"team-{'ab'[number % 2]}", number) for number in range(MAX_NAMESPACES - 1)]
        assert told(probes, OWN_USER) == []
        members.append(pool.namespace("team-b", MAX_NAMESPACES))
        pool.table.leave(members[0])
        pool.registry.drop_idle_namespaces(pool.table)  # as the keeper does
        assert told(probes, OWN_USER) == []
        pool.namespace("team-b", 0)
        assert told(probes, OWN_USER) == [(NAMESPACES_HELD, "most are of tenant team-b: 513 namespaces")]
        assert told(probes, ANOTHER) == [(NAMESPACES_HELD, "")]
        assert probes.ready().status == "ok", "engines that are attached go on"


def test_what_is_degraded_has_the_time_at_which_it_began(caplog: pytest.LogCaptureFixture) -> None:
    """And the log gets it once, also if others come and go meanwhile."""
    lacks, now = [Lack("a", "1")], {"s": 100.0}
    rounds = Rounds(lambda: lacks, lambda: now["s"])
    caplog.set_level(logging.INFO, "kvdock.api")

    def since() -> dict[str, float]:
        asyncio.run(rounds.look())
        now["s"] += 10
        return {one.reason: one.since for one in rounds.told(lacks, OWN_USER)}

    assert since() == {"a: 1": 100.0}
    lacks[:] = [Lack("a", "2"), Lack("b", is_logged=False)]
    assert since() == {"a: 2": 100.0, "b": 110.0}
    lacks[:] = [Lack("b", is_logged=False)]
    assert since() == {"b": 110.0}
    lacks[:] = [Lack("a", "3")]
    assert since() == {"a: 3": 130.0}
    assert caplog.messages == ["a: 1", "this is over: a", "a: 3"]


def test_a_tenant_has_half_of_all_prefetches_so_that_others_may_have_some() -> None:
    with shared() as pool:
        own, a, b = (pool.attach(tenant).namespace for tenant in ("", "team-a", "team-b"))
        prefetches = Prefetches(pool.pool, Counters(), lambda space, all_keys, index: "", time.monotonic)

        def asked(space: NamespaceRecord) -> str:
            return prefetches.start(space, bytes.fromhex(keys(1)[0]), 3600.0, 10.0).why

        assert [asked(a) for _ in range(129)] == ["later"] * 128 + ["limited"]
        assert [asked(own) for _ in range(120)] == ["later"] * 120
        assert [asked(b) for _ in range(9)] == ["later"] * 8 + ["limited"]


def test_members_of_all_its_sessions_count_for_a_tenant_until_they_leave() -> None:
    with shared(tenant_members=3) as pool:
        a, second = pool.attach("team-a"), pool.attach("team-a")
        pool.join(a, "third")
        for _ in range(2):
            with pytest.raises(ApiError, match="as many members") as refused:
                pool.join(a, "fourth")
            assert (refused.value.code, refused.value.found, refused.value.wanted) == ("quota_exceeded", 3, "< 3")
        with pytest.raises(ApiError, match="as many members"):
            pool.attach("team-a")
        assert pool.registry.sessions() == [a, second], "a refused attach opens no session"
        pool.attach("team-b")
        third = a.members["third"]
        pool.registry.drop_member(a, third)
        pool.table.leave(third.table_id)
        pool.join(a, "fourth")
        views = asyncio.run(pool.quotas.views())
        assert (views["team-a"].used.members, views["team-a"].quota.members) == (3, 3)
        pool.table.check_integrity()


@pytest.mark.security
def test_no_tenant_can_keep_all_grants_sessions_or_namespaces_from_others() -> None:
    """By default: what it has may last for ever, as long as its engines live."""
    assert default_quota(Settings.load({})) == Quota(namespaces=512, sessions=8192, members=32768, grants=4096)
    assert default_quota(Settings.load({"tenant_grants": 7000, "table_grants": 8192})).grants == 7000
    with shared(table_grants=16) as pool:
        a, own = pool.attach("team-a"), pool.attach("")
        member = next(iter(a.members.values()))
        for number in range(8):
            assert pool.quotas.grants_refusal(a) is None
            pool.table.reserve(
                a.table_id, member.table_id, bytes([number]) * 16, b"", bytes.fromhex(keys(1, f"a{number}")[0]),
                groups=0, temporary=False, deadline_ms=1000, now_ms=0,
            )
        refusal = pool.quotas.grants_refusal(a)
        assert refusal is not None and (refusal.code, refusal.found, refusal.wanted) == ("quota_exceeded", 8, "< 8")
        assert pool.store(own, "own") == ""


def test_a_tenants_grants_are_counted_over_its_sessions_alone() -> None:
    with shared(tenant_grants=1) as pool:
        a, second, b = pool.attach("team-a"), pool.attach("team-a"), pool.attach("team-b")
        member = next(iter(a.members.values()))
        pool.table.reserve(
            a.table_id, member.table_id, bytes(16), b"", bytes.fromhex(keys(1)[0]), groups=0, temporary=False,
            deadline_ms=1000, now_ms=0,
        )
        refusals = [pool.quotas.grants_refusal(session) for session in (a, second, b)]
        assert [refusal and refusal.code for refusal in refusals] == ["quota_exceeded", "quota_exceeded", None]


def quotas_of(server: ServerProcess) -> dict[str, dict[str, int | None]]:
    """Those that limit bytes or chunks, by tenant: what they limit."""
    shown = ok(server.http, "GET", "/v1/config")["tenants"]
    limits = {name: {key: view["quota"][key] for key in ("bytes", "chunks")} for name, view in shown.items()}
    return {name: limit for name, limit in limits.items() if limit != {"bytes": None, "chunks": None}}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_quotas_by_calls_are_there_after_a_restart(tmp_path: Path, end: int) -> None:
    """Those of the access file, too, unless the file says otherwise by then."""
    def of_file(name: str, chunks: int) -> str:
        return entry(name, f"{name}-" + "t" * 40, ["engine"], name) + f"caps = {{chunks = {chunks}}}\n"

    path = access_file(tmp_path, of_file("file", 5), of_file("both", 6), of_file("changed", 7), of_file("gone", 8))
    settings = {"access_file": str(path), "socket_path": str(tmp_path / "kvdock.sock"), "on_exit": "keep"}
    with ServerProcess(**settings) as first:
        asked = {"call": {"bytes": "1MiB"}, "both": {"chunks": 60}, "changed": {"chunks": 70}, "": {"bytes": 9 << 20}}
        ok(first.http, "PATCH", "/v1/config", {"tenants": asked})
        wanted = quotas_of(first)
        assert wanted["call"] == {"bytes": MIB, "chunks": None} and wanted["both"]["chunks"] == 60
        kept = kept_of(first.pool_id, "history")
        assert b'"call"' in kept.read_bytes(), "it is written before the call is answered"
        first.stop(end)
    access_file(tmp_path, of_file("file", 5), of_file("both", 6), of_file("changed", 71))
    with ServerProcess(**settings) as second, Client(second.unix) as client:
        found = quotas_of(second)
        assert found.pop("changed")["chunks"] == 71, "the file has changed meanwhile"
        assert wanted.pop("gone") and wanted.pop("changed") and found == wanted
        engine = attach(client)
        engine.store(keys(600))
        assert used(second)["bytes"] <= 9 << 20, "it is shown, and not in force"
        engine.close()
        ok(second.http, "PATCH", "/v1/config", {"tenants": {"both": None, "call": None}})
        second.stop()
    with ServerProcess(**{**settings, "on_exit": "remove"}) as third:
        found = quotas_of(third)
        assert found["both"]["chunks"] == 6 and "call" not in found, "what was given back comes back"


@pytest.mark.parametrize(("text", "wanted"), [
    ("8GiB", 8 << 30), ("64M", 64 << 20), ("1.5GB", 1_500_000_000), ("50%", 8 << 20), (4096, 4096), ("4096", 4096),
])
def test_a_call_takes_bytes_as_people_write_them(server: ServerProcess, text: str | int, wanted: int) -> None:
    shown = ok(server.http, "PATCH", "/v1/config", {"tenants": {"a": {"bytes": text}}})["tenants"]["a"]
    assert shown["quota"]["bytes"] == wanted


@pytest.mark.parametrize("text", ["8 gigs", "200%", "0%", "9999999TiB", "", -1, "auto", 1.5])
def test_a_call_with_other_bytes_changes_nothing(server: ServerProcess, text: str | float) -> None:
    before = ok(server.http, "GET", "/v1/config")["limits"]
    body = {"session_grants": 7, "tenants": {"a": {"bytes": text}}}
    assert call(server.http, "PATCH", "/v1/config", body)[1]["code"] in ("bad_argument", "invalid_body")
    after = ok(server.http, "GET", "/v1/config")
    assert after["limits"] == before and "a" not in after["tenants"]


def test_a_tenant_that_has_not_come_back_is_shown_by_its_id() -> None:
    with shared() as pool:
        session = pool.attach("team-a")
        pool.store(session, "kept")
        fresh = Quotas(pool.table, Quota(chunks=9))
        shown = asyncio.run(fresh.views())
        assert (shown[tenant_id("team-a").hex()].used.chunks, shown[tenant_id("team-a").hex()].quota.chunks) == (1, 9)
        fresh.put("team-a", Quota(chunks=5))
        assert asyncio.run(fresh.views())["team-a"].quota.chunks == 5
