"""The client's own HTTP: one whole answer or none, and never the answer to another call."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from api_helpers import LATE_S, PATIENCE_S, soon
from peer_helpers import listener, reply

from kvdock.client.transport import MAX_HEAD_BYTES, Address, Transport
from kvdock.protocol.errors import ServerUnavailable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


def answers(folder: Path, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, bytes]:
    """What a call makes of an answer that arrives in these pieces, after which the peer hangs up."""

    def serve(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)

    with listener(folder, serve) as address:
        transport = Transport(Address.parse(address))
        try:
            return transport.call("GET", "/", None, PATIENCE_S)
        finally:
            transport.close()


@pytest.mark.parametrize("pieces", [
    [HEAD + b"hello"],
    [HEAD, b"hello"],
    [HEAD[:9], HEAD[9:30], HEAD[30:] + b"he", b"llo"],
    [bytes([byte]) for byte in HEAD + b"hello"],
    [HEAD.replace(b"content-length", b"Content-LENGTH").replace(b": ", b":") + b"hello"],
    [b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
], ids=["whole", "two", "torn", "bytes", "case", "1.0"])
def test_an_answer_is_whole_however_it_arrives(tmp_path: Path, pieces: list[bytes]) -> None:
    assert answers(tmp_path, *pieces, pause_s=0.001) == (200, b"hello")


def test_a_long_answer_is_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    assert answers(tmp_path, reply(content)) == (200, content)


def test_no_content_is_an_answer(tmp_path: Path) -> None:
    assert answers(tmp_path, b"HTTP/1.1 204 No Content\r\n\r\n") == (204, b"")


@pytest.mark.parametrize("content", [
    b"", b"HTTP/1.1 200", HEAD, HEAD + b"hell", HEAD + b"hello!",
    b"HTTP/1.1 200 OK\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999999999\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"hello",
    b"HTTP/2 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    b"x" * 2 * MAX_HEAD_BYTES,
], ids=["nothing", "half a line", "no body", "short", "long", "no length", "no number", "negative", "two lengths",
        "too long", "chunked", "continue", "version", "endless head"])
def test_half_an_answer_or_an_odd_one_is_none(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ServerUnavailable):
        answers(tmp_path, content)


@pytest.mark.parametrize("last", [b"connection: close", b"Connection: foo, Close", b""])
def test_a_connection_that_will_close_is_not_used_again(tmp_path: Path, last: bytes) -> None:
    served: list[int] = []

    def serve(connection: socket.socket, number: int) -> None:
        for _ in range(2 if not last else 1):
            if connection.recv(65536):
                served.append(number)
                connection.sendall(HEAD[:-2] + (last + b"\r\n" if last else b"") + b"\r\nhello")
        if last:
            connection.recv(65536)  # the client closes; a second request here would never be answered

    with listener(tmp_path, serve) as address:
        transport = Transport(Address.parse(address))
        for _ in range(2):
            assert transport.call("GET", "/", None, PATIENCE_S) == (200, b"hello")
        transport.close()
    assert served == ([0, 1] if last else [0, 0])


@pytest.mark.parametrize("size", [5, 8 << 20], ids=["small", "more than the socket takes at once"])
def test_a_request_that_was_begun_is_sent_at_once_and_its_answer_read_later(tmp_path: Path, size: int) -> None:
    came = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        for missing in (0, size):
            asked = connection.recv(65536)
            while (end := asked.find(b"\r\n\r\n")) < 0 or len(asked) < end + 4 + missing:
                if missing:
                    came.set()
                asked += connection.recv(65536)
            came.set()
            connection.sendall(reply(b"%d" % (len(asked) - end - 4)))

    with listener(tmp_path, serve) as address:
        transport = Transport(Address.parse(address))
        assert transport.begin("POST", "/", b"", b"a/b") is None, "no connection is open"
        assert transport.call("GET", "/", None, PATIENCE_S) == (200, b"0")
        came.clear()
        begun = transport.begin("POST", "/", bytes(size), b"a/b")
        assert begun is not None and came.wait(PATIENCE_S) and begun.sent > 0
        assert transport.begin("POST", "/", b"", b"a/b") is None, "the connection is in use"
        assert transport.finish(begun, PATIENCE_S) == (200, b"%d" % size)
        transport.close()


def test_a_begun_request_whose_connection_was_lost_is_sent_once_more(tmp_path: Path) -> None:
    served = []

    def serve(connection: socket.socket, number: int) -> None:
        for _ in range(1 if number else 2):
            asked = connection.recv(65536)
            served.append((number, asked[:5]))
            if number or b"GET" in asked:
                connection.sendall(reply(b"hello"))

    with listener(tmp_path, serve) as address:
        transport = Transport(Address.parse(address))
        transport.call("GET", "/", None, PATIENCE_S)
        begun = transport.begin("POST", "/", b"x", b"a/b")
        assert begun is not None and transport.finish(begun, PATIENCE_S) == (200, b"hello")
        transport.close()
    assert served == [(0, b"GET /"), (0, b"POST "), (1, b"POST ")]


def test_an_answer_that_trickles_ends_at_the_timeout(tmp_path: Path) -> None:
    stop = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        until_s = time.monotonic() + LATE_S
        while not stop.wait(0.02) and time.monotonic() < until_s:
            try:
                connection.sendall(b"H")
            except OSError:
                return

    with listener(tmp_path, serve) as address:
        transport = Transport(Address.parse(address))
        began = time.monotonic()
        with soon(), pytest.raises(ServerUnavailable, match=r"no answer within 0\.3 s"):
            transport.call("GET", "/", None, 0.3)
        assert time.monotonic() - began > 0.25
        stop.set()
        transport.close()


def test_a_peer_that_reads_nothing_ends_at_the_timeout(tmp_path: Path) -> None:
    done = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        done.wait(PATIENCE_S)

    with listener(tmp_path, serve) as address:
        transport = Transport(Address.parse(address))
        with pytest.raises(ServerUnavailable, match="no answer within"):
            transport.call("POST", "/", bytes(8 << 20), 0.2)
        done.set()
        transport.close()


def test_a_full_backlog_is_waited_for_and_then_unavailable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        path = str(tmp_path / "full.sock")
        listening.bind(path)
        listening.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(path)
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="no answer within"):
            Transport(Address.parse(f"unix:{path}")).call("GET", "/", None, 0.2)
        assert time.monotonic() - began > 0.15
        for sock in waiting:
            sock.close()


def test_threads_share_a_client_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    def serve(connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(65536):
                connection.sendall(reply(asked.split(b" ")[1]))

    with socket.socket(socket.AF_UNIX) as listening:
        path = str(tmp_path / "echo.sock")
        listening.bind(path)
        listening.listen()
        servers = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                servers.append(threading.Thread(target=serve, args=(connection,)))
                servers[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        transport = Transport(Address.parse(f"unix:{path}"), keep=3)
        wrong: list[bytes] = []

        def ask(who: int) -> None:
            for number in range(50):
                _, content = transport.call("GET", f"/{who}/{number}", None, PATIENCE_S)
                if content != f"/{who}/{number}".encode():
                    wrong.append(content)

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert wrong == []
        transport.close()
        listening.shutdown(socket.SHUT_RDWR)
        for thread in [accepting, *servers]:
            thread.join(10)
