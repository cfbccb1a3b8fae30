"""Clients whose calls are refused again and again wait for the next one, and nobody else does."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from api_helpers import PATIENCE_S
from flood_helpers import Quick, answered, quick_server, request, wire
from starlette.types import Receive, Scope, Send

from kvdock.api.access.peer import Peer, peer_of
from kvdock.api.http import connection
from kvdock.api.http.connection import Connection, connection_class
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.http.pace import BURST, CLIENTS_KEPT, FORGET_S, MOST_OWED, PAUSE_S, Pace
from kvdock.api.http.wire import REFUSAL
from kvdock.api.record.counters import Counters
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.turns import LONG_READ_BYTES
from kvdock.protocol.errors import problem_of

pytestmark = pytest.mark.security

FOREVER_S = 3600.0
OTHERS = BURST
"""How many calls of others are answered while one waits."""
LIVE = request("GET", "/livez")
REFUSED = {
    "a call of engines": request("POST", "/v1/sessions/none/heartbeat", b'{"member":"m"}'),
    "a body": request("POST", "/v1/lookups", b"{"),
    "a call of people": request("GET", "/v1/requests/none"),
    "a page": request("GET", "/nowhere"),
    "no token": b"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.fixture
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    """Whoever has been refused BURST times waits for an hour."""
    with quick_server(str(tmp_path_factory.mktemp("quick")), pace=Pace(FOREVER_S)) as made:
        yield made


def call(sock: socket.socket, message: bytes) -> int:
    """The status."""
    sock.sendall(message)
    return answered(sock)[0]


def has_answer(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with suppress(BlockingIOError):
        return bool(sock.recv(1))
    return False


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("family", ["unix", "http"])
def test_whoever_is_refused_again_and_again_waits_and_its_other_calls_do_not(
    message: bytes, family: str, quick: Quick
) -> None:
    address = getattr(quick, family)
    refused = BURST // 2 + 1  # each but the first is paid twice: when it is read, and when it is refused
    with wire(address) as one, wire(address) as other:
        if family == "unix" and message is REFUSED["no token"]:
            message = request("GET", "/v1/sessions?unknown=1")
        assert all(400 <= call(one, message) < 500 for _ in range(refused))
        one.sendall(message)
        assert {call(other, LIVE) for _ in range(OTHERS)} == {200}
        assert not has_answer(one)
        assert call(other, message) >= 400, "the first refused call of a connection does not wait"
        other.sendall(message)
        with wire(address) as third:
            assert {call(third, LIVE) for _ in range(OTHERS)} == {200}
        assert not has_answer(other)


def test_whoever_is_refused_now_and_then_does_not_wait(quick: Quick) -> None:
    with wire(quick.unix) as sock:
        for _ in range(BURST - 1):
            assert call(sock, LIVE) == 200
        for _ in range(BURST // 4):
            assert call(sock, REFUSED["a page"]) == 404 and call(sock, LIVE) == 200


def test_the_rest_of_a_body_that_was_refused_is_read_as_slowly(quick: Quick) -> None:
    most = 8 * BURST * LONG_READ_BYTES
    with wire(quick.unix) as sock, wire(quick.unix) as other:
        assert call(sock, request("POST", "/v1/weights", length=most)) == 413
        sock.setblocking(False)
        sent = waited = 0
        while sent < most and waited < OTHERS:
            try:
                sent += sock.send(bytes(LONG_READ_BYTES))
            except BlockingIOError:
                assert call(other, LIVE) == 200
                waited += 1
        assert sent < 2 * BURST * LONG_READ_BYTES


def test_a_client_pays_for_each_refused_call_once_it_has_had_many() -> None:
    pace, now_s = Pace(), 1000.0
    assert not any(pace.wait_s("a", 1, now_s) for _ in range(BURST))
    assert pace.wait_s("a", 1, now_s) == pytest.approx(PAUSE_S)
    pace.refused("a", now_s)
    assert pace.wait_s("a", 1, now_s) == pytest.approx(3 * PAUSE_S), "reads that wait do so one after the other"
    assert not pace.wait_s("b", 1, now_s)
    now_s += 4 * PAUSE_S
    assert pace.wait_s("a", 3 * LONG_READ_BYTES, now_s) == pytest.approx(3 * PAUSE_S)
    now_s += (BURST + 3) * PAUSE_S
    assert not any(pace.wait_s("a", 1, now_s) for _ in range(BURST))


def test_clients_that_owe_nothing_are_forgotten() -> None:
    pace = Pace()
    for client in range(10 * CLIENTS_KEPT):
        pace.refused(client, client * PAUSE_S)
        assert len(pace.owing) <= CLIENTS_KEPT


def test_clients_are_forgotten_once_in_a_while() -> None:
    pace = Pace()
    for client in range(CLIENTS_KEPT + 1):
        pace.refused(client, 1000.0)
    kept = pace.owing
    for client in range(2 * CLIENTS_KEPT):
        pace.refused(client, 1000.0 + FORGET_S / 2)
    assert pace.owing is kept
    pace.refused("late", 1000.0 + FORGET_S)
    assert list(pace.owing) == ["late"]


def test_nobody_waits_for_more_than_a_second() -> None:
    """Others could make a client's next call wait for hours."""
    pace, now_s = Pace(), 1000.0
    for _ in range(10 * (BURST + MOST_OWED)):
        pace.refused("a", now_s)
    assert pace.wait_s("a", 1, now_s) == pytest.approx(MOST_OWED * PAUSE_S) == pytest.approx(1.0)


