"""How `kvdock serve` ends: SIGTERM drains, then removes or keeps the pool; Ctrl-C removes it at once; and when
there is no shared memory it says so before it has begun."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from api_helpers import Engine, attach, eventually, http_connection, kept_of, keys, raw, small_pool, soon
from cli_helpers import (
    KVDOCK,
    SMALL,
    TIMEOUT_S,
    clean_environ,
    complaints,
    first_line,
    kvdock,
    kvdock_serve,
    refusal,
)

from kvdock._core import Table
from kvdock.api.errors import StartupError
from kvdock.api.pool.lock import remove_stale, server_alive
from kvdock.api.pool.pool import open_pool
from kvdock.api.pool.sessions import Drain
from kvdock.api.server import Server
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.readable import exact_bytes
from kvdock.shm.objects import pool_objects

Serving = tuple[subprocess.Popen[str], Client]
LONG = ("--drain-s", "120")
"""Longer than ended() waits: a server that ends has not waited for its drain."""


@contextmanager
def ready(folder: Path, *flags: str) -> Iterator[Serving]:
    with kvdock_serve(folder, *flags) as process, Client(f"unix:{folder}/kvdock.sock") as client:
        assert first_line(process), process.stderr and process.stderr.read()
        yield process, client


def pool_of(client: Client) -> int:
    return int(client.segments().pool_id, 16)


def drain(process: subprocess.Popen[str], folder: Path) -> None:
    """Sends SIGTERM, and waits until the server drains."""
    process.send_signal(signal.SIGTERM)

    def draining() -> bool:
        status, _, body = raw(f"unix:{folder}/kvdock.sock", "GET", "/readyz")
        return status == 503 and json.loads(body) == {"status": "not ready", "reasons": ["draining"]}

    eventually(draining)


def ended(process: subprocess.Popen[str]) -> None:
    """It ends by itself, without a message."""
    assert last_words(process) == []


def last_words(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, ""), err
    return complaints(err)


def refused(call: object) -> str:
    assert callable(call)
    with pytest.raises(ApiError) as error:
        call()
    return error.value.code


def holding(client: Client) -> tuple[Engine, str | None, s.ReserveAnswer]:
    """An engine with a lease and an open reservation."""
    engine = attach(client)
    engine.store(keys(1, "there"))
    return engine, engine.lookup(keys(1, "there")).lease, engine.reserve(keys(1, "coming"), store="coming")


def test_a_drain_gives_out_nothing_new_and_ends_when_the_last_grant_does(tmp_path: Path) -> None:
    with ready(tmp_path, *LONG) as (process, client):
        engine, lease, coming = holding(client)
        pool = pool_of(client)
        drain(process, tmp_path)
        assert raw(client.address, "GET", "/livez")[0] == 200 and client.status().reasons == ["draining"]
        missed = engine.lookup(keys(1, "there"), request="another")
        short = engine.reserve(keys(1, "more"), store="more")
        assert (missed.hit_tokens, missed.lease, missed.limited_by) == (0, None, "draining")
        assert (short.reservation, short.chunks, short.limited_by) == (None, [], "draining")
        assert refused(lambda: attach(client)) == "not_ready"
        # Whoever was given something may ask again for the answer, come back, and finish.
        assert engine.lookup(keys(1, "there")).lease == lease
        assert engine.reserve(keys(1, "coming"), store="coming").reservation == coming.reservation
        assert client.attach(engine.body).session == engine.session
        assert engine.heartbeat().questions == []
        assert engine.commit(coming).ready == 1
        time.sleep(0.5)  # several looks at what is open
        assert process.poll() is None, "a lease is held"
        engine.release(lease, 0)
        ended(process)
        assert pool not in pool_objects()
        engine.close()


@pytest.mark.parametrize("drain_s", [0.5, 7.0])
def test_a_drain_lasts_as_long_as_a_call_does_and_no_longer_than_it_may(tmp_path: Path, drain_s: float) -> None:
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s.sock"), drain_s=drain_s))
    pool, now_s, loop = open_pool(settings, secrets.randbits), 100.0, asyncio.new_event_loop()
    try:
        short, long = Drain(settings, pool, lambda: now_s), Drain(settings, pool, lambda: now_s)
        call: Any = loop.create_future()
        for drain in (short, long):
            assert not drain.ended(), "before it began"
            drain.begin([call])
        now_s += drain_s - 0.01
        assert not short.ended()
        now_s += 0.02
        assert short.ended()
        now_s -= 0.02
        call.set_result(None)
        assert long.ended()
    finally:
        loop.close()
        pool.close()


def test_a_drain_waits_for_what_is_written_but_not_when_it_hands_over(tmp_path: Path) -> None:
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s.sock"), drain_s=7.0, tier_drain_s=9.0))
    pool, now_s, has_written = open_pool(settings, secrets.randbits), 100.0, False
    try:
        short, long, leaving = (Drain(settings, pool, lambda: now_s) for _ in range(3))
        for drain in (short, long, leaving):
            drain.has_written = lambda: has_written
        for drain in (short, long):
            drain.begin([])
        leaving.hand_over([])
        assert leaving.ended()
        now_s += 8.99
        assert not short.ended() and not long.ended()
        has_written = True
        assert short.ended()
        has_written = False
        now_s += 0.02
        assert long.ended()
    finally:
        pool.close()


def test_a_server_that_holds_something_ends_when_it_may_no_longer_wait(tmp_path: Path) -> None:
    with ready(tmp_path, "--drain-s", "0.5") as (process, client):
        engine, _, _ = holding(client)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        ended(process)
        assert time.monotonic() - began >= 0.5
        engine.close()


def test_a_drain_does_not_wait_for_engines_that_die(tmp_path: Path) -> None:
    with ready(tmp_path, *LONG, "--settle-s", "0.1", "--watch-s", "0.05") as (process, client):
        engine, _, _ = holding(client)
        drain(process, tmp_path)
        engine.close()
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0 and "is dead" in err


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain_at_once(tmp_path: Path, second: signal.Signals) -> None:
    with ready(tmp_path, *LONG) as (process, client):
        engine, _, _ = holding(client)
        drain(process, tmp_path)
        process.send_signal(second)
        ended(process)
        engine.close()


@contextmanager
def on_a_terminal(folder: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that holds something, and the other end of the terminal that it was started from. Closing that ends the
    terminal."""
    ours, its = os.openpty()
    command = [*before, *KVDOCK, "serve", *SMALL, *LONG, "--socket-path", str(folder / "kvdock.sock")]
    with subprocess.Popen(
        ["setsid", "--ctty", *command], env=clean_environ(), stdin=its, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:
        os.close(its)
        try:
            assert first_line(process)
            yield process, ours
        finally:
            if process.poll() is None:
                process.kill()


def test_the_terminals_end_drains(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path) as (process, terminal), Client(f"unix:{tmp_path}/kvdock.sock") as client:
        engine, _, _ = holding(client)
        process.send_signal(signal.SIGHUP)  # not by the terminal: it goes on
        time.sleep(0.3)  # several looks at what is open
        assert client.status().status == "ok"
        os.close(terminal)
        eventually(lambda: client.status().reasons == ["draining"])
        process.send_signal(signal.SIGTERM)
        ended(process)
        engine.close()


def test_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "nohup") as (process, terminal), Client(f"unix:{tmp_path}/kvdock.sock") as client:
        os.close(terminal)
        time.sleep(0.5)  # several looks at what is open
        assert client.status().status == "ok"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert [line for line in last_words(process) if not line.startswith("nohup: ")] == []


