"""Whoever asks for how much, a turn of the event loop has one slice of long work, one call of people or strangers and a
few reads."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvicorn
import uvloop
from api_helpers import PATIENCE_S
from app_rig import opened
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from kvdock.api import server
from kvdock.api.http.connection import Connection, connection_class
from kvdock.api.http.crowd import MOST_OF_PROCESS, MOST_OF_USER, Crowd
from kvdock.api.http.limits import BodyCapacity, BodyShare, ConnectionLimits
from kvdock.api.http.wire import read_all
from kvdock.api.record.counters import Counters
from kvdock.api.record.tally import Tally
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.server import bind_tcp, bind_unix
from kvdock.api.turns import (
    CALLS_WAITING,
    ENDS_OF_TURN,
    ENGINE_READS_OF_TURN,
    LONG_READ_BYTES,
    READS_OF_TURN,
    SHORT_READ_BYTES,
    SLICE_S,
    FairQueue,
    ReadTurns,
    SharedTurns,
    Slices,
    next_call,
    next_slice,
)

pytestmark = pytest.mark.security


def connections(limit: int) -> type[Connection]:
    meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
    return connection_class(ConnectionLimits(limit, limit), meter)


@asynccontextmanager
async def serving(app: ASGIApp, kind: type[Connection], sock: socket.socket) -> AsyncIterator[uvicorn.Server]:
    config = server.uvicorn_config(app, kind)
    config.lifespan = "off"
    found = uvicorn.Server(config)
    task = asyncio.create_task(found.serve([sock]))
    while not found.started:
        await asyncio.sleep(0.01)
    try:
        yield found
    finally:
        found.should_exit = True
        await task


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class TurnNumber:
    """Counts the turns of the running event loop, as long as the block lasts."""

    def __init__(self) -> None:
        self.now = 0

    async def __aenter__(self) -> TurnNumber:
        self._counting = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._counting.cancel()

    async def _count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("wait", [next_slice, next_call])
def test_one_goes_on_in_each_turn_in_the_order_in_which_they_came(wait: Callable[[], Awaitable[None]]) -> None:
    async def story() -> list[tuple[int, int]]:
        went_on = list[tuple[int, int]]()
        async with TurnNumber() as turn:
            async def work(number: int) -> None:
                await wait()
                went_on.append((number, turn.now))

            waiting = [asyncio.create_task(work(number)) for number in range(20)]
            await asyncio.sleep(0)
            waiting[7].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return went_on

    went_on = asyncio.run(story())
    assert [number for number, _ in went_on] == [number for number in range(20) if number != 7]
    assert max(Counter(turn for _, turn in went_on).values()) == 1


def test_what_long_lookups_count_has_a_turn_for_each() -> None:
    """And short ones share a turn, so that no more wait than come."""
    def spin() -> None:
        until_s = time.thread_time() + SLICE_S
        while time.thread_time() < until_s:
            pass

    async def turns_of(tally: Tally, count: Callable[[], None], times: int) -> list[int]:
        counted = list[int]()
        async with TurnNumber() as turn:
            def note() -> None:
                count()
                counted.append(turn.now)

            for _ in range(times):
                tally._later.count(note)
            while len(counted) < times:
                await asyncio.sleep(0)
        return counted

    with opened() as rig:
        tally = rig.parts.sampler._tally
        asyncio.run(tally.catch_up())
        assert max(Counter(asyncio.run(turns_of(tally, spin, 10))).values()) == 1
        assert max(Counter(asyncio.run(turns_of(tally, lambda: None, 100))).values()) > 10


def test_calls_and_slices_of_long_work_take_turns() -> None:
    """Else a turn would have one of each, twice as much."""
    async def story() -> list[tuple[str, int]]:
        went_on = list[tuple[str, int]]()
        async with TurnNumber() as turn:
            async def work(kind: str, wait: Callable[[], Awaitable[None]]) -> None:
                for _ in range(5):
                    await wait()
                    went_on.append((kind, turn.now))

            waits = {"call": next_call, "slice": next_slice}
            waiting = [asyncio.create_task(work(kind, wait)) for _ in range(4) for kind, wait in waits.items()]
            await asyncio.sleep(0)
            waiting[-1].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await next_call()  # what was cancelled holds up nobody
            await next_slice()
        return went_on

    went_on = asyncio.run(story())
    assert max(Counter(turn for _, turn in went_on[1:]).values()) == 1, "the first call has the turn in which it comes"
    assert all(one != other for (one, _), (other, _) in itertools.pairwise(went_on[1:30]))


@pytest.mark.parametrize("turns", range(6))
def test_a_turn_that_is_owed_to_what_was_cancelled_holds_up_nobody(turns: int) -> None:
    """In one of these turns it was refused before it is cancelled."""
    async def story() -> None:
        shared = SharedTurns()
        calls, slices = FairQueue(shared), FairQueue(shared)
        waiting = [asyncio.create_task(calls.next()) for _ in range(3)]
        slice_ = asyncio.create_task(slices.later())
        for _ in range(turns):
            await asyncio.sleep(0)
        slice_.cancel()
        await asyncio.gather(*waiting, slice_, return_exceptions=True)
        await calls.next()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_work_gives_a_turn_after_a_slice_and_not_after_each_step() -> None:
    async def story() -> tuple[int, int]:
        slices, steps = Slices(), 60
        async with TurnNumber() as turn:
            await asyncio.sleep(0)
            before = turn.now
            for _ in range(steps):
                until_s = time.thread_time() + SLICE_S / 5
                while time.thread_time() < until_s:
                    pass  # works
                await slices.give_turn()
            return turn.now - before, steps

    turns, steps = asyncio.run(story())
    assert 0 < turns < steps / 2


def test_pieces_of_work_that_follow_one_another_share_a_slice() -> None:
    """Else a call that walks ten lists has ten slices in one turn."""
    async def story() -> int:
        async with TurnNumber() as turn:
            await next_slice()
            before = turn.now
            for _ in range(20):
                until_s = time.thread_time() + SLICE_S / 5
                while time.thread_time() < until_s:
                    pass  # works
                await Slices().give_turn()
            return turn.now - before

    assert asyncio.run(story()) >= 3


def test_bodies_whose_clients_have_gone_are_given_back_one_in_a_turn() -> None:
    async def story() -> list[int]:
        ended, capacity = list[int](), BodyCapacity.for_bodies_of(1 << 20)
        async with TurnNumber() as turn:
            async def read() -> None:
                messages = iter([
                    {"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"},
                ])

                async def receive() -> Any:
                    return next(messages)

                with suppress(ClientDisconnect):
                    await read_all(receive, "", 1 << 20, BodyShare(capacity, None))
                ended.append(turn.now)

            await asyncio.gather(*(read() for _ in range(4)))
        return ended

    assert len(set(asyncio.run(story()))) == 4


def test_a_turn_has_a_few_short_reads_or_a_long_one() -> None:
    async def story() -> list[tuple[int, int]]:
        reads, handled = ReadTurns(), list[tuple[int, int]]()
        async with TurnNumber() as turn:
            def handle(size: int) -> None:
                handled.append((turn.now, size))

            for size in [100] * 10 + [LONG_READ_BYTES] * 3 + [100] * 2:
                if reads.take(size):
                    handle(size)
                else:
                    reads.wait("one client", partial(handle, size), size)
            while len(handled) < 15:
                await asyncio.sleep(0)
        return handled

    handled = asyncio.run(story())
    assert [size for _, size in handled] == [100] * 10 + [LONG_READ_BYTES] * 3 + [100] * 2
    by_turn = [[size for _, size in of] for _, of in itertools.groupby(handled, key=lambda one: one[0])]
    assert by_turn[:2] == [[100] * READS_OF_TURN] * 2
    assert all(sum(sizes) <= LONG_READ_BYTES + READS_OF_TURN * 100 for sizes in by_turn)


def test_no_read_overtakes_another_that_waited_for_calls() -> None:
    async def story() -> bool:
        """Each turn, calls come before `look`, and that before reads."""
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[bool] = loop.create_future()
        calls = [asyncio.create_task(next_call()) for _ in range(3)]
        await asyncio.sleep(0)
        reads, was_read = ReadTurns(calls_waiting=0), asyncio.Event()

        def look() -> None:
            if was_read.is_set():
                looked.set_result(False)
            elif reads.take(1):
                looked.set_result(True)
            else:
                loop.call_soon(look)

        loop.call_soon(look)
        reads.wait("a client", was_read.set, 1)
        overtook = await looked
        await asyncio.gather(*calls)
        return overtook

    assert not asyncio.run(story())


def test_nothing_is_read_while_many_calls_wait() -> None:
    async def story() -> bool:
        calls = [asyncio.create_task(next_call()) for _ in range(CALLS_WAITING + 5)]
        await asyncio.sleep(0)
        reads, was_read = ReadTurns(), asyncio.Event()
        assert not reads.take(1)
        reads.wait("a client", was_read.set, 1)
        await was_read.wait()
        still_wait = sum(not call.done() for call in calls)
        await asyncio.gather(*calls)
        return 0 < still_wait <= CALLS_WAITING

    assert asyncio.run(story())


def test_what_a_refused_body_goes_on_with_is_not_read_in_one_turn() -> None:
    """A real connection, whose client sends 8 MiB that nobody wants, faster than they are read."""
    body, handled = bytes(8 << 20), list[tuple[int, int]]()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def send_all(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert sock.recv(1000).startswith(b"HTTP/1.1 413")

    async def story() -> None:
        async with TurnNumber() as turn:
            class Watched(connections(4)):  # type: ignore[misc]  # a class of values
                def _handle(self, data: bytes) -> None:
                    if not handled:
                        time.sleep(0.2)  # until there is more to read than one read takes
                    handled.append((turn.now, len(data)))
                    super()._handle(data)

            with bind_tcp("127.0.0.1", 0) as sock:
                async with serving(refuse, Watched, sock):
                    await asyncio.to_thread(send_all, sock.getsockname()[1])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
    assert sum(size for _, size in handled) > len(body)
    long_reads = Counter(turn for turn, size in handled if size >= LONG_READ_BYTES)
    assert max(long_reads.values()) == 1, long_reads.most_common(3)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("is_reset", [False, True])
def test_connections_that_end_together_are_closed_in_many_turns(is_reset: bool) -> None:
    """An engine that is killed ends all its connections at once; to close one takes some 15 µs. The kernel resets a
    connection whose answer was not read."""
    ended, count = list[int](), 100

    async def story(path: Path) -> None:
        async with TurnNumber() as turn:
            class Watched(connections(count)):  # type: ignore[misc]  # a class of values
                def _end(self, exc: Exception | None, kept: int | None = None) -> None:
                    ended.append(turn.now)
                    assert (exc is not None) is is_reset
                    super()._end(exc, kept)

            with bind_unix(str(path)) as sock:
                async with serving(answer, Watched, sock) as server_now:
                    before = descriptors()
                    clients = [socket.socket(socket.AF_UNIX) for _ in range(count)]
                    for client in clients:
                        client.connect(str(path))
                        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                        if not is_reset:
                            assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")
                    while server_now.server_state.total_requests < count:
                        await asyncio.sleep(0.01)
                    for client in clients:  # in one turn
                        client.close()
                    while len(ended) < count:
                        await asyncio.sleep(0.01)
                    assert not server_now.server_state.connections and descriptors() == before

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    assert max(Counter(ended).values()) <= ENDS_OF_TURN


def test_the_ends_of_a_crowd_are_read_in_many_turns() -> None:
    """A process with 300 connections ends. The kernel names all of them at once; to read the end of each takes some
    8 µs, so one turn would have them all."""
    read, count = list[int](), 300

    async def story(path: Path) -> None:
        async with TurnNumber() as turn:
            class Watched(connections(count)):  # type: ignore[misc]  # a class of values
                def eof_received(self) -> bool:
                    read.append(turn.now)
                    return bool(super().eof_received())

            with bind_unix(str(path)) as sock:
                async with serving(answer, Watched, sock) as server_now:
                    before = descriptors()
                    clients = [socket.socket(socket.AF_UNIX) for _ in range(count)]
                    for client in clients:
                        client.connect(str(path))
                    while len(Watched.crowd._waiting) < count - MOST_OF_PROCESS:  # the last comes there a turn later
                        await asyncio.sleep(0.01)
                    for client in clients:  # in one turn
                        client.close()
                    while server_now.server_state.connections:
                        await asyncio.sleep(0.01)
                    assert descriptors() == before and not Watched.crowd._waiting and not Watched.crowd._open

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    assert len(read) == count and max(Counter(read).values()) <= 2 * ENDS_OF_TURN


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_each_connection_of_a_crowd_is_answered(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Short requests, several in one write, and bodies of many reads, some of which come in the next call."""
    count, head = 3 * MOST_OF_PROCESS, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    long = head % (5 * LONG_READ_BYTES) + bytes(5 * LONG_READ_BYTES)
    got = list[int]()

    async def count_body(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        got.append(size)
        await answer(scope, receive, send)

    async def ask(path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        for messages in (1, 3):
            for _ in range(2):
                writer.write((head % 1 + b"x") * messages)
                for _ in range(messages):
                    await reader.readuntil(b"\r\n\r\n")
        writer.write(long + head % 2 + b"x")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def story(path: Path) -> None:
        with bind_unix(str(path)) as sock:
            kind = connections(count)
            async with serving(count_body, kind, sock) as server_now:
                await asyncio.gather(*(ask(path) for _ in range(count)))
                while server_now.server_state.connections:
                    await asyncio.sleep(0.01)
                assert not kind.crowd._waiting

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    assert Counter(got) == {1: 8 * count, 5 * LONG_READ_BYTES: count, 2: count}


def test_many_processes_of_one_user_are_a_crowd_too() -> None:
    crowd = Crowd()
    began = [crowd.begin("user 7", process) for process in range(MOST_OF_USER + 1)]
    assert began == [False] * MOST_OF_USER + [True] and not crowd.begin("user 8", 1)
    crowd.end("user 7", 0)
    crowd.end("user 7", 1)
    assert not crowd.begin("user 7", 1)


def test_reads_of_engines_come_by_turns_and_short_ones_first() -> None:
    """Thirty engines ask for much at the same moment, and thirty for little."""
    count, handled = 30, list[tuple[int, int]]()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    messages = [head % size + bytes(size) for size in (2 * SHORT_READ_BYTES, 1)]

    async def story(path: Path) -> None:
        async with TurnNumber() as turn:
            class Watched(connections(2 * count)):  # type: ignore[misc]  # a class of values
                def _handle(self, data: bytes) -> None:
                    handled.append((turn.now, len(data)))
                    super()._handle(data)

            with bind_unix(str(path)) as sock:
                async with serving(answer, Watched, sock) as server_now:
                    clients = [socket.socket(socket.AF_UNIX) for _ in range(2 * count)]
                    for client in clients:
                        client.connect(str(path))
                    while len(server_now.server_state.connections) < 2 * count:
                        await asyncio.sleep(0.01)
                    for at, client in enumerate(clients):  # in one turn
                        client.sendall(messages[at // count])
                    for client in clients:
                        assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")
                        client.close()

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    long = [turn for turn, size in handled if size >= SHORT_READ_BYTES]
    short = [turn for turn, size in handled if size < SHORT_READ_BYTES]
    assert len(long) == len(short) == count
    assert max(Counter(long).values()) == 1 and max(Counter(short).values()) == ENGINE_READS_OF_TURN
    assert max(short) < max(long)


MANY = """
import socket, sys
socks = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for sock in socks:
    sock.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.readline()
for sock in socks:
    sock.sendall(b"GET /many HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
print("sent", flush=True)
sys.stdin.readline()
"""
"""A process with many connections, which asks on all of them at once."""


def test_a_process_with_one_connection_does_not_wait_for_all_of_one_with_sixty() -> None:
    count, handled = 60, list[bytes]()

    async def story(path: Path) -> None:
        class Watched(connections(2 * count)):  # type: ignore[misc]  # a class of values
            def _handle(self, data: bytes) -> None:
                handled.append(data.split()[1])
                super()._handle(data)

        with bind_unix(str(path)) as sock, socket.socket(socket.AF_UNIX) as one:
            async with serving(answer, Watched, sock) as server_now:
                with subprocess.Popen(
                    [sys.executable, "-c", MANY, str(path), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                ) as many:
                    assert many.stdin is not None and many.stdout is not None
                    one.connect(str(path))
                    while len(server_now.server_state.connections) < count + 1:
                        await asyncio.sleep(0.01)
                    assert many.stdout.readline() == b"connected\n"
                    many.stdin.write(b"\n")  # and in the same turn:
                    many.stdin.flush()
                    assert many.stdout.readline() == b"sent\n"
                    one.sendall(b"GET /one HTTP/1.1\r\nHost: x\r\n\r\n")
                    while len(handled) < count + 1:
                        await asyncio.sleep(0.01)
                    many.stdin.close()

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    assert handled.index(b"/one") <= 2 * ENGINE_READS_OF_TURN
    assert Counter(handled) == {b"/one": 1, b"/many": count}


def test_calls_of_people_over_the_unix_socket_wait_for_those_before_and_not_for_clients_that_left() -> None:
    count, before, started = 60, 10 * CALLS_WAITING, list[str]()

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(scope["path"])
        await answer(scope, receive, send)

    async def story(path: Path) -> None:
        with bind_unix(str(path)) as sock:
            async with serving(called, connections(2 * count), sock) as server_now:
                clients = [socket.socket(socket.AF_UNIX) for _ in range(count)]
                for client in clients:
                    client.connect(str(path))
                while len(server_now.server_state.connections) < count:
                    await asyncio.sleep(0.01)
                waiting = [asyncio.create_task(next_call()) for _ in range(before)]
                await asyncio.sleep(0)
                for number, client in enumerate(clients):
                    client.sendall(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number)
                while any(getattr(one, "cycle", None) is None for one in server_now.server_state.connections):
                    await asyncio.sleep(0)
                assert not started
                for client in clients[::2]:
                    client.close()
                await asyncio.gather(*waiting)
                for client in clients[1::2]:
                    assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")
                    client.close()

    with TemporaryDirectory(prefix="kvdock-") as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(story(Path(folder) / "s.sock"), PATIENCE_S))
    assert sorted(started) == sorted(f"/{number}" for number in range(1, count, 2))
