"""Attacks that once succeeded, each against a real server, with other cases of its kind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from admin_helpers import DOCUMENT
from adoption_helpers import next_at
from api_helpers import (
    OPERATOR,
    ServerProcess,
    access_file,
    attach,
    eventually,
    http_connection,
    keys,
    manifest,
    raw,
    small_pool,
    unique,
)
from cli_helpers import KVDOCK, clean_environ, kvdock, refusal
from connector_helpers import mortal
from flood_helpers import until_closed
from mover_steps import movers_of
from otlp_collector import Collector

from kvdock.api.access.access_file import AccessFile, entry
from kvdock.api.access.peer import of_user
from kvdock.api.build import Parts, build
from kvdock.api.clock import Clocks
from kvdock.api.pool.pool import open_pool
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.connectors.session import EngineSession, Identity
from kvdock.datapath.segments import AttachedSegments
from kvdock.protocol.errors import ApiError
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.reports import Mark
from kvdock.shm.objects import lock_path
from kvdock.shm.segment import SegmentInfo

pytestmark = pytest.mark.security

READS = (
    "/", "/docs", "/openapi.json", "/metrics", "/livez", "/readyz", "/v1/status", "/v1/stats", "/v1/sessions",
    "/v1/requests", "/v1/namespaces", "/v1/segments", "/v1/config", "/v1/verdict", "/v1/hits", "/v1/prefixes",
    "/v1/curve", "/v1/leases", "/v1/whoami", "/v1/events?follow=false", "/v1/kv-events",
)
SCHEMAS = DOCUMENT["components"]["schemas"]
JSON = {"Content-Type": "application/json"}
TEAM = "kvd_" + "t" * 43


def test_an_engine_that_loses_its_server_logs_no_sessions_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does the server, at its most talkative."""
    caplog.set_level(logging.DEBUG)
    with mortal(heartbeat_s=0.05, log_level="debug") as server, Client(server.unix) as client:
        session = EngineSession(client, manifest(), Identity(unique("instance"), unique("member")))
        session.start()
        first = session.attachment
        assert first is not None
        server.stop(signal.SIGKILL)
        with next_at(server, adopt="never") as second, Client(second.unix) as other:  # it knows no session of before
            eventually(lambda: session.attachment not in (None, first))
            assert session.attachment is not None
            secrets = [one.session.rpartition("-")[2] for one in (first, session.attachment)]
            with pytest.raises(ApiError) as refused:
                other.leave(first.session, first.member)
            session.close()
            said = caplog.text + server.log_text() + second.log_text() + str(refused.value)
    assert "kvdock" in said and len(secrets[0]) == 32
    assert [secret for secret in secrets if secret in said] == []


def test_a_tenant_that_keeps_all_the_leases_it_can_get_stops_nobody(tmp_path: Path) -> None:
    file = access_file(tmp_path, entry("team", TEAM, ["engine"], "team"))
    with (
        ServerProcess(access_file=str(file), table_grants=64) as server,
        Client(server.unix) as own, closing(attach(own)) as honest,
        Client(server.unix, access_token=TEAM) as theirs,
        closing(attach(theirs)) as first, closing(attach(theirs)) as second,
    ):
        honest.store(keys(2, "own"))
        first.store(keys(1, "theirs"))
        held = 0
        for number in range(64):
            hog = (first, second)[number % 2]
            try:
                held += hog.lookup(keys(1, "theirs"), request=f"r{number}").lease is not None
            except ApiError as error:
                assert error.code == "quota_exceeded", error
        assert held == 32, "half of all"
        assert honest.lookup(keys(2, "own")).hit_tokens == 32
        assert honest.store(keys(2, "more")).reservation


@pytest.mark.parametrize("age_s", [600, 86_400, -86_400])
def test_a_step_of_the_clock_loses_no_pool_to_a_server_elsewhere(age_s: int) -> None:
    with mortal(on_exit="keep") as server:
        server.stop(signal.SIGKILL)
        touched_s = time.time() - age_s
        os.utime(lock_path(server.pool_id), (touched_s, touched_s))
        with ServerProcess(watch_s=0.01) as elsewhere, Client(elsewhere.unix) as client, closing(attach(client)) as one:
            one.store(keys(1))
            assert server.pool_memory()
        with next_at(server) as again:
            assert again.pool_id == server.pool_id


def dumped(pid: int, name: str) -> list[str]:
    """The mappings of a process whose object has the name, and that a core dump would have."""
    found, shown = list[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("VmFlags:") and name in shown:
            found += [] if "dd" in line.split() else [shown]
            shown = ""
        elif "-" in line.partition(" ")[0]:
            shown = line
    return found


def core_limit(pid: int) -> str:
    """In bytes, as the kernel shows it."""
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[4] for line in limits if line.startswith("Max core file size"))