def slow_call(folder: Path) -> tuple[HTTPConnection, bytes]:
    """A call whose head has arrived, and the body that it still wants."""
    connection = http_connection(f"unix:{folder}/kvdock.sock")
    body = json.dumps({"namespace": "0" * 64, "keys": []}).encode()
    connection.putrequest("POST", "/v1/lookups")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.putheader("expect", "100-continue")
    connection.endheaders()
    assert connection.sock.recv(64, socket.MSG_PEEK).startswith(b"HTTP/1.1 100 "), "the call wants its body"
    return connection, body


def test_a_call_in_flight_is_answered_though_nobody_holds_anything(tmp_path: Path) -> None:
    with ready(tmp_path, *LONG) as (process, _):
        connection, body = slow_call(tmp_path)
        drain(process, tmp_path)
        time.sleep(1.5)  # longer than the grace that calls have in any case
        assert process.poll() is None
        connection.send(body)
        assert json.load(connection.getresponse())["code"] == "unknown_namespace"
        connection.close()
        ended(process)


def test_ctrl_c_does_not_wait_for_a_call_in_flight(tmp_path: Path) -> None:
    with ready(tmp_path, *LONG) as (process, _):
        connection, _ = slow_call(tmp_path)
        drain(process, tmp_path)
        process.send_signal(signal.SIGINT)
        with soon():  # the server gives the call 30 s to send its body
            process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        connection.close()


# --------------------------------------------------------------------------- what becomes of the pool


