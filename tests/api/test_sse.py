"""What both streams of server-sent events have in common: silence, waking, and how many may read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from api_helpers import PATIENCE_S, ServerProcess, access_file, eventually, http_connection, raw

from kvdock.api.access.access_file import entry
from kvdock.api.feeds import sse
from kvdock.api.feeds.sse import IDLE, MOST_READERS, RETRY, SLICE_BYTES, WOKEN_OF_TURN, Stream, piece_of
from kvdock.protocol.errors import ApiError

PATHS = ("/v1/events", "/v1/kv-events")


class Said(Stream):
    """Sends what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[bytes] = []

    def say(self, *pieces: bytes, ends: bool = False) -> None:
        self.waiting += pieces
        self._is_ending = ends
        self._wake()

    def pieces(self) -> Iterator[bytes | None]:
        while True:
            yield self.waiting.pop(0) if self.waiting else None


def test_a_silent_stream_sends_comments_and_what_comes_wakes_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stream = Said()
        reading = stream._sent(stream.pieces(), "", lambda: True)
        monkeypatch.setattr(sse, "IDLE_S", 0.01)
        assert [await anext(reading), await anext(reading)] == [IDLE, IDLE] and len(stream.readers) == 1
        monkeypatch.setattr(sse, "IDLE_S", 3600.0)
        next_one = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)  # the reader looks, and waits
        stream.say(b"a", b"b", ends=True)
        assert await asyncio.wait_for(next_one, 10.0) == b"ab", "joined"
        assert [piece async for piece in reading] == [], "it ends when all is said"
        assert len(stream.readers) == 0

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


@pytest.mark.security
def test_a_body_is_made_in_slices_and_others_have_a_turn_after_each() -> None:
    """However many read at once, and until the reader may no longer."""
    async def scenario() -> None:
        stream, made, admitted = Said(), list[int](), True

        def pieces(reader: int) -> Iterator[bytes | None]:
            for _ in range(8):
                made.append(reader)
                yield b"x" * (SLICE_BYTES // 2)

        async def read(reader: int) -> int:
            return sum([len(piece) async for piece in stream._sent(pieces(reader), "", lambda: admitted)])

        readers = [asyncio.ensure_future(read(reader)) for reader in range(3)]
        for turn in range(4):
            before = len(made)
            await asyncio.sleep(0)
            assert len(made) - before <= 2, f"turn {turn}: one slice, for one of the readers"
        assert [await one for one in readers] == [4 * SLICE_BYTES] * 3
        rest = stream._sent(pieces(9), "", lambda: admitted)
        assert len(await anext(rest)) == SLICE_BYTES
        admitted = False
        assert [piece async for piece in rest] == []

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


@pytest.mark.security
def test_of_sixty_readers_that_wait_a_few_are_woken_in_each_turn() -> None:
    async def scenario() -> None:
        stream, went_on, turn = Said(), list[int](), 0

        def is_admitted() -> bool:
            went_on.append(turn)
            return True

        async def read() -> bytes:
            return b"".join([piece async for piece in stream._sent(stream.pieces(), "", is_admitted)])

        readers = [asyncio.ensure_future(read()) for _ in range(60)]
        while len(stream._waiting) < 60:
            await asyncio.sleep(0)
        went_on.clear()
        stream.say(b"last", ends=True)
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(0)
            turn += 1
        assert sorted(await asyncio.gather(*readers)) == [b""] * 59 + [b"last"]
        assert max(Counter(went_on).values()) <= WOKEN_OF_TURN + 1, "and the one that has read"

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_an_event_has_an_id_only_where_readers_may_come_back_behind_it() -> None:
    assert piece_of("kv", b"{}", "7-1") == b"id: 7-1\nevent: kv\ndata: {}\n\n"
    assert piece_of("kv", b"{}", "") == b"event: kv\ndata: {}\n\n"
    assert RETRY.startswith(b"retry: ") and IDLE.startswith(b":") and IDLE.endswith(b"\n\n")


def is_read(server: ServerProcess, path: str) -> bool:
    return raw(server.unix, "GET", path)[0] == 200


@pytest.mark.security
def test_each_stream_has_so_many_readers_and_a_place_is_free_once_one_has_gone() -> None:
    with ServerProcess(observe="stream,kv_events") as server:
        for path in PATHS:
            with ExitStack() as readers:
                for _ in range(MOST_READERS):
                    reader = readers.enter_context(closing(http_connection(server.unix)))
                    reader.request("GET", f"{path}?follow=true")
                    assert reader.getresponse().readline() == RETRY.splitlines(keepends=True)[0]
                status, _, body = raw(server.unix, "GET", path)
                problem = json.loads(body)
                assert (status, problem["code"], problem["found"]) == (503, "too_busy", MOST_READERS)
                reader.close()
                eventually(partial(is_read, server, path))


@pytest.mark.security
def test_a_token_of_a_tenant_reads_a_stream_of_which_another_has_all_places(tmp_path: Path) -> None:
    token = "r" * 43
    granted = access_file(tmp_path, entry("reader", token, ["read"], "a"))
    with ServerProcess(observe="stream,kv_events", access_file=str(granted)) as server:
        for path in PATHS:
            with ExitStack() as readers:
                oldest, *_ = [
                    _follow(readers.enter_context(closing(http_connection(server.unix))), path)
                    for _ in range(MOST_READERS)
                ]
                status, _, _ = raw(server.http, "GET", path, headers={"Authorization": f"Bearer {token}"})
                assert status == 200
                oldest.read()  # to its end, which is whole: so its client comes back


def _follow(connection: HTTPConnection, path: str) -> HTTPResponse:
    """The answer, of which the first event has been read."""
    connection.request("GET", f"{path}?follow=true")
    answer = connection.getresponse()
    assert answer.readline() + answer.readline() == RETRY
    return answer


@pytest.mark.security
def test_a_tenant_that_has_all_places_gives_its_oldest_reader_s_to_another() -> None:
    """A tenant with 64 readers kept all others from the events."""
    async def scenario() -> None:
        stream, readings = Said(), list[AsyncIterator[bytes]]()

        async def begin(tenant: str) -> asyncio.Future[bytes]:
            stream.make_room(tenant)
            before = len(stream.readers)
            readings.append(stream._sent(stream.pieces(), tenant, lambda: True))
            waiting = asyncio.ensure_future(anext(readings[-1]))
            while len(stream.readers) == before:
                await asyncio.sleep(0)
            return waiting

        first = [await begin("a") for _ in range(MOST_READERS)]
        others = [await begin("b") for _ in range(MOST_READERS // 2)]
        for tenant in "a", "b":
            with pytest.raises(ApiError, match="too many others"):
                stream.make_room(tenant)
        for ended in first[: len(others)]:
            with pytest.raises(StopAsyncIteration):
                await ended
        assert len(stream.readers) == MOST_READERS and not any(one.done() for one in first[len(others) :] + others)
        third = await begin("c")
        assert len(stream.readers) == MOST_READERS, "a third tenant has a place, too"
        for waiting in (*first, *others, third):
            waiting.cancel()
        await asyncio.gather(*first, *others, third, return_exceptions=True)
        assert len(stream.readers) == 0

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
