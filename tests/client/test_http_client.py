"""The httpx clients against a real server: the same calls, answers and errors as the engine's own client."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from api_helpers import OPERATOR, Engine, ServerProcess, attach, keys, unique

from kvdock.client.client import Client
from kvdock.client.http_client import AsyncHttpClient, HttpClient
from kvdock.protocol import admin_schemas as a, schemas as s
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Hint


@pytest.fixture(scope="module")
def engine(server: ServerProcess) -> Iterator[Engine]:
    with Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(4, "http"))
        yield engine
        engine.leave()


@pytest.fixture(params=["unix", "http"])
def address(request: pytest.FixtureRequest, server: ServerProcess) -> str:
    return str(getattr(server, request.param))


def lookup_body(engine: Engine, **more: Any) -> s.Lookup:
    return s.Lookup(
        session=engine.session, member=engine.member, request=unique("r"), keys=keys(4, "http"), **more
    )


@pytest.mark.security
def test_no_log_of_httpx_has_a_sessions_secret(address: str, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    beat = s.Heartbeat(member=engine.member)

    async def async_beat() -> None:
        async with AsyncHttpClient(address, access_token=OPERATOR) as client:
            await client.heartbeat(engine.session, beat)

    with HttpClient(address, access_token=OPERATOR) as client:
        client.heartbeat(engine.session, beat)
    asyncio.run(async_beat())
    assert caplog.text.count(f"/v1/sessions/{engine.listed}/heartbeat") == 2, "httpx logs URLs"
    assert engine.session.rpartition("-")[2] not in caplog.text


def public(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


def test_the_three_clients_have_the_same_calls() -> None:
    sync, engines, awaited = public(HttpClient), public(Client), public(AsyncHttpClient)
    assert set(sync) == set(engines) == set(awaited) and len(sync) == 46
    for name, method in sync.items():
        assert inspect.signature(method) == inspect.signature(awaited[name]) == inspect.signature(engines[name]), name
        assert inspect.iscoroutinefunction(awaited[name]) is (name != "release_later")


def test_a_whole_session_through_httpx(address: str, engine: Engine) -> None:
    with HttpClient(address, access_token=OPERATOR) as client:
        mine = attach(client)
        wanted = keys(3, unique("life"))
        assert len(mine.store(wanted).chunks) == 3
        found = mine.lookup(wanted, request=unique("r"))
        assert found.hit_tokens == 48 and [part.length for chunk in found.chunks for part in chunk] == [16384] * 3
        assert {part.checksum_value for chunk in found.chunks for part in chunk} == {7}
        assert isinstance(found.chunks[0][0].checksum, str), "JSON"
        assert mine.release(found.lease, 0) == []
        assert client.session(mine.session).instance == mine.body.instance
        assert {client.status().status, client.segments().segments[0].id} == {"ok", 0}
        assert client.leases(limit=1).leases is not None and client.stats().series and client.requests(limit=1).requests
        client.leave(mine.session, mine.member)
        with pytest.raises(ApiError) as error:
            client.session(mine.session)
        assert (error.value.code, error.value.status) == ("unknown_session", 404)
        mine.close()


def test_all_three_answer_the_same(address: str, engine: Engine) -> None:
    body = lookup_body(engine)

    async def asked() -> s.LookupAnswer:
        async with AsyncHttpClient(address, access_token=OPERATOR) as client:
            return await client.lookup(body)

    with HttpClient(address, access_token=OPERATOR) as client:
        answers = [engine.client.lookup(body), client.lookup(body), asyncio.run(asked())]
    plain = [msgspec.to_builtins(answer) for answer in answers]
    for answer in plain:
        for chunk in answer["chunks"]:
            for part in chunk:
                part[5] = int(part[5], 16) if isinstance(part[5], str) else part[5]
    assert plain[0] == plain[1] == plain[2] and plain[0]["hit_tokens"] == 64
    assert answers[0].lease is not None
    engine.release(answers[0].lease, 0)


def test_every_async_call_reaches_its_route(address: str, server: ServerProcess) -> None:
    async def life() -> None:
        async with AsyncHttpClient(address, access_token=OPERATOR) as client:
            with Client(server.unix) as own:
                mine = attach(own)
            assert (await client.attach(mine.body)).session == mine.session
            assert (await client.heartbeat(mine.session, s.Heartbeat(member=mine.member))).questions == []
            assert mine.listed in {view.session for view in (await client.sessions(limit=1000)).sessions}
            names = keys(2, unique("async"))
            store = s.Reserve(session=mine.session, member=mine.member, store="s", keys=names)
            granted = await client.reserve(store)
            assert granted.reservation is not None
            parts = [s.PartDone(chunk.index, 0, 9) for chunk in granted.chunks]
            done = await client.commit(granted.reservation, s.Commit(session=mine.session, rank=0, parts=parts))
            assert done.ready == 2
            found = await client.lookup(s.Lookup(session=mine.session, member=mine.member, keys=store.keys))
            assert found.lease is not None
            held = await client.lease(found.lease)
            assert held.remaining == [0] and found.lease in {v.grant for v in (await client.leases(limit=1000)).leases}
            hint = Hint(session=mine.session, member=mine.member, keys=names, priority=1, duration_s=1.0)
            assert (await client.hint(hint)).chunks == 2
            wrong = s.ReportMismatch(session=mine.session, lease=found.lease, chunks=[1])
            assert (await client.mismatch(wrong)).quarantined == 1
            answer = await client.release(found.lease, s.ReleaseLease(session=mine.session, ranks=[0]))
            assert answer.remaining == []
            body = s.Lookup(session=mine.session, member=mine.member, request="c", keys=store.keys)
            again = await client.lookup(body)
            assert again.lease is not None and again.hit_tokens == 16
            await client.cancel(again.lease, mine.session, mine.member)
            other = await client.reserve(s.Reserve(
                session=mine.session, member=mine.member, store="t", keys=keys(1, unique("abort"))))
            assert other.reservation is not None
            assert (await client.abort(other.reservation, s.Abort(session=mine.session, ranks=[0]))).remaining == []
            assert (await client.segments()).segments and (await client.status()).status == "ok"
            space = mine.attached.namespace
            assert space in {view.namespace for view in (await client.namespaces(limit=100)).namespaces}
            kept = a.PinChunks(namespace=space, keys=names, duration_s=60.0)
            assert (await client.pin(kept)).chunks == 1, "the other was found to be damaged"
            assert (await client.evict(a.EvictChunks(free_bytes=1))).chunks == 0
            assert (await client.delete(a.DeleteChunks(namespace=space, keys=names))).chunks == 1
            with pytest.raises(ApiError) as unknown:
                await client.clear(a.ClearCache(namespace="0" * len(space)))
            assert unknown.value.code == "unknown_namespace"
            low = (await client.config()).limits.low_water
            assert (await client.configure(a.PatchConfig(low_water=low))).limits.low_water == low
            assert (await client.stats()).series is not None and (await client.requests(limit=1)).requests
            await client.leave(mine.session, mine.member)
            with pytest.raises(ApiError) as error:
                await client.session(mine.session)
            assert error.value.code == "unknown_session"
            mine.close()

    asyncio.run(life())


def test_async_calls_run_side_by_side(address: str, engine: Engine) -> None:
    async def many() -> list[s.LookupAnswer]:
        async with AsyncHttpClient(address, access_token=OPERATOR) as client:
            return await asyncio.gather(*[client.lookup(lookup_body(engine)) for _ in range(20)])

    leases = {answer.lease for answer in asyncio.run(many())}
    assert len(leases) == 20 and None not in leases
    for lease in leases:
        engine.release(lease, 0)


def test_queued_releases_ride_on_httpx_calls_and_on_close(server: ServerProcess, engine: Engine) -> None:
    def is_open(lease: str) -> bool:
        return any(view.grant == lease for view in engine.client.leases(limit=1000).leases)

    leases = [engine.lookup(keys(4, "http"), request=unique("r")).lease for _ in range(4)]
    assert all(leases)
    one, two, three, four = (str(lease) for lease in leases)
    with HttpClient(server.http, access_token=OPERATOR) as client:
        client.release_later(one, engine.session, [0])
        client.heartbeat(engine.session, s.Heartbeat(member=engine.member))
        assert not is_open(one)
        client.release_later(two, engine.session, [0])
        assert is_open(two)
    assert not is_open(two)

    async def life() -> None:
        async with AsyncHttpClient(server.http, access_token=OPERATOR) as client:
            client.release_later(three, engine.session, [0])
            beat = await client.heartbeat(engine.session, s.Heartbeat(member=engine.member))
            assert beat.refused_releases == [] and not is_open(three)
            client.release_later(four, engine.session, [0])
        assert not is_open(four)

    asyncio.run(life())


def outcomes(call: Callable[[HttpClient], object], awaited: Callable[[AsyncHttpClient], Awaitable[object]],
             address: str) -> Iterator[type[BaseException]]:
    """What each client raises."""
    refusals = (ApiError, ServerUnavailable)
    with HttpClient(address, access_token=OPERATOR, timeout_s=0.3) as client, pytest.raises(refusals) as error:
        call(client)
    yield error.type

    async def ask() -> None:
        async with AsyncHttpClient(address, access_token=OPERATOR, timeout_s=0.3) as client:
            await awaited(client)

    with pytest.raises((ApiError, ServerUnavailable)) as error:
        asyncio.run(ask())
    yield error.type


# httpcore leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*unclosed <socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    for nowhere in (f"unix:{tmp_path}/nobody.sock", "http://127.0.0.1:1"):
        found = set(outcomes(lambda client: client.status(), lambda client: client.status(), nowhere))
        assert found == {ServerUnavailable}
    gc.collect()  # here, where its warnings are expected


@pytest.mark.parametrize("content", [
    b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops",
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
])
def test_what_is_no_kvdock_is_unavailable(tmp_path: Path, content: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "odd.sock"))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with closing(connection):
                    connection.recv(65536)
                    connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = f"unix:{tmp_path}/odd.sock"
            found = set(outcomes(lambda client: client.status(), lambda client: client.status(), address))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)
    assert found == {ServerUnavailable}


def test_silence_ends_at_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "silent.sock"))
        listening.listen()
        address = f"unix:{tmp_path}/silent.sock"
        found = set(outcomes(lambda client: client.status(), lambda client: client.status(), address))
    assert found == {ServerUnavailable}


def test_a_refusal_carries_what_was_found_and_wanted(server: ServerProcess, engine: Engine) -> None:
    body = lookup_body(engine, skip_prefix_tokens=3)
    errors = []
    with HttpClient(server.http, access_token=OPERATOR) as client:
        for lookup in (engine.client.lookup, client.lookup):
            with pytest.raises(ApiError) as error:
                lookup(body)
            errors.append((error.value.code, error.value.status, error.value.found, error.value.wanted))
    assert errors[0] == errors[1] and errors[0][0] == "skip_misaligned"


def test_a_closed_client_makes_no_calls(server: ServerProcess) -> None:
    client = HttpClient(server.unix)
    client.status()
    client.close()
    with pytest.raises(ServerUnavailable):
        client.status()


def test_an_address_of_another_form_is_refused() -> None:
    for kind in (HttpClient, AsyncHttpClient):
        with pytest.raises(ValueError, match="wanted unix:/path"):
            kind("https://localhost:1")


def test_a_client_made_elsewhere_is_used(server: ServerProcess) -> None:
    seen: list[str] = []
    made = httpx.Client(event_hooks={"request": [lambda request: seen.append(request.url.path)]})
    with HttpClient(server.http, access_token=OPERATOR, http=made) as client:
        client.status()
    assert seen == ["/v1/status"] and made.is_closed
