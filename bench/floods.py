"""How much clients that misbehave delay an engine: the latency of a normal lookup beside each flood.

    python -m bench.floods --json

An engine looks up 16 keys over the Unix socket every 4 ms: beside a process that only computes, which is the baseline,
and beside each flood of FLOODS, which comes from another process. They take turns, because the load of a shared machine
changes. For each flood: `NAME_p99_ms`, `NAME_max_ms`, `NAME_errors` and `NAME_ratio`, its p99 divided by that of the
baseline; at the end the peak memory of the server, its descriptors, and how many tokens that were stored before are
still found. tests/api/test_floods.py bounds them.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.serving import MIB, Engine, ServerProcess, chain
from kvdock.api.access.edits import add_token
from kvdock.client.client import Client
from kvdock.client.transport import Address
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import KvdockError

KEYS = 16
PAUSE_S = 0.004
ROUNDS = 4
CONNECTIONS = 1000
JSON_TYPE = "Content-Type: application/json\r\n"
HOST = b"Host: localhost\r\n"

# --------------------------------------------------------------------------- what the attacker's process does


class Target(NamedTuple):
    unix: str
    http: str
    session: str
    member: str
    token: str
    """An engine's access token: calls without a token are refused before they cost much."""
    until_s: float
    """The time at which the flood ends, by time.monotonic()."""

    def signed(self, messages: bytes) -> bytes:
        return messages.replace(HOST, HOST + f"Authorization: Bearer {self.token}\r\n".encode())

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s


def connect(address: str) -> socket.socket:
    at = Address.parse(address)
    sock = socket.socket(socket.AF_UNIX if at.socket_path else socket.AF_INET)
    sock.settimeout(1.0)
    sock.connect(at.socket_path or (at.host, at.port))
    return sock


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON_TYPE}Content-Length: {size}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def repeat(target: Target, first: bytes, then: bytes = b"", *, pause_s: float = 0.0) -> None:
    """Opens one connection after the other. On each it sends `first`, then `then` again and again until the server
    closes it."""
    first, then = target.signed(first), target.signed(then)
    while target.goes_on:
        with suppress(OSError), connect(target.http) as sock:
            sock.sendall(first)
            while then and target.goes_on:
                sock.sendall(then)
            if not then:
                sock.recv(1 << 16)
        time.sleep(pause_s)  # some floods are a client that comes back again and again, not as fast as it can


def storm(target: Target, message: bytes, connections: int, address: str) -> None:
    """Makes as many calls as the server answers, on several connections."""
    message, socks = target.signed(message), [connect(address) for _ in range(connections)]
    while target.goes_on:
        for sock in socks:
            sock.sendall(message)
        for sock in socks:
            read_answer(sock)


def read_answer(sock: socket.socket) -> None:
    found = b""
    while b"\r\n\r\n" not in found:
        found += sock.recv(1 << 16) or b"\r\n\r\n"
    head, _, content = found.partition(b"\r\n\r\n")
    missing = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0) - len(content)
    while missing > 0:
        piece = sock.recv(min(missing, 1 << 20))
        missing -= len(piece) or missing


def hold(target: Target, message: bytes, connections: int, drip: bytes = b"") -> None:
    """Opens many connections, sends a part of a message on each, and keeps them open."""
    message, poll, socks = target.signed(message), select.poll(), []
    for _ in range(connections):
        with suppress(OSError):
            sock = connect(target.http)
            sock.settimeout(0.2)
            socks.append(sock)
            sock.sendall(message)
            poll.register(sock, select.POLLIN)
    while target.goes_on:
        for sock in socks if drip else ():
            with suppress(OSError):
                sock.sendall(drip)
        time.sleep(0.1)  # between two pieces of `drip`, which keep the connections open


def heartbeats(target: Target, field: str, item: str, count: int) -> None:
    listed = ",".join([item] * count)
    body = f'{{"member":"{target.member}","{field}":[{listed}]}}'.encode()
    repeat(target, post(f"/v1/sessions/{target.session}/heartbeat", body))


def lookups(target: Target) -> None:
    keys = json.dumps([f"{random.getrandbits(255):064x}" for _ in range(4096)])
    body = f'{{"session":"{target.session}","member":"{target.member}","request":"z","keys":{keys}}}'
    storm(target, post("/v1/lookups", body.encode()), 8, target.http)


def ranks(target: Target) -> None:
    body = f'{{"session":"{target.session}","ranks":[{"0," * 4_000_000}0]}}'.encode()
    repeat(target, post("/v1/leases/0000000000000001/release", body))


def tokens(target: Target) -> None:
    body = f'{{"namespace":"{"0" * 64}","tokens":[{"150000," * ((1 << 20) - 1)}1]}}'.encode()
    repeat(target, post("/v1/lookups", body))


def compute(target: Target) -> None:
    """Computes on one core, without any call of the server."""
    while target.goes_on:
        sum(range(10_000))