def mappings(pid: int, name: str) -> int:
    return sum(name in line for line in Path(f"/proc/{pid}/smaps").read_text().splitlines())


def test_no_core_dump_of_a_server_or_an_engine_has_the_pool() -> None:
    """Neither while the pool has its names nor afterwards, when the kernel counts it as anonymous memory."""
    with ServerProcess() as server, Client(server.unix) as client, closing(attach(client)) as engine:
        name = f"kvdock-{server.pool_id:016x}-"
        segments = AttachedSegments(server.pool_id)
        for one in engine.attached.segments:
            segments.attach(SegmentInfo(one.id, one.name, one.bytes, one.data_offset))
        for pid in (server.process.pid, os.getpid()):
            assert mappings(pid, name) and dumped(pid, name) == []
        lock = f"kvdock-{server.pool_id:016x}.lock"
        assert mappings(os.getpid(), lock) and dumped(os.getpid(), lock) == [], "its page has the pool's secret"
        server.stop()
        assert mappings(os.getpid(), f"{name}0000") and "(deleted)" in Path("/proc/self/smaps").read_text()
        assert dumped(os.getpid(), name) == dumped(os.getpid(), lock) == []


def test_a_server_that_crashes_dumps_nothing_whatever_the_limit_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory has what only callers may know: ids of sessions, and tokens. A limit of 0 stops no dump to a
    program."""
    unlimited = partial(resource.setrlimit, resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(ServerProcess, "before", staticmethod(unlimited))
    with mortal() as server:
        assert core_limit(server.process.pid) == "1"
        assert server.stop(signal.SIGABRT) == -signal.SIGABRT
        assert not [*Path.cwd().glob("core*"), *Path("/").glob("core*")]


def test_neither_a_mover_nor_a_command_dumps_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have access tokens and ids of sessions, too."""
    unlimited = partial(resource.setrlimit, resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(ServerProcess, "before", staticmethod(unlimited))
    with mortal(disk_path=str(tmp_path / "tier"), disk_bytes=1 << 24) as server:
        eventually(lambda: len(movers_of(server.process.pid)) == 1)
        (mover,) = movers_of(server.process.pid)
        assert core_limit(mover.pid) == "1"
        command = [*KVDOCK, "events", "--follow", "--server", server.unix]
        with subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, preexec_fn=unlimited) as process:
            try:
                eventually(lambda: core_limit(process.pid) == "1")
            finally:
                process.send_signal(signal.SIGABRT)
            assert process.wait() == -signal.SIGABRT
        assert not [*Path.cwd().glob("core*"), *Path("/").glob("core*")]


