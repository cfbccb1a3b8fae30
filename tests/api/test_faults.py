"""What the machine or a peer may do to a server: no memory, no descriptors, peers that stall, a storm of sessions."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, attach, eventually, keys, unique
from paths import SUPPORT

from kvdock.client.client import Client
from kvdock.client.transport import Address
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError, ServerUnavailable


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Another process's limit, for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def connected(address: str) -> socket.socket:
    at = Address.parse(address)
    peer = socket.socket(socket.AF_UNIX if at.socket_path else socket.AF_INET)
    peer.settimeout(10.0)
    peer.connect(at.socket_path or (at.host, at.port))
    return peer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small /dev/shm of its own")
def test_a_full_shared_memory_shortens_answers_and_is_used_again_when_there_is_space() -> None:
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, str(SUPPORT / "full_shm.py")],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(SUPPORT)}, check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["too_large_status"] != 0 and "does not fit" in seen["too_large_says"]
    assert 0 < seen["chunks_when_full"] < 400 and seen["ready_when_full"] == seen["chunks_when_full"]
    assert seen["limited_by"] == "no_space" and seen["segments_after"] == 4
    assert seen["quota_when_full"] == 5 * MIB and seen["beside_when_full"] == []
    assert any("quotas that calls have put" in reason and "No space left" in reason for reason in seen["quota_reasons"])
    assert seen["quota_reasons_after"] == []
    assert seen["left"] == []


def test_a_server_that_may_map_no_more_serves_what_it_has_and_grows_later() -> None:
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        kept = keys(10, unique("kept"))
        engine.store(kept)
        assert engine.lookup(kept, request="held").hit_tokens == 160, "so nothing evicts it"
        mapped = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(server.process.pid, resource.RLIMIT_AS, mapped + MIB):
            short = engine.reserve(keys(400, unique("more")))
            assert 0 < len(short.chunks) < 400
            assert engine.commit(short).remaining == []
            assert engine.lookup(kept, request=unique("r")).hit_tokens == 160
            assert client.status().pool.segments == 1
        later, granted = keys(400, unique("later")), 0

        def has_grown() -> bool:
            nonlocal granted
            engine.heartbeat()
            granted += len(engine.reserve(later, store=unique("s")).chunks)  # those of earlier calls are busy
            return granted > 200

        eventually(has_grown, 30.0)
        assert client.status().pool.segments > 1
        engine.close()


def test_a_server_without_descriptors_keeps_those_it_knows_and_takes_others_later() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        stored = keys(4, unique("fd"))
        engine.store(stored)
        open_now = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        with limited(server.process.pid, resource.RLIMIT_NOFILE, open_now):
            strangers = [connected(server.http) for _ in range(8)]
            for stranger in strangers:
                stranger.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for number in range(20):
                assert engine.lookup(stored, request=f"{number}").hit_tokens == 64
        eventually(lambda: answers(server.http))
        for stranger in strangers:
            stranger.close()
        assert client.status().status == "ok"
        engine.close()


def answers(address: str) -> bool:
    try:
        with Client(address, timeout_s=2.0) as client:
            return client.status().status == "ok"
    except ServerUnavailable:
        return False


def test_peers_that_stall_and_peers_that_go_away_hold_up_nobody() -> None:
    halves = [
        b"", b"GET /v1/st", b"POST /v1/lookups HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/lookups HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{",
        b"POST /v1/lookups HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n{",
    ]
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        stored = keys(4, unique("stall"))
        engine.store(stored)
        stalled = []
        for address in (server.http, server.unix):
            for half in halves * 10:
                stalled.append(connected(address))
                stalled[-1].sendall(half)
        for number in range(100):
            began = time.monotonic()
            assert engine.lookup(stored, request=f"{number}").hit_tokens == 64
            assert time.monotonic() - began < 5.0, "somebody waited for a peer that stalls"
        for peer in stalled[::2]:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not closed
        for peer in stalled:
            peer.close()
        assert engine.lookup(stored, request="after").hit_tokens == 64 and client.status().leases == 101
        engine.close()


@pytest.mark.parametrize("cut", [1, 40, 150])
def test_a_request_that_is_cut_off_does_nothing(cut: int) -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        body = json.dumps({
            "session": engine.session, "member": engine.member, "store": "cut", "keys": keys(4, "cut"),
        }).encode()
        head = b"POST /v1/reservations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for address in (server.http, server.unix):
            with connected(address) as peer:
                peer.sendall(request[:-cut])
        assert client.status().reservations == 0
        with connected(server.unix) as peer:
            peer.sendall(request)
            assert peer.recv(100).startswith(b"HTTP/1.1 200")
        assert client.status().reservations == 1
        engine.close()


def test_pipelined_requests_are_answered_in_order() -> None:
    with ServerProcess() as server, connected(server.http) as peer:
        peer.sendall(b"".join(
            b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path, b"Connection: close\r\n" if last else b"")
            for path, last in ((b"/livez", False), (b"/nowhere", False), (b"/v1/status", True))
        ))
        found = b""
        while piece := peer.recv(65536):
            found += piece
        assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"404", b"200"]


def test_thousands_of_sessions_come_and_go(sweeps: bool) -> None:
    """Each has a lease; half of them die without leaving. In the end nothing is held, and nothing has grown."""
    with ServerProcess(watch_s=0.05) as server, Client(server.unix) as client:
        first = attach(client)
        stored = keys(4, "everybody's")
        first.store(stored)

        def round_of(count: int) -> None:
            for number in range(count):
                engine = attach(client)
                assert engine.lookup(stored).hit_tokens == 64
                if number % 2:
                    client.leave(engine.session, engine.member)
                engine.close()
            eventually(lambda: client.status().sessions <= 1 and client.status().leases == 0, 60.0)

        each = 2000 if sweeps else 500
        round_of(each)
        after_some = private_bytes(server.process.pid)
        for _ in range(4):
            first.heartbeat()
            round_of(each)
        assert private_bytes(server.process.pid) < after_some + 8 * MIB
        assert client.status().pool.quarantined_bytes == 0
        first.close()


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10


def test_a_storm_of_leases_ends_at_the_limit_with_a_typed_refusal_and_passes() -> None:
    with ServerProcess(session_grants=500, table_grants=2048) as server, Client(server.unix) as client:
        engines = [attach(client) for _ in range(3)]
        stored = keys(8, "storm")
        engines[0].store(stored)
        held = [(engine, engine.lookup(stored, request=f"{n}").lease) for engine in engines for n in range(500)]
        for engine in engines:
            with pytest.raises(ApiError) as error:
                engine.lookup(stored, request="one too many")
            assert error.value.code == "too_many_grants"
        assert client.status().leases == 1500
        for engine, lease in held:
            assert lease is not None
            client.release_later(lease, engine.session, [0])
        for engine in engines:
            assert client.flush(engine.session) == []
            assert isinstance(engine.lookup(stored, request="again"), s.LookupAnswer)
            engine.close()
        eventually(lambda: client.status().leases == 0)