def test_a_kept_pool_is_whole_and_the_next_server_at_its_socket_has_it(tmp_path: Path) -> None:
    with ready(tmp_path, "--on-exit", "keep") as (process, client):
        pool = pool_of(client)
        engine = attach(client)
        engine.store(keys(2, "kept"))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=TIMEOUT_S)
        engine.close()
    assert complaints(said) == []
    assert f"pool {pool:016x} stays in shared memory" in said
    assert "for the next server at this socket" in said
    kept = {kept_of(pool, "history").name, kept_of(pool, "curve").name}
    assert len(set(pool_objects()[pool]) - kept) == 3, "segment, table and lock file"
    assert set(pool_objects()[pool]) >= kept
    assert not server_alive(pool) and not (tmp_path / "kvdock.sock").exists()
    with ready(tmp_path) as (process, client):
        assert pool_of(client) == pool
        again = attach(client)
        assert again.lookup(keys(2, "kept")).hit_tokens == 32
        again.leave()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert f"took over pool {pool:016x}: it keeps 2 chunks, " in err and pool not in pool_objects()
    (told,) = (line for line in err.splitlines() if "took over pool" in line)
    assert " INFO " in told and told.endswith("and drops 0 chunks that were being stored")


@pytest.mark.security
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_while_the_server_starts_costs_no_pool(tmp_path: Path, number: signal.Signals) -> None:
    """As when a service is restarted twice. SIGHUP stops no server: settings are read again once it serves."""
    keep = ("--on-exit", "keep")
    with ready(tmp_path, *keep) as (process, client):
        pool = pool_of(client)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with kvdock_serve(tmp_path, *keep) as process:
            eventually((tmp_path / "kvdock.sock").exists)  # it is bound before the pool is opened
            process.send_signal(number)
            if number == signal.SIGHUP:
                assert first_line(process).startswith("kvdock is ready")
                process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=TIMEOUT_S)
        said = complaints(err)
        if number == signal.SIGTERM:  # the server may have become ready all the same
            said = [line for line in said if line != "stopped before it was ready"]
        assert process.returncode == 0 and said == []
        assert f"pool {pool:016x} stays in shared memory" in err
    finally:
        signal.signal(signal.SIGHUP, inherited)
        remove_stale(spare=lambda left: left.pool_id != pool)


def test_sighup_waits_while_the_program_is_imported(tmp_path: Path) -> None:
    """From its first line on: otherwise a reload ends a server that has just been started."""
    command = [*KVDOCK, "serve", *SMALL, "--socket-path", str(tmp_path / "kvdock.sock")]
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with subprocess.Popen(
            command, env=clean_environ(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                eventually(lambda: _blocks(process.pid, signal.SIGHUP))
                assert not (tmp_path / "kvdock.sock").exists()
                process.send_signal(signal.SIGHUP)
                said = first_line(process)
                blocked = _blocks(process.pid, signal.SIGHUP)
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert said.startswith("kvdock is ready") and not blocked and process.returncode == 0, err
    assert "settings and access tokens were read again" in err


def _blocks(pid: int, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("first", [None, signal.SIGTERM])
def test_ctrl_c_removes_the_pool_whatever_on_exit_says(tmp_path: Path, first: signal.Signals | None) -> None:
    with ready(tmp_path, *LONG, "--on-exit", "keep") as (process, client):
        pool = pool_of(client)
        engine, _, _ = holding(client)
        if first is not None:
            drain(process, tmp_path)
        process.send_signal(signal.SIGINT)
        ended(process)
        assert pool not in pool_objects()
        engine.close()


def test_on_exit_takes_two_words() -> None:
    said = refusal(kvdock("serve", "--on-exit", "leave"), 2)
    assert "wanted remove or keep; found on_exit='leave' (--on-exit)" in said


# --------------------------------------------------------------------------- shared memory that is not there


def test_shared_memory_that_cannot_be_used_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock.api.pool.pool.remove_stale", partial(remove_stale, tmp_path / "nowhere"))
    settings = Settings.load({"socket_path": str(tmp_path / "kvdock.sock"), "port": 0, "pool_bytes": "16MiB"})
    with pytest.raises(StartupError, match=r"shared memory cannot be used: .*nowhere.*mount a tmpfs") as error:
        Server(settings, lambda addresses: None).run()
    assert error.value.code == "no_shared_memory" and not (tmp_path / "kvdock.sock").exists()


def test_a_pool_that_leaves_no_memory_for_its_table_is_refused(tmp_path: Path) -> None:
    there, records = os.statvfs("/dev/shm"), 1 << 20
    pool_bytes = there.f_bavail * there.f_frsize - Table.region_bytes(records, 64) // 2
    done = kvdock(
        "serve", "--port", "0", "--socket-path", str(tmp_path / "s"), "--pool-bytes", str(pool_bytes),
        "--table-records", str(records), "--table-grants", "64",
    )
    (said,) = complaints(done.stderr)
    assert done.returncode == 1 and f"pool_bytes={exact_bytes(pool_bytes)} does not fit beside the chunk table" in said
