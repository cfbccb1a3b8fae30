"""Whole attacks of a user of the machine, over TCP and without a token, on a server that an engine uses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_helpers import (
    NOBODYS,
    Engine,
    ServerProcess,
    access_file,
    attach,
    eventually,
    http_connection,
    kept_of,
    keys,
    raw,
)

from kvdock._core import Mapping
from kvdock.api.access.access_file import entry
from kvdock.api.clock import boot_s
from kvdock.api.errors import SettingsError
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.pool.lock import PoolLock, left_pools
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Heartbeat, Lookup
from kvdock.shm.objects import Kept

pytestmark = pytest.mark.security

PROMPT = list(range(1000, 1064))


@pytest.fixture
def victim(client: Client) -> Iterator[Engine]:
    attached = attach(client, label="victim", cache_salt="a-salt", hash_seed="a-seed")
    yield attached
    attached.leave()


def nobodys(server: ServerProcess, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """One call without a token over TCP."""
    sent = None if body is None else msgspec.json.encode(body)
    status, _, content = raw(server.http, method, path, sent, {**NOBODYS, "Content-Type": "application/json"})
    return status, json.loads(content)


def test_nobody_stores_zeros_in_another_engines_name(server: ServerProcess, victim: Engine) -> None:
    """Even with ids that it could not have read: they are no proof over TCP."""
    for session in (victim.session, victim.listed):
        body = {"session": session, "member": victim.member, "store": "poison", "tokens": PROMPT}
        assert nobodys(server, "POST", "/v1/reservations", body)[0] == 401
    granted = victim.reserve(keys(1, "under way"))
    parts: dict[str, Any] = {"session": victim.session, "rank": 0, "parts": [[0, 0, "1cb23b2f069b1082"]]}
    for verb, sent in (("commit", parts), ("abort", {"session": victim.session})):
        assert nobodys(server, "POST", f"/v1/reservations/{granted.reservation}/{verb}", sent)[0] == 401
    assert victim.client.lookup(Lookup(namespace=victim.attached.namespace, tokens=PROMPT)).hit_tokens == 0
    assert victim.commit(granted).ready == 1, "its own commit still counts"


def test_nobody_takes_the_cache_the_session_or_the_settings_away(server: ServerProcess, victim: Engine) -> None:
    victim.store(keys(2, "mine"))
    for method, path, body in (
        ("POST", "/v1/cache/clear", {}), ("POST", "/v1/cache/evict", {"free_bytes": 1 << 20}),
        ("PATCH", "/v1/config", {"session_grants": 1}),
        ("DELETE", f"/v1/sessions/{victim.session}", None),
        ("POST", f"/v1/sessions/{victim.session}/heartbeat", {"member": victim.member}),
        ("POST", "/v1/chunks/delete", {"namespace": victim.attached.namespace, "keys": keys(2, "mine")}),
    ):
        assert nobodys(server, method, path, body)[0] == 401, path
    assert victim.lookup(keys(2, "mine"), request="after").hit_tokens == 32


def test_nobody_reads_who_is_there_or_what_a_prompt_has_stored(server: ServerProcess, victim: Engine) -> None:
    namespace = victim.attached.namespace
    answers = [
        nobodys(server, "GET", f"/v1/{name}")
        for name in ("sessions", "namespaces", "segments", "leases", "requests", "config", f"sessions/{victim.listed}")
    ]
    answers.append(nobodys(server, "POST", "/v1/lookups", {"namespace": namespace, "tokens": PROMPT}))
    assert {status for status, _ in answers} == {401}
    shown = str(answers) + str(nobodys(server, "GET", "/v1/status")) + str(nobodys(server, "GET", "/v1/stats"))
    shown += raw(server.http, "GET", "/metrics", None, NOBODYS)[2].decode()
    for secret in ("victim", victim.body.instance, victim.member, namespace, "a-salt", "a-seed", victim.session):
        assert secret not in shown


# --------------------------------------------------------------------------- what is learned is of no use

SAME_TENANT = "kvd_" + "s" * 43


def test_no_error_and_no_log_has_a_sessions_secret(server: ServerProcess, victim: Engine) -> None:
    secret = victim.session.rpartition("-")[2]
    with pytest.raises(ApiError) as refused:
        victim.client.heartbeat(f"0{victim.session}", Heartbeat(member=victim.member))
    assert refused.value.found == f"0{victim.listed}"
    status, _, content = raw(server.unix, "DELETE", f"/v1/sessions/0{victim.session}")
    assert status == 404 and secret.encode() not in content
    assert secret not in str(refused.value)
    assert secret not in server.log_text()


ANOTHER = "kvd_" + "t" * 43
ALL_SCOPES = "kvd_" + "u" * 43


@contextmanager
def tokens_of_one_tenant(folder: Path, tenant: str) -> Iterator[ServerProcess]:
    file = access_file(
        folder, entry("other", SAME_TENANT, ["engine"], tenant), entry("another", ANOTHER, ["engine"], tenant),
        entry("all", ALL_SCOPES, ["engine", "admin"], tenant),
    )
    with ServerProcess(access_file=str(file)) as server:
        yield server


def test_a_session_is_of_no_use_to_another_token_of_its_tenant(tmp_path: Path) -> None:
    """Its id may have been learned from a proxy's log or a core dump."""
    with tokens_of_one_tenant(tmp_path, "") as server, Client(server.unix) as own, closing(attach(own)) as engine:
        stolen: dict[str, Any] = {"session": engine.session, "member": engine.member}
        for path, body in (
            ("/v1/lookups", {**stolen, "request": "r", "keys": keys(1)}),
            ("/v1/reservations", {**stolen, "store": "s", "keys": keys(1)}),
            (f"/v1/sessions/{engine.session}/heartbeat", {"member": engine.member}),
        ):
            status, _, content = raw(
                server.http, "POST", path, msgspec.json.encode(body),
                {"Authorization": f"Bearer {SAME_TENANT}", "Content-Type": "application/json"},
            )
            assert (status, json.loads(content)["code"]) == (404, "unknown_session"), path
        with Client(server.http, access_token=SAME_TENANT) as thief, pytest.raises(ApiError, match="foreign_session"):
            attach(thief, instance=engine.body.instance, ranks=[1], scheduler=False)
        engine.store(keys(1))
        assert engine.lookup(keys(1)).hit_tokens == 16, "its own calls still count"