def test_where_the_limit_of_core_dumps_cannot_be_raised_a_dump_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hard limit of 0, a program that `core_pattern` names still gets the dump."""
    forbidden = partial(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))
    monkeypatch.setattr(ServerProcess, "before", staticmethod(forbidden))
    with mortal() as server:
        assert core_limit(server.process.pid) == "0"
        assert int(Path(f"/proc/{server.process.pid}/coredump_filter").read_text(), 16) == 0


PASSWORD = "hunter2-hunter2"


@pytest.mark.parametrize("flags", [
    ["--host", "0.0.0.0"],
    ["--host", "::"],
    ["--host", "0.0.0.0", "--access-file", "/nowhere", "--allowed-hosts", ""],
    ["--observe", "kv_events", "--kv-events-endpoint", "tcp://0.0.0.0:5557"],
    ["--observe", "kv_events", "--kv-events-endpoint", "tcp://*:5557"],
    ["--observe", "kv_events", "--kv-events-endpoint", "tcp://[::]:5557"],
    ["--observe", "kv_events", "--kv-events-endpoint", "tcp://127.0.0.1:1", "--kv-events-replay-endpoint", "tcp://*:2"],
    ["--observe", "traces", "--traces-endpoint", f"http://me:{PASSWORD}@127.0.0.1:9"],
    ["--observe", "traces", "--traces-endpoint", f"http://{PASSWORD}@127.0.0.1:9"],
    ["--observe", "traces", "--traces-endpoint", f"http://:{PASSWORD}@127.0.0.1:9"],
    ["--redis-url", f"redis://me:{PASSWORD}@127.0.0.1:9"],
    ["--redis-url", f"redis://:{PASSWORD}@127.0.0.1:9"],
    ["--redis-url", f"redis://127.0.0.1:9/0?password={PASSWORD}"],
    ["--objects-url", f"s3://{PASSWORD}:key@bucket/prefix"],
    ["--objects-url", f"s3://bucket/prefix?secret_access_key={PASSWORD}"],
    ["--objects-url", f"https://me:{PASSWORD}@127.0.0.1:9/prefix"],
    ["--mooncake-url", f"mooncake://me:{PASSWORD}@127.0.0.1:9"],
], ids=lambda flags: " ".join(flags).replace(PASSWORD, "PASSWORD"))
def test_a_start_that_strangers_could_use_is_refused_in_a_sentence(tmp_path: Path, flags: list[str]) -> None:
    """Without the password that was in it: the sentence is in logs."""
    done = kvdock("serve", "--port", "0", "--pool-bytes", "16MiB", "--socket-path", f"{tmp_path}/kvdock.sock", *flags)
    assert done.returncode in (1, 2)
    assert PASSWORD not in refusal(done, done.returncode)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(host="127.0.0.1") as running:
        yield running
        assert "Traceback" not in running.log_text()


def status_of(server: ServerProcess, path: str, **headers: str) -> int:
    connection = http_connection(server.http)
    connection.putrequest("GET", path, skip_host="host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value.encode())
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("host", [
    "rebind.test", "127.0.0.1.rebind.test", "a.localhost", "localhost.", "127.1", "0x7f.1", "2130706433", "0.0.0.0",
    "127.0.0.2", "[::ffff:127.0.0.1]", "localhost@rebind.test", "rebind.test#localhost", "localhost rebind.test",
    "localhost\u200b", "\uff4cocalhost", "[::1", "localhost:1:2", "localhost, rebind.test", "",
])  # fmt: skip
def test_no_other_name_is_taken_for_this_machine(server: ServerProcess, host: str) -> None:
    """A page that rebinds a name to this address sends that name; so does whoever spells the address in another way."""
    assert status_of(server, "/v1/status", host=host) in (400, 421)


@pytest.mark.parametrize("origin", [
    "null", "", "http://localhost", "https://localhost:{port}", "http://localhost:{port}.rebind.test",
    "http://localhost:{port}@rebind.test", "http://rebind.test/http://localhost:{port}", "file://",
    "chrome-extension://x",
    "http://localhost:{port} http://rebind.test", "http://127.0.0.2:{port}",
])
def test_no_other_origin_is_taken_for_the_servers_page(server: ServerProcess, origin: str) -> None:
    port = server.http.rpartition(":")[2]
    assert status_of(server, "/v1/status", origin=origin.format(port=port)) == 403
    assert status_of(server, "/v1/status", origin=f"http://127.0.0.1:{port}") == 200


@pytest.mark.parametrize("path", [
    "/static/../../../../etc/passwd", "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/static/..%2f..%2fapi/server.py",
    "/static//etc/passwd", "/static/%00", "/static/%c0%ae%c0%ae/api/server.py", "/static/..%5capi%5cserver.py",
    "/static/.",
    "/manual/../../pyproject.toml", "/manual/%2e%2e/%2e%2e/pyproject.toml", "/manual/..%2fpyproject.toml",
    "/manual//etc/passwd", "/manual/operate/runbook.md/../../../pyproject.toml", "/manual/%252e%252e/pyproject.toml",
    "/manual/operate", "/manual/operate/", "/manual/operate/runbook.md%00.png", "//etc/passwd", "/..",
    "/%2e%2e/etc/passwd",
])
def test_no_path_leads_out_of_the_folders_that_are_served(server: ServerProcess, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OPERATOR}\r\nConnection: close\r\n\r\n"
    answer = until_closed(server.http, head.encode())
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404") and b"root:" not in answer and b"[project]" not in answer


def in_wrong_places(server: ServerProcess, session: str) -> list[str]:
    """The refusals of calls that have a session's id in each part of the path, parameter and field of the body where
    another text belongs."""
    said = list[str]()
    for path, methods in DOCUMENT["paths"].items():
        for method, described in methods.items():
            own = path if path.startswith("/v1/sessions/") else re.sub("{.*?}", session, path)
            at = own.replace("{session}", f"0{session}").format(name="index.md")
            fields = [name for one in described.get("parameters", ()) if one["in"] == "query" for name in [one["name"]]]
            for url in (at, f"{at}/{session}", *(f"{at}?{name}={session}" for name in fields if name != "follow")):
                said.append(str(raw(server.unix, method.upper(), url, b"{}", JSON)))
            content = described.get("requestBody", {}).get("content", {}).get("application/json")
            schema = SCHEMAS[content["schema"]["$ref"].rpartition("/")[2]] if content else {}
            for name in schema.get("properties", {}):
                body = {"session": session, "member": "m", name: f"0{session}" if name == "session" else session}
                for sent in (body, {name: body[name]}, {name: [session]}, {name: {session: session}}, {session: 1}):
                    said.append(str(raw(server.unix, method.upper(), at, msgspec.json.encode(sent), JSON)))
                for spoiled in spoiled_ids(session):
                    for sent in ({name: spoiled}, {spoiled: name}):
                        said.append(str(raw(server.unix, method.upper(), at, msgspec.json.encode(sent), JSON)))
            for spoiled in spoiled_ids(session):
                at = re.sub("{.*?}", quote(spoiled), path)
                said.append(str(raw(server.unix, method.upper(), at, b"{}", JSON)))
    return said


def spoiled_ids(session: str) -> tuple[str, ...]:
    """Ids of which most is there: cut short, with something before or behind them, or written in another way."""
    return (
        session[:-1], session[:-4], f"g{session}", f"_{session}", f"é{session}", f"{session}_", f"{session}g",
        session * 2, session.upper(), session.replace("-", "_"), f"session={session}&member=m",
    )


def test_nothing_that_a_server_tells_has_a_sessions_secret() -> None:
    """Lists, pages, metrics, explanations, events, KV events, traces, its log at its most talkative, and refusals."""
    with (
        Collector() as collector,
        ServerProcess(
            observe="log,stream,metrics,curve,kv_events,traces", traces_endpoint=collector.endpoint, log_level="debug",
        ) as server,
        Client(server.unix) as client, closing(attach(client, label="told")) as engine,
    ):
        engine.store(keys(4, "told"))
        lease = engine.lookup(keys(4, "told"), request="told").lease
        engine.heartbeat(outcomes=[Outcome(request="told", prompt_tokens=64, loaded_tokens=64, load_us=9)])
        wrong: list[Callable[[], object]] = [
            partial(engine.release, "0" * 16, 0), partial(engine.lookup, keys(1), request="x" * 9999),
            partial(client.leave, engine.session, "another"), partial(client.session, engine.session + "0"),
            partial(client.lease, engine.session), partial(client.explain, engine.session),
        ]  # fmt: skip
        said = list[str]()
        for call in wrong:
            with pytest.raises(ApiError) as refused:
                call()
            said.append(f"{refused.value} {refused.value.found} {refused.value.wanted}")
        for path in (*READS, f"/v1/sessions/{engine.listed}", f"/v1/leases/{lease}", "/v1/requests/told/explain"):
            status, headers, content = raw(server.unix, "GET", path)
            assert status == 200, (path, content)
            said += [str(headers), content.decode()]
        said += in_wrong_places(server, engine.session)
        engine.release(lease, 0)
        client.leave(engine.session, engine.member)
        eventually(lambda: len(collector.spans()) >= 3)
        server.stop()
        said += [str(collector.spans()), server.log_text()]
        secret = engine.session.rpartition("-")[2]
        assert engine.listed in "".join(said) and "kvdock" in said[-2], "the session is told of"
        most_of_it = secret[:24]
        assert [line for text in said for line in text.splitlines() if most_of_it in line.lower()] == []


@pytest.mark.parametrize("step_s", [86400.0, -86400.0])
def test_a_step_of_the_wall_clock_hides_and_moves_nothing(tmp_path: Path, step_s: float) -> None:
    """Neither what an operator has to see now, nor the charts that the next server goes on with."""
    wall_s = [1e9]
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s")))
    pool = open_pool(settings, secrets.randbits)

    def seen(parts: Parts) -> tuple[list[str], list[Mark], int]:
        """Codes of findings, marks, and how many values of hours there are."""
        found = asyncio.run(parts.handlers.judge.verdict(of_user(os.geteuid())))
        stats = parts.sampler._history.view("hours", 1.0)
        return [one.code for one in found.findings], stats.marks, len(stats.series[0].values)

    try:
        asyncio.run(pool.grow_first())
        parts = build(settings, pool, AccessFile(""), Clocks(wall_s=lambda: wall_s[0]))
        parts.keeper._tally.died(None)
        before = seen(parts)
        assert "engine_died" in before[0] and [one.kind for one in before[1]] == ["started"]
        asyncio.run(parts.sampler.keep())
        wall_s[0] += step_s
        assert seen(parts)[0] == before[0] and seen(parts)[1][0].age_s < 60
        codes, marks, values = seen(build(settings, pool, AccessFile(""), Clocks(wall_s=lambda: wall_s[0])))
        assert codes == before[0] and [one.kind for one in marks] == ["started"] * 2 and values == 0
    finally:
        pool.close()