QUIET = "quiet"
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
FLOODS: dict[str, Callable[[Target], None]] = {
    QUIET: compute,
    "keep": lambda at: heartbeats(at, "keep", f'"{"0" * 16}"', 400_000),
    "done": lambda at: heartbeats(at, "done", f'{{"grant":"{"0" * 16}","ranks":[0]}}', 200_000),
    "largest_heartbeat": lambda at: heartbeats(at, "keep", f'"{"0" * 16}"', 1024),
    "endless_url": lambda at: repeat(at, b"GET /", b"a" * (1 << 16)),
    "pipeline": lambda at: repeat(at, b"", get("/metrics") * 5000),
    "tiny_headers": lambda at: repeat(at, HEAD, b"a:b\r\n" * 20_000),
    "endless_header": lambda at: repeat(at, HEAD + b"a: ", b"b" * (1 << 16)),
    "tiny_chunks": lambda at: repeat(
        at, post("/v1/lookups", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"), b"1\r\n \r\n" * 9000
    ),
    "unfinished_bodies": lambda at: hold(at, post("/v1/lookups", b" " * (7 << 20), length=8 << 20), 60),
    "metrics": lambda at: storm(at, get("/metrics"), 16, at.http),
    "docs": lambda at: storm(at, get("/docs"), 16, at.http),
    "ranks": ranks,
    "tokens": tokens,
    "no_reader": lambda at: hold(at, get("/openapi.json") * 20, 100),
    "lookups_4096": lookups,
    "invalid": lambda at: repeat(at, b"GARBAGE\r\n\r\n"),
    "slow_headers": lambda at: hold(at, HEAD, 500, drip=b"a: b\r\n"),
    "idle_connections": lambda at: hold(at, b"", CONNECTIONS),
}


# --------------------------------------------------------------------------- what the honest engine sees


@dataclass(frozen=True)
class Latencies:
    took_s: list[float]
    """Seconds of each lookup, in rising order."""
    errors: int

    @property
    def p99_ms(self) -> float:
        return 1000 * self.took_s[int(len(self.took_s) * 0.99)]

    @property
    def max_ms(self) -> float:
        return 1000 * self.took_s[-1]

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(sorted(self.took_s + other.took_s), self.errors + other.errors)


def honest(engine: Engine, keys: bytes, seconds: float) -> Latencies:
    """Makes lookups of resident keys, each with the release of the lease before it."""
    took_s, errors, beaten_s = [], 0, 0.0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if time.monotonic() - beaten_s > 1.0:
            engine.beat()
            beaten_s = time.monotonic()
        began_s = time.perf_counter()
        try:
            found = engine.client.lookup(s.Lookup(
                session=engine.session, member=engine.member, request=f"{random.getrandbits(64):x}", keys=keys
            ))
            errors += len(found.chunks) != len(keys) // 32
            if found.lease is not None:
                engine.client.release_later(found.lease, engine.session, [0])
        except KvdockError:
            errors += 1
        took_s.append(time.perf_counter() - began_s)
        time.sleep(PAUSE_S)  # an engine computes between two of its lookups
    return Latencies(sorted(took_s), errors)


def beside(name: str, engine: Engine, keys: bytes, server: ServerProcess, token: str, seconds: float) -> Latencies:
    """Runs `honest` beside a flood in another process, and ends that process."""
    arguments = json.dumps([server.unix, server.http, engine.session, engine.member, token, seconds + 0.5])
    with subprocess.Popen(
        [sys.executable, "-m", "bench.floods", "--attack", name, arguments], cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as attacker:
        try:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            return honest(engine, keys, seconds)
        finally:
            attacker.kill()


def most_memory_mib(pid: int) -> float:
    """The peak memory of the process, without the memory that it shares with engines now: pool and table."""
    words = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(words["VmHWM"].split()[0]) - int(words["RssShmem"].split()[0])) / 1024


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def attack(name: str, target: list[Any]) -> None:
    """The flooding process. `target`: both addresses, session, member, access token, seconds."""
    unix, http, session, member, token, seconds = target
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with suppress(OSError):
        FLOODS[name](Target(unix, http, session, member, token, time.monotonic() + seconds))


def measure(seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        access_file = f"{stack.enter_context(tempfile.TemporaryDirectory())}/access.toml"
        token = add_token(access_file, "flood", ["engine"])
        server = stack.enter_context(ServerProcess("serve", pool_bytes=64 * MIB, access_file=access_file))
        client = stack.enter_context(Client(server.unix, timeout_s=30.0))
        engine, keys = Engine(client, "honest"), chain(KEYS, "flooded")
        engine.store(keys)
        honest(engine, keys, 0.5)
        for name in (name for name in FLOODS if name != QUIET):
            quiet, seen = Latencies([], 0), Latencies([], 0)
            for _ in range(ROUNDS):
                quiet += beside(QUIET, engine, keys, server, token, seconds / ROUNDS)
                seen += beside(name, engine, keys, server, token, seconds / ROUNDS)
                time.sleep(0.2)  # the server closes the flood's connections before the next quiet round
            figures |= {f"{name}_p99_ms": seen.p99_ms, f"{name}_max_ms": seen.max_ms, f"{name}_errors": seen.errors,
                        f"{name}_ratio": seen.p99_ms / quiet.p99_ms}
        figures |= {"memory_mib": most_memory_mib(server.pid), "descriptors": descriptors(server.pid)}
        figures["found_afterwards"] = client.lookup(s.Lookup(
            session=engine.session, member=engine.member, request="after", keys=keys
        )).hit_tokens
        engine.close()
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.floods", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each flood")
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "TARGET"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.attack:
        print("begins", flush=True)
        attack(chosen.attack[0], json.loads(chosen.attack[1]))
        return 0
    figures = {name: round(value, 2) for name, value in measure(chosen.seconds).items()}
    print(json.dumps(figures) if chosen.json else "\n".join(f"{key:32} {value}" for key, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