def test_a_session_is_shared_by_all_processes_of_its_token_and_by_operators(tmp_path: Path) -> None:
    """Workers of one engine attach over either socket; a token with all scopes stands for its whole tenant."""
    two: dict[str, Any] = {"tensor_parallel": 2, "writers": 2}
    with (
        tokens_of_one_tenant(tmp_path, "team") as server,
        Client(server.unix, access_token=SAME_TENANT) as first, Client(server.http, access_token=SAME_TENANT) as second,
        Client(server.http, access_token=ALL_SCOPES) as operator, Client(server.unix) as own,
        closing(attach(first, **two)) as engine,
        closing(attach(second, instance=engine.body.instance, ranks=[1], scheduler=False, **two)) as worker,
    ):
        assert worker.session == engine.session
        for client, member in ((second, engine.member), (first, worker.member), (operator, engine.member)):
            client.heartbeat(engine.session, Heartbeat(member=member))
        with pytest.raises(ApiError, match="unknown_session"):
            own.heartbeat(engine.session, Heartbeat(member=engine.member))


@pytest.mark.parametrize("way", ["unix", "http"])
def test_a_session_is_of_no_use_by_a_way_by_which_no_member_of_it_came(tmp_path: Path, way: str) -> None:
    """Not even to its own token: whoever learns the id elsewhere does not have the memory."""
    other_way = {"unix": "http", "http": "unix"}[way]
    with (
        tokens_of_one_tenant(tmp_path, "") as server,
        Client(getattr(server, way), access_token=SAME_TENANT) as client, closing(attach(client)) as engine,
    ):
        engine.store(keys(1))
        with Client(getattr(server, other_way), access_token=SAME_TENANT) as thief:
            stolen = Engine(thief, engine.attached, engine.member, engine.liveness, engine.body)
            calls: list[Callable[[], object]] = [
                partial(stolen.lookup, keys(1), request="stolen"), stolen.heartbeat, stolen.leave,
                partial(stolen.reserve, keys(1, "planted")), partial(stolen.release, "0" * 16, 0),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(ApiError, match="unknown_session"):
                    call()
        assert engine.lookup(keys(1)).hit_tokens == 16, "its own calls still count"


def test_an_engine_that_was_started_anew_may_have_got_another_token(tmp_path: Path) -> None:
    with (
        tokens_of_one_tenant(tmp_path, "team") as server,
        Client(server.unix, access_token=SAME_TENANT) as before, Client(server.unix, access_token=ANOTHER) as after,
    ):
        engine = attach(before)
        with pytest.raises(ApiError, match="foreign_session"):
            attach(after, instance=engine.body.instance, ranks=[1], scheduler=False)
        engine.close()  # its lock is free from now on
        eventually(lambda: joins(after, engine.body.instance))
        with pytest.raises(ApiError, match="unknown_session"):
            before.heartbeat(engine.session, Heartbeat(member=engine.member))


def joins(client: Client, instance: str) -> bool:
    try:
        again = attach(client, instance=instance, ranks=[1], scheduler=False)
    except ApiError as error:
        assert error.code in ("foreign_session", "rank_taken"), error
        return False
    client.heartbeat(again.session, Heartbeat(member=again.member))
    again.close()
    return True


@pytest.mark.parametrize(("path", "told"), [("/v1/events", b"event: committed"), ("/v1/kv-events", b"BlockStored")])
def test_a_stream_ends_when_its_token_does(path: str, told: bytes, tmp_path: Path) -> None:
    """`told`: what the stream says of each store."""
    file = access_file(tmp_path, entry("reader", SAME_TENANT, ["engine"], ""))
    with (
        ServerProcess(access_file=str(file), observe="stream,kv_events", watch_s=0.05) as server,
        Client(server.unix) as own, closing(attach(own)) as engine,
        closing(http_connection(server.http)) as stream,
    ):
        stream.request("GET", f"{path}?follow=true", headers={"Authorization": f"Bearer {SAME_TENANT}"})
        answer = stream.getresponse()
        assert answer.status == 200
        engine.store(keys(1, "before"))
        while told not in answer.readline():
            pass
        access_file(tmp_path)  # without the reader
        eventually(lambda: not is_known(server, SAME_TENANT))
        engine.store(keys(1, "afterwards"))
        left = answer.read()  # to its end
        assert told not in left


def is_known(server: ServerProcess, token: str) -> bool:
    return raw(server.http, "GET", "/v1/whoami", None, {"Authorization": f"Bearer {token}"})[0] == 200


@pytest.mark.parametrize("last", ["9" * 5000, "1-" + "9" * 5000, "-1", "1-²", ""])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/kv-events"])
def test_a_last_event_id_that_nobody_gave_is_no_fault_of_the_server(path: str, last: str) -> None:
    with ServerProcess(observe="stream,kv_events") as server:
        status, _, content = raw(server.unix, "GET", path, None, {"Last-Event-ID": last})
        assert (status == 200 and content.startswith(b"retry")) or b"another_server" in content
        assert "Traceback" not in server.log_text()


def test_a_speed_of_next_to_nothing_makes_no_figure_infinite(client: Client, victim: Engine) -> None:
    outcome = Outcome(
        request="slow", number=1, prompt_tokens=64, loaded_tokens=32, found_tokens=32, load_us=1,
        prefill_tokens_per_s=5e-324,
    )
    client.heartbeat(victim.session, Heartbeat(member=victim.member, outcomes=[outcome]))
    assert client.status().hits.saved_s is None, "it is not known"


# --------------------------------------------------------------------------- shared memory


def test_no_core_dump_has_the_pool() -> None:
    fd = os.memfd_create("kvdock-test")
    os.ftruncate(fd, 1 << 20)
    mapping = Mapping(fd, 1 << 20)
    start = next(line for line in Path("/proc/self/smaps").read_text().splitlines() if "kvdock-test" in line)
    flags = Path("/proc/self/smaps").read_text().partition(start)[2].partition("VmFlags:")[2].splitlines()[0].split()
    assert {"dd", "dc"} <= set(flags), "neither dumped nor inherited"
    mapping.close()
    os.close(fd)


def test_another_users_files_of_guessed_names_stop_no_orderly_end() -> None:
    with ServerProcess(on_exit="remove", history_interval_s=0.05) as server:
        guessed = [Path(f"/dev/shm/kvdock-{server.pool_id:016x}-{what}{end}")
                   for what in ("history", "curve") for end in ("", ".new")]  # fmt: skip
        for path in guessed:
            path.touch(mode=0o666)
            path.chmod(0o666)  # as if it were another's: it is not this user's alone
        try:
            assert server.stop(signal.SIGTERM) == 0
            assert "Traceback" not in server.log_text()
            assert all(path.exists() for path in guessed)
        finally:
            for path in guessed:
                path.unlink(missing_ok=True)


def test_the_names_of_later_objects_cannot_be_guessed() -> None:
    with ServerProcess(on_exit="keep") as first, ServerProcess(on_exit="keep") as second:
        for server in (first, second):
            server.stop(signal.SIGTERM)
        names = [kept_of(server.pool_id, "curve").name.rpartition("-")[2] for server in (first, second)]
        assert len(set(names)) == 2 and all(len(name) == 16 for name in names)
        kinds: list[Kept] = ["history", "curve", "crash"]
        kept = {kept_of(first.pool_id, kind).name.rpartition("-")[2] for kind in kinds}
        assert len(kept) == 3, "who sees one object does not know the names of the others"
        for server in (first, second):
            with ServerProcess(**{**server.settings, "on_exit": "remove"}):
                pass


def test_what_is_kept_is_written_under_a_name_that_nobody_has_taken_before(tmp_path: Path) -> None:
    """Whoever sees the object's name knows what stands beside it, and an object of another user cannot be removed."""
    kept = KeptObject(tmp_path / "kvdock-history", "the history")
    kept.write(b"first")
    (tmp_path / "kvdock-history.new").mkdir()
    kept.write(b"second")
    assert kept.failure == "" and bytes(kept.read()) == b"second"
    assert {path.name for path in tmp_path.iterdir()} == {"kvdock-history", "kvdock-history.new"}


def test_a_step_of_the_wall_clock_makes_no_pool_old(tmp_path: Path) -> None:
    """The age of a pool is measured by the time since boot, which nobody can set."""
    lock = PoolLock.create(77, tmp_path)
    lock.touch()
    assert os.fstat(lock.fd).st_mtime == pytest.approx(boot_s(), abs=5)
    lock.close(unlink=False)
    (left,) = left_pools(tmp_path)
    assert 0 <= left.idle_s < 5
    os.utime(lock.path, (boot_s() - 700, boot_s() - 700))
    assert 699 < left_pools(tmp_path)[0].idle_s < 705


def test_no_password_is_taken_in_the_address_of_the_collector() -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.load({"observe": "traces", "traces_endpoint": "http://me:hunter2@collector:4318"})
    assert "hunter2" not in str(refused.value) and "without user name and password" in str(refused.value)