def test_processes_that_are_not_seen_here_pay_for_each_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in other containers, and all of them have the number 0."""
    def unseen(connected: socket.socket) -> Peer:
        return peer_of(connected)._replace(process=0)

    monkeypatch.setattr(connection, "peer_of", unseen)
    message = REFUSED["a page"]
    with quick_server(str(tmp_path), pace=Pace(FOREVER_S)) as quick, wire(quick.unix) as one, wire(quick.unix) as other:
        assert all(call(one, message) == 404 for _ in range(BURST // 2 + 1))
        one.sendall(message)
        assert all(call(other, message) == 404 for _ in range(BURST // 2))
        assert not has_answer(one)


def test_time_in_which_the_server_does_not_read_is_not_the_clients(tmp_path: Path) -> None:
    """The rest of a refused body is read in three seconds, of which its client may use one."""
    pause_s, length = 0.01, 4 * BURST * LONG_READ_BYTES
    with quick_server(str(tmp_path), pace=Pace(pause_s), body_s=1.0) as quick, wire(quick.unix) as sock:
        began_s = time.monotonic()
        assert call(sock, request("POST", "/v1/weights", length=length)) == 413
        sock.sendall(bytes(length))
        assert call(sock, LIVE) == 200
        assert time.monotonic() - began_s > 2.0, "it did not wait"


async def served(code: str, calls: int) -> tuple[weakref.ref[Connection], socket.socket]:
    """A connection of which all calls are refused with this code, after so many calls, and the client's end of it. The
    next call was sent."""
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][REFUSAL] = problem = problem_of(code, "")
        await send({
            "type": "http.response.start", "status": problem.status, "headers": [(b"content-length", b"0")]
        })
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, log_config=None)
    config.load()
    meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
    limits = ConnectionLimits(tcp_connections=9, unix_connections=9)
    made, seen = connection_class(limits, meter, Pace(FOREVER_S)), list[weakref.ref[Connection]]()

    def connected() -> Connection:
        one = made(config, uvicorn.server.ServerState(), {})
        seen.append(weakref.ref(one))
        return one

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(connected, theirs)
    for _ in range(calls):
        await loop.sock_sendall(ours, request("GET", "/"))
        assert await asyncio.wait_for(loop.sock_recv(ours, 1024), PATIENCE_S)
    await loop.sock_sendall(ours, request("GET", "/"))
    return seen[0], ours


@pytest.mark.parametrize("code", ["quota_exceeded", "not_ready", "too_busy", "table_full"])
def test_nobody_waits_for_what_the_server_lacks(code: str) -> None:
    async def story() -> None:
        _, ours = await served(code, 2 * BURST)
        with ours:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1024), PATIENCE_S)

    asyncio.run(story())


def test_a_connection_that_ends_while_it_waits_leaves_nothing() -> None:
    """Without the garbage collector: a timer of an hour would keep it, and what was read of it."""
    async def story() -> Connection | None:
        seen, ours = await served("not_found", BURST // 2 + 1)
        with ours:
            while not seen()._waiting:  # type: ignore[union-attr]  # before it has ended
                await asyncio.sleep(0)
            seen().transport.abort()  # type: ignore[union-attr]  # likewise
        until_s = time.monotonic() + PATIENCE_S / 4
        while seen() is not None and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        return seen()

    gc.disable()
    try:
        assert asyncio.run(story()) is None
    finally:
        gc.enable()
