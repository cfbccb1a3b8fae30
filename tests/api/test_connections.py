"""One connection is held to limits of bytes, requests and time. What goes beyond is refused as a problem."""

from __future__ import annotations

import asyncio
import gc
import re
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvicorn
from admin_helpers import ok
from api_helpers import OPERATOR, PATIENCE_S, ServerProcess, attach, eventually, keys, raw, soon
from flood_helpers import (
    LIMITS,
    Quick,
    answered,
    quick_server,
    refusal_in,
    request,
    rest,
    send_all,
    until_closed,
    wire,
)
from starlette.types import Receive, Scope, Send

from bench.floods.honest import descriptors
from kvdock.api.access.access_file import entry
from kvdock.api.http.connection import Connection, connection_class
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.http.wire import COMMON_HEADERS
from kvdock.api.record.counters import Counters
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.reports.degraded import CONNECTIONS_HELD
from kvdock.api.turns import next_call
from kvdock.client.client import Client

pytestmark = pytest.mark.security

CHUNKED = request("POST", "/v1/lookups", length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
SHORT_S = 0.5
"""The `quick` server's patience."""


@pytest.fixture(params=["unix", "http"])
def address(request: pytest.FixtureRequest, server: ServerProcess) -> str:
    found: str = getattr(server, request.param)
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    folder = str(tmp_path_factory.mktemp("quick"))
    with quick_server(
        folder, header_s=SHORT_S, body_s=SHORT_S, unread_s=SHORT_S, idle_s=1, tcp_connections=4,
    ) as server:
        yield server


@pytest.mark.parametrize(("sent", "code", "status"), [
    (b"GARBAGE\r\n\r\n", "malformed_request", 400),
    (b"CONNECT elsewhere:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", "malformed_request", 400),
    (b"GET /" + b"a" * LIMITS.url_bytes + b" HTTP/1.1\r\n\r\n", "url_too_long", 414),
    (b"GET /" + b"a" * (LIMITS.url_bytes + 1), "url_too_long", 414),
    (b"GET /" + b"a" * 100_000, "url_too_long", 414),
    (HEAD + b"a: b\r\n" * LIMITS.headers + b"\r\n", "header_too_large", 431),
    (HEAD + b"a: " + b"b" * LIMITS.header_bytes + b"\r\n\r\n", "header_too_large", 431),
    (HEAD + b"a: " + b"b" * (LIMITS.url_bytes + LIMITS.header_bytes), "header_too_large", 431),
    (HEAD + b"a" * (LIMITS.url_bytes + LIMITS.header_bytes), "header_too_large", 431),
    (b"\r\n" * (LIMITS.url_bytes + LIMITS.header_bytes), "header_too_large", 431),
    (CHUNKED + b"1\r\n \r\n" * (LIMITS.body_pieces + 1), "malformed_request", 400),
    (CHUNKED + b"1\r\n \r\n0\r\n" + b"a: b\r\n" * LIMITS.headers, "header_too_large", 431),
    (CHUNKED + b"1\r\nx\r\nno length\r\n", "malformed_request", 400),
], ids=[
    "no HTTP", "CONNECT", "a long URL", "a URL without end", "a longer one", "many lines", "a long line",
    "a value without end", "a name without end", "empty lines", "tiny pieces", "trailers", "no length of a piece",
])
def test_a_request_beyond_a_limit_is_a_problem_and_ends_the_connection(
    sent: bytes, code: str, status: int, address: str
) -> None:
    found = refusal_in(until_closed(address, sent))
    assert (found.status, found.problem["status"], found.problem["code"]) == (status, status, code)
    assert found.problem["wanted"] and found.headers["connection"] == "close"
    for name, value in COMMON_HEADERS.items():
        assert found.headers[name] == value


@pytest.mark.parametrize("second", [b"GET /" + b"a" * 100_000, HEAD + b"a: " + b"b" * 60_000 + b"\r\nc: d\r\ne"])
def test_a_limit_counts_behind_another_request_too(second: bytes, address: str) -> None:
    """Both arrive at once: what the second has too much is refused before its end, and the first is answered."""
    answer = until_closed(address, request("GET", "/livez") + second)
    assert re.findall(rb"HTTP/1\.1 (\d\d\d)", answer)[0] == b"200"
    assert b'"too_slow"' not in answer, "its end was awaited"


@pytest.mark.parametrize("begins", [True, False])
def test_a_connection_that_has_ended_leaves_nothing(begins: bool) -> None:
    """Without the garbage collector, which the server has run seldom: a circle of references would stay. A call that
    waits for its turn does not begin when its client has left."""
    calls = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> list[object]:
        config = uvicorn.Config(app, log_config=None)
        config.load()
        meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
        made = connection_class(ConnectionLimits(tcp_connections=9, unix_connections=9), meter)
        seen: list[weakref.ref[Connection]] = []

        def connection() -> Connection:
            one = made(config, uvicorn.server.ServerState(), {})
            seen.append(weakref.ref(one))
            return one

        ours, theirs = socket.socketpair()
        with ours:
            await asyncio.get_running_loop().connect_accepted_socket(connection, theirs)
            ours.setblocking(False)
            before = [asyncio.create_task(next_call()) for _ in range(0 if begins else 1000)]
            await asyncio.sleep(0)
            await asyncio.get_running_loop().sock_sendall(ours, request("GET", "/"))
            if begins:
                assert b" 204 " in await asyncio.get_running_loop().sock_recv(ours, 1024)
            while not begins and seen[0]().cycle is None:  # type: ignore[union-attr]  # before it has ended
                await asyncio.sleep(0)
        await asyncio.gather(*before)
        until_s = time.monotonic() + PATIENCE_S
        while seen[0]() is not None and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        return [one() for one in seen]

    gc.disable()
    try:
        assert asyncio.run(story()) == [None]
    finally:
        gc.enable()
    assert calls == ["/"] * begins


def test_what_just_fits_is_served(address: str) -> None:
    path = "/livez?" + "a" * (LIMITS.url_bytes - len("/livez?"))
    lines = b"a: " + b"b" * (LIMITS.header_bytes - len(b"Hostlocalhosta")) + b"\r\n"
    with wire(address) as sock:
        sock.sendall(request("GET", path))
        assert b'"unknown_parameter"' in answered(sock)[1]
        sock.sendall(HEAD + lines + b"\r\n")
        assert answered(sock)[0] == 200
        sock.sendall(HEAD + b"a: b\r\n" * (LIMITS.headers - 1) + b"\r\n")
        assert answered(sock)[0] == 200


def test_requests_that_wait_are_answered_in_order_and_too_many_end_the_connection(address: str) -> None:
    paths = ["/livez", "/v1/nothing"] * ((1 + LIMITS.pipelined) // 2)
    whole = b"".join(request("GET", path) for path in paths)
    last = request("GET", "/livez").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answers = until_closed(address, whole + last)
    wanted = [b"200" if path == "/livez" else b"404" for path in (*paths, "/livez")]
    assert re.findall(rb"HTTP/1\.1 (\d\d\d)", answers) == wanted
    answers = until_closed(address, request("GET", "/livez") * 1000)
    assert re.findall(rb"HTTP/1\.1 (\d\d\d)", answers) == [b"200"] * (LIMITS.pipelined + 1), "the first are answered"


def test_a_request_that_asks_for_another_protocol_is_served_and_is_the_last(server: ServerProcess) -> None:
    ask = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    answer = until_closed(server.http, ask + b"\x81\x05hello")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert "pgrade" not in server.log_text() and "websockets" not in server.log_text()


def test_a_whole_request_is_answered_before_the_next_one_ends_the_connection(address: str) -> None:
    answer = until_closed(address, request("GET", "/livez") + b"GARBAGE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


# ------------------------------------------------------------------ time


@pytest.mark.parametrize("sent", [
    b"G", HEAD, request("POST", "/v1/lookups", b"{", length=100), request("POST", "/v1/config", b"{", length=100),
    request("GET", "/livez") + HEAD,
])
@pytest.mark.parametrize("family", ["unix", "http"])
def test_a_request_that_does_not_end_is_too_slow(sent: bytes, family: str, quick: Quick) -> None:
    began_s = time.monotonic()
    found = refusal_in(until_closed(getattr(quick, family), sent))
    assert (found.status, found.problem["code"]) == (408, "too_slow")
    assert time.monotonic() - began_s >= SHORT_S


def test_sending_a_little_now_and_then_buys_no_time(quick: Quick) -> None:
    with wire(quick.http) as sock:
        began_s = time.monotonic()
        for number in range(100):
            send_all(sock, b"X-%d: a\r\n" % number if number else HEAD)
            time.sleep(SHORT_S / 10)  # ten times within what a whole header may take
            if time.monotonic() - began_s > 2 * SHORT_S:
                break
        assert refusal_in(rest(sock)).problem["code"] == "too_slow"


@pytest.mark.parametrize("sent", [b"", b"\r\n", request("GET", "/livez"), request("GET", "/livez") + b"\r\n"])
def test_a_connection_without_a_request_is_closed_without_a_word(sent: bytes, quick: Quick) -> None:
    answer = until_closed(quick.http, sent)
    assert answer.count(b"HTTP/1.1") == (b"GET" in sent) and b"too_slow" not in answer


def test_a_client_that_does_not_read_loses_its_connection(quick: Quick) -> None:
    with wire(quick.unix) as sock:
        sock.sendall(request("GET", "/openapi.json") * 8)
        eventually(lambda: is_closed(sock))
        assert 0 < len(rest(sock)) < 8 * len(raw(quick.unix, "GET", "/openapi.json")[2])


def test_a_client_that_leaves_while_its_requests_wait_fails_nothing() -> None:
    with ServerProcess() as server:
        for _ in range(20):
            with wire(server.unix) as sock:
                sock.sendall(request("GET", "/openapi.json") * 8)
                sock.recv(1)
        assert raw(server.unix, "GET", "/livez")[0] == 200
        assert "Traceback" not in server.log_text()


HALF_SENT = {
    "nothing": b"", "half a head": b"GET /livez HT", "a call": request("GET", "/livez"),
    "three calls": request("GET", "/v1/status") * 3, "a long answer": request("GET", "/openapi.json"),
    "a stream": request("GET", "/v1/events?follow=true"), "half a body": request("POST", "/v1/lookups", b"{", length=9),
    "what is no HTTP": b"GARBAGE\r\n\r\n",
}


@pytest.mark.parametrize("over", ["http", "unix"])
def test_a_client_that_closes_its_sending_side_is_gone_and_holds_nothing(over: str) -> None:
    with ServerProcess(observe="log,stream,metrics") as server:
        address, before = getattr(server, over), descriptors(server.process.pid)
        for sent in HALF_SENT.values():
            with wire(address) as sock, soon():
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                got = rest(sock)
                assert not got or got.startswith(b"HTTP/1.1 "), got
        with wire(address) as sock, soon():
            sock.sendall(HALF_SENT["a stream"])
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            sock.shutdown(socket.SHUT_WR)
            rest(sock)
        eventually(lambda: descriptors(server.process.pid) <= before)
        assert raw(address, "GET", "/livez")[0] == 200 and "Traceback" not in server.log_text()


# ------------------------------------------------------------------ numbers


def test_tcp_has_so_many_connections_and_engines_are_not_counted(tmp_path: Path) -> None:
    with quick_server(str(tmp_path), tcp_connections=4) as quick, ExitStack() as held:
        for _ in range(4):
            sock = held.enter_context(wire(quick.http))
            sock.sendall(request("GET", "/livez"))
            assert answered(sock)[0] == 200
        found = refusal_in(until_closed(quick.http, b""))
        assert (found.status, found.problem["code"], found.headers["retry-after"]) == (503, "too_busy", "1")
        assert (found.problem["found"], found.problem["wanted"]) == (4, "< 4")
        asyncio.run(quick.parts.handlers.probes.rounds.look())
        now = ok(quick.unix, "GET", "/v1/status")["degraded"]
        full = [(one["reason"], one["most"]) for one in now]
        assert full[-1] == (CONNECTIONS_HELD.format("TCP"), "most are of the own user: 4 TCP connections")
        for _ in range(5):
            assert raw(quick.unix, "GET", "/livez")[0] == 200
        assert quick.parts.meter.counters.refused_connections == 1
        held.close()
        eventually(lambda: raw(quick.http, "GET", "/livez")[0] == 200)
        now = ok(quick.unix, "GET", "/v1/status")["degraded"]
        assert CONNECTIONS_HELD.format("TCP") not in [one["reason"] for one in now]


NO_TOKEN = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_strangers_that_hold_connections_keep_nobody_out(tmp_path: Path) -> None:
    """As in the reviewers' attack: nothing but 64 connections without a token, each kept open by a request now and
    then, made probes fail, and kubelet kill the server."""
    with quick_server(str(tmp_path), tcp_connections=8) as quick, ExitStack() as held:
        known = held.enter_context(wire(quick.http))
        known.sendall(request("GET", "/livez"))
        assert answered(known)[0] == 200
        strangers = [held.enter_context(wire(quick.http)) for _ in range(4)]
        for number, sock in enumerate(strangers):
            sock.sendall(NO_TOKEN if number < 2 else NO_TOKEN[:20])  # idle, or in the middle of a request
            if number < 2:
                assert answered(sock)[0] == 200
        for _ in range(20):
            newest = held.enter_context(wire(quick.http))
            newest.sendall(NO_TOKEN)
            assert answered(newest)[0] == 200, "a probe is served at once"
        assert quick.parts.meter.counters.refused_connections == 20, "as many gave way"
        for sock in strangers:
            assert sock.recv(1) == b"", "those that had waited longest"
        known.sendall(request("GET", "/livez"))
        assert answered(known)[0] == 200, "who has shown a token stays"


def test_a_tenant_that_holds_connections_keeps_nobody_out(tmp_path: Path) -> None:
    """Neither probes nor people: it has half of them, and of its own the one that has waited longest gives way."""
    token = "kvd_" + "t" * 43
    team = entry("team", token, ["read"], "team")
    with quick_server(str(tmp_path), team, tcp_connections=8) as quick, ExitStack() as held:
        asked = NO_TOKEN[:-2] + f"Authorization: Bearer {token}\r\n\r\n".encode()
        tenants = []
        for _ in range(12):
            sock = held.enter_context(wire(quick.http))
            for _ in range(2):
                sock.sendall(asked)
                assert answered(sock)[0] == 200
            tenants.append(sock)
        for sock in tenants[:8]:
            assert rest(sock) == b"", "those that had waited longest"
        for sent in (NO_TOKEN, request("GET", "/v1/sessions")):
            for _ in range(3):
                sock = held.enter_context(wire(quick.http))
                sock.sendall(sent)
                assert answered(sock)[0] == 200, "there is room for a probe, and for people"
        for sock in tenants[8:]:
            sock.sendall(asked)
            assert answered(sock)[0] == 200


@pytest.mark.parametrize("first", [b"", b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["alone", "second"])
def test_a_tenant_whose_answers_never_end_keeps_nobody_out(first: bytes, tmp_path: Path) -> None:
    """It has half of the connections, though none of them waits; what it asks beyond is refused, and a probe from its
    address, which may be a proxy's, is served."""
    token = "kvd_" + "t" * 43
    stream = b"GET /v1/events?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
    asked = (first + stream).replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    with quick_server(str(tmp_path), entry("team", token, ["read"], "team"), tcp_connections=8) as quick, \
            ExitStack() as held:
        streams = [held.enter_context(wire(quick.http)) for _ in range(4)]
        for sock in streams:
            sock.sendall(asked)
            found = b""
            while found.count(b"HTTP/1.1 200 ") < asked.count(b"GET"):
                found += sock.recv(1 << 16)
        for _ in range(4):
            sock = held.enter_context(wire(quick.http))
            sock.sendall(asked)
            status, problem = answered(sock)
            assert (status, b'"too_busy"' in problem, b'"found":4,"wanted":"< 4"' in problem) == (503, True, True)
        for _ in range(4):
            sock = held.enter_context(wire(quick.http))
            sock.sendall(NO_TOKEN)
            assert answered(sock)[0] == 200, "there is room for a probe"
        assert not any(map(is_closed, streams)), "whoever reads an answer keeps its connection"
        streams[0].close()
        token_header = {"Authorization": f"Bearer {token}"}
        eventually(lambda: raw(quick.http, "GET", "/v1/status", b"", token_header)[0] == 200)


def test_a_stranger_that_is_answered_does_not_give_way(tmp_path: Path) -> None:
    with quick_server(str(tmp_path), tcp_connections=2, stranger_idle_s=1) as quick, ExitStack() as held:
        first = held.enter_context(wire(quick.http))
        first.sendall(NO_TOKEN)
        assert answered(first)[0] == 200
        began_s = time.monotonic()
        assert first.recv(1) == b"" and time.monotonic() - began_s < PATIENCE_S, "it idles for seconds only"
        for _ in range(3):
            sock = held.enter_context(wire(quick.http))
            sock.sendall(request("GET", "/livez"))
            assert answered(sock)[0] in (200, 503)
        assert b'"too_busy"' in until_closed(quick.http, b""), "both have shown a token"


def test_long_bodies_together_have_a_limit_and_short_ones_are_not_stopped(tmp_path: Path) -> None:
    with quick_server(str(tmp_path)) as quick, ExitStack() as held:
        room = quick.parts.handlers.body_capacity
        for _ in range(2):
            sock = held.enter_context(wire(quick.http))
            send_all(sock, request("POST", "/v1/lookups", b" " * (room.limit_bytes // 2 - 1), length=8 << 20))
        eventually(lambda: room.taken_bytes == room.limit_bytes - 2)
        with wire(quick.http) as sock:
            send_all(sock, request("POST", "/v1/lookups", b" " * (1 << 20)))
            assert b'"too_busy"' in answered(sock)[1]
        assert raw(quick.http, "POST", "/v1/lookups", b"{}", {"Content-Type": "application/json"})[0] == 422
        long_json = b" " * ((1 << 20) - 2) + b"{}"
        assert raw(quick.unix, "POST", "/v1/lookups", long_json, {"Content-Type": "application/json"})[0] == 422
        held.close()
        eventually(lambda: room.taken_bytes == 0)


def test_long_bodies_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path) -> None:
    """Also while they do not go on."""
    tokens = {name: "kvd_" + name[-1] * 43 for name in ("team-a", "team-b")}
    entries = (entry(name, token, ["engine"], name) for name, token in tokens.items())

    def sent(tenant: str, body_bytes: int, length: int) -> bytes:
        body = request("POST", "/v1/lookups", b" " * body_bytes, length=length)
        return body.replace(OPERATOR.encode(), tokens[tenant].encode())

    with quick_server(str(tmp_path), *entries) as quick:
        room = quick.parts.handlers.body_capacity
        most = room.limit_bytes // 2
        with wire(quick.http) as hog, wire(quick.http) as another, wire(quick.http) as honest:
            send_all(hog, sent("team-a", most - 1, most))
            eventually(lambda: room.taken_bytes == most - 1)
            send_all(another, sent("team-a", 1 << 20, 1 << 20))
            assert b'"too_busy"' in answered(another)[1], "beyond the tenant's half"
            send_all(honest, sent("team-b", 7 << 20, 7 << 20))
            assert b"send MessagePack" in answered(honest)[1], "it is read as a whole"
        eventually(lambda: room.taken_bytes == 0)


@pytest.mark.parametrize(("path", "longest"), [
    ("/v1/sessions/x/heartbeat", 256 << 10), ("/v1/releases", 256 << 10), ("/v1/cache/clear", 1 << 20),
    ("/v1/lookups", 8 << 20),
])
def test_each_call_takes_no_longer_bodies_than_it_needs(path: str, longest: int, address: str) -> None:
    for sent in (request("POST", path, b"", length=longest + 1), CHUNKED.replace(b"/v1/lookups", path.encode())):
        with wire(address) as sock:
            send_all(sock, sent)
            if sent.startswith(CHUNKED[:5]) and b"chunked" in sent:
                send_all(sock, b"%x\r\n" % (longest + 1) + b" " * (longest + 1))
            assert b'"too_large"' in answered(sock)[1]


def test_a_body_that_is_cut_off_leaves_no_traceback(server: ServerProcess) -> None:
    for path in ("/v1/lookups", "/v1/cache/clear", "/v1/sessions"):
        with wire(server.http) as sock:
            sock.sendall(request("POST", path, b"{", length=100))
            time.sleep(0.05)
    assert raw(server.http, "GET", "/livez")[0] == 200
    assert "Traceback" not in server.log_text()


# ------------------------------------------------------------------ descriptors


def test_a_server_takes_all_descriptors_it_may_have_and_keeps_some(tmp_path: Path) -> None:
    """The limit is 300: the pool keeps its own, TCP gets 64, half of them for one address, and Unix gets the rest."""
    path = tmp_path / "k.sock"
    serve = (
        f"ulimit -Sn 100; ulimit -Hn 300; exec {sys.executable} -m kvdock serve --port 0 --socket-path {path} "
        "--pool-bytes 3MiB --segment-bytes 1MiB --drain-s 0.1"
    )
    with subprocess.Popen(["bash", "-c", serve], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            http = process.stdout.readline().split("HTTP at ")[1].split()[0]
            with ExitStack() as held:
                socks = [held.enter_context(wire(f"unix:{path}")) for _ in range(130)]
                socks += [held.enter_context(wire(http)) for _ in range(90)]
                eventually(lambda: sum(map(was_refused, socks[:130])) == 130 - (300 - 128 - 64))
                eventually(lambda: sum(map(was_refused, socks[130:])) == 90 - 64 // 2)  # of strangers of one address
                assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) > 128
                for sock in socks[:4]:
                    sock.close()
                with Client(f"unix:{path}") as client:
                    engine = attach(client)
                    engine.store(keys(100))  # more than one segment holds
                    assert len(client.segments().segments) == 2
                    engine.close()
        finally:
            process.terminate()
            _, said = process.communicate(timeout=20)
        assert "open descriptors" not in said, said


def is_closed(sock: socket.socket) -> bool:
    """By the server; what it has sent stays unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def was_refused(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        found = sock.recv(1 << 16, socket.MSG_PEEK)
        return not found or b'"too_busy"' in found  # a stranger's that gave way is closed
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_a_request_with_two_tokens_is_refused(address: str) -> None:
    """Whose it were would depend on the order, which a proxy may change."""
    twice = request("GET", "/livez").replace(b"Authorization", b"Authorization: Bearer another\r\nAuthorization")
    refused = refusal_in(until_closed(address, twice))
    assert (refused.status, refused.problem["code"]) == (400, "malformed_request")
