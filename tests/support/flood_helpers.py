"""Clients that keep to no rule: raw bytes over either kind of socket, and a server with little patience."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from api_helpers import OPERATOR, PATIENCE_S, access_file, eventually, small_pool

from kvdock.api.access.access_file import AccessFile
from kvdock.api.build import Parts, build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.http.pace import Pace
from kvdock.api.pool.pool import open_pool
from kvdock.api.server import bind_tcp, bind_unix, connections_of, uvicorn_config
from kvdock.api.settings import Settings
from kvdock.client.transport import Address

LIMITS = ConnectionLimits(tcp_connections=64, unix_connections=256)


def wire(address: str, timeout_s: float = PATIENCE_S) -> socket.socket:
    """A connection of its own."""
    at = Address.parse(address)
    sock = socket.socket(socket.AF_UNIX if at.socket_path else socket.AF_INET)
    sock.settimeout(timeout_s)
    sock.connect(at.socket_path or (at.host, at.port))
    return sock


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection. TimeoutError if it does not."""
    found = b""
    try:
        while piece := sock.recv(1 << 16):
            found += piece
    except (ConnectionResetError, BrokenPipeError):
        pass  # it closed while bytes of ours were on their way
    return found


def answered(sock: socket.socket) -> tuple[int, bytes]:
    """(status, body) of the next answer; the connection stays open."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = sock.recv(1 << 16)
        assert piece, found
        found += piece
    head, _, content = found.partition(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    while len(content) < length:
        content += sock.recv(1 << 16)
    return int(head[9:12]), content


def send_all(sock: socket.socket, data: bytes) -> None:
    """As far as the server lets it."""
    with suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
        sock.sendall(data)


def until_closed(address: str, data: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """What one connection gets for these bytes until the server closes it."""
    with wire(address, timeout_s) as sock:
        send_all(sock, data)
        return rest(sock)


class Refused(NamedTuple):
    status: int
    headers: dict[str, str]
    problem: dict[str, Any]


def refusal_in(answer: bytes) -> Refused:
    """The last answer of a connection, which must be a problem."""
    head, _, content = answer[answer.rindex(b"HTTP/1.1 "):].partition(b"\r\n\r\n")
    line, *lines = head.decode("ascii").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines)}
    assert headers["content-type"] == "application/problem+json", answer
    assert int(headers["content-length"]) == len(content)
    return Refused(int(line.split()[1]), headers, json.loads(content))


def request(method: str, path: str, body: bytes = b"", *, length: int | None = None, host: str = "localhost") -> bytes:
    """With the operator's token. `length`: of a body that does not end with these bytes."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {OPERATOR}\r\n"
    if body or length is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return head.encode() + b"\r\n" + body


class Quick(NamedTuple):
    unix: str
    http: str
    parts: Parts


@contextmanager
def quick_server(folder: str, *tokens: str, pace: Pace | None = None, **limits: Any) -> Iterator[Quick]:
    """The real application and connections in a thread, with other limits than the server's own. `tokens`: more entries
    of its access file."""
    path = str(access_file(Path(folder), *tokens))
    settings = Settings.load(small_pool(socket_path=f"{folder}/quick.sock", access_file=path))
    pool = open_pool(settings, secrets.randbits)
    loop = asyncio.new_event_loop()
    try:
        with bind_tcp("127.0.0.1", 0) as tcp, bind_unix(settings.socket_path) as unix:
            parts = build(settings, pool, AccessFile(path), Clocks())
            app = create_app(settings, parts)
            config = uvicorn_config(app, connections_of(replace(LIMITS, **limits), parts, pace))
            server = uvicorn.Server(config)
            port = tcp.getsockname()[1]
            thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([tcp, unix]),))
            thread.start()
            try:
                eventually(lambda: server.started)
                yield Quick(f"unix:{settings.socket_path}", f"http://127.0.0.1:{port}", parts)
            finally:
                server.should_exit = True
                thread.join()
    finally:
        loop.close()
        pool.close()
