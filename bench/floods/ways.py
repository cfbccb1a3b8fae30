"""Requests as bytes, and the ways in which a flood sends them. A way goes on until its process is killed."""

from __future__ import annotations

import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from bench.floods.bodies import Body
from kvdock.client.transport import Address
from kvdock.protocol.forms import JSON, PACKED

HOST = b"Host: localhost\r\n"
TIMEOUT_S = 1.0
CROWD_S = 0.05
"""For so long a crowd's connections are left open, so that the server has answered what it was sent."""

# --------------------------------------------------------------------------- requests

def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\n".encode() + HOST + b"\r\n"


def post(path: str, body: bytes, length: int | None = None, media_type: str = JSON.media_type) -> bytes:
    return sent("POST", path, Body(body, media_type), length)


def packed(path: str, value: object) -> bytes:
    return post(path, PACKED.encode(value), media_type=PACKED.media_type)


def sent(method: str, path: str, body: Body, length: int | None = None) -> bytes:
    size = len(body.content) if length is None else length
    lines = f"Content-Type: {body.media_type}\r\nContent-Length: {size}\r\n\r\n"
    return f"{method} {path} HTTP/1.1\r\n".encode() + HOST + lines.encode() + body.content


# --------------------------------------------------------------------------- ways to send them


def connect(address: str) -> socket.socket:
    at = Address.parse(address)
    sock = socket.socket(socket.AF_UNIX if at.socket_path else socket.AF_INET)
    sock.settimeout(TIMEOUT_S)
    sock.connect(at.socket_path or (at.host, at.port))
    return sock


def repeat(address: str, first: bytes, then: bytes = b"") -> None:
    """Opens one connection after the other. On each it sends `first`, then `then` again and again until the server
    closes it."""
    while True:
        with suppress(OSError), connect(address) as sock:
            sock.sendall(first)
            while then:
                sock.sendall(then)
            sock.recv(1 << 16)


def storm(address: str, messages: Sequence[bytes], connections: int) -> None:
    """Makes as many calls as the server answers, on several connections."""
    following, socks = itertools.cycle(messages), dict[int, socket.socket]()
    while True:
        for at in range(connections):
            with suppress(OSError):
                if at not in socks:
                    socks[at] = connect(address)
                socks[at].sendall(next(following))
        for at in list(socks):
            if not _is_answered(socks[at]):
                socks.pop(at).close()


def converse(address: str, say: Callable[[bytes], bytes]) -> None:
    """Makes one call after the other. `say` makes each from the content of the answer before it, the first of a
    connection from b""."""
    while True:
        with suppress(OSError), connect(address) as sock:
            answer: tuple[int, bytes] | None = (0, b"")
            while answer is not None:
                sock.sendall(say(answer[1]))
                answer = answer_of(sock)


def _is_answered(sock: socket.socket) -> bool:
    """Whether an answer has come, and the connection goes on."""
    try:
        return answer_of(sock) is not None
    except OSError:
        return False


def answer_of(sock: socket.socket) -> tuple[int, bytes] | None:
    """(status, content) of the next answer. None: the connection has ended. OSError: it takes too long."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (piece := sock.recv(1 << 16)):
            return None
        found += piece
    head, _, content = found.partition(b"\r\n\r\n")
    missing = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0) - len(content)
    pieces = [content]
    while missing > 0:
        if not (piece := sock.recv(min(missing, 1 << 20))):
            return None
        pieces.append(piece)
        missing -= len(piece)
    return int(head[9:12]), b"".join(pieces)


def drink(address: str, message: bytes, connections: int) -> None:
    """Reads answers that are streams as fast as they come, and asks again when one has ended."""
    message, poll = message.replace(HOST, HOST + b"Connection: close\r\n"), select.poll()
    socks = dict[int, socket.socket]()
    while True:
        while len(socks) < connections:
            sock = connect(address)
            sock.sendall(message)
            socks[sock.fileno()] = sock
            poll.register(sock, select.POLLIN)
        for number, _ in poll.poll(100):
            with suppress(OSError):
                if socks[number].recv(1 << 18):
                    continue
            poll.unregister(number)
            socks.pop(number).close()


def hold(address: str, message: bytes, connections: int, *, drip: bytes = b"", drip_s: float = 0.1) -> None:
    """Opens many connections, sends a part of a message on each, and keeps them open. `drip`: what keeps them open; one
    that the server has closed is opened again."""
    socks = dict[int, socket.socket]()
    while True:
        for at in range(connections):
            try:
                if at not in socks:
                    socks[at] = connect(address)
                    socks[at].settimeout(0.2)
                    socks[at].sendall(message)
                elif drip:
                    socks[at].sendall(drip)
            except TimeoutError:
                pass  # the server does not read: then the connection is held all the same
            except OSError:
                if at in socks:
                    socks.pop(at).close()
        time.sleep(drip_s)  # between two pieces of `drip`


def greet(address: str, message: bytes, *, resets: bool = False, reads: bool = False) -> None:
    """Connects, sends something and ends the connection, as fast as it can. `resets`: by a reset."""
    while True:
        with suppress(OSError), connect(address) as sock:
            if message:
                sock.sendall(message)
            if reads:
                sock.recv(1 << 10)
            if resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def crowd(address: str, message: bytes, connections: int) -> None:
    """Opens many connections and ends all of them at once, again and again. With a message, whose answer it does not
    read, they end by a reset."""
    while True:
        socks = list[socket.socket]()
        with suppress(OSError):
            for _ in range(connections):
                socks.append(connect(address))
                if message:
                    socks[-1].sendall(message)
        time.sleep(CROWD_S)  # until the server has answered
        for sock in socks:
            sock.close()


def compute() -> None:
    """Computes on one core, without any call of the server."""
    while True:
        sum(range(10_000))
