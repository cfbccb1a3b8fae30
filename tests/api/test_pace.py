"""Clients whose calls are refused again and again wait for the next one, and nobody else does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from flood_helpers import Quick, answered, quick_server, request, wire

from kvdock.api.http.pace import BURST, CLIENTS_KEPT, PAUSE_S, Pace
from kvdock.api.turns import LONG_READ_BYTES

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
    with quick_server(str(tmp_path_factory.mktemp("quick")), Pace(FOREVER_S)) as made:
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
