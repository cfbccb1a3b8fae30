"""Loads that Python's own client receives into the pages: which answers it takes, what it leaves to obstore, and that
no page is written to once a load has ended."""

from __future__ import annotations

import gzip
import itertools
import mmap
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from api_helpers import soon
from certificates import self_signed
from objects_subject import S3Server, opened, s3_server
from s3_front import OBSTORE, SIGNED, Front, Request, front
from tier_helpers import ARENA, MIB, Part, Parts, assert_loads, eventually, load, outcomes_of, patient, store_all

from kvdock.shm.checksum import checksum
from kvdock.tiers.stores import objects, objects_receive
from kvdock.tiers.stores.objects import ObjectTier
from kvdock.tiers.stores.objects_loads import RANGE_BYTES
from kvdock.tiers.stores.objects_receive import CONNECT_S, FAILURES, PAUSE_S, UNUSUAL_S, _Connections
from kvdock.tiers.tier import PAGE_BYTES, Loaded, Outcome, StillRunning, ToLoad

pytestmark = pytest.mark.tiers


server = s3_server


@pytest.fixture
def store(server: S3Server) -> Iterator[Front]:
    with front(server.port) as one:
        yield one


@pytest.fixture
def tier(store: Front) -> Iterator[ObjectTier]:
    with opened(f"{store.url}&retries=0") as one:
        yield one


def path_of(part: Part) -> str:
    return f"/a/prefix/{part.name.text()}"


def gets(tier: ObjectTier) -> int:
    return tier.requests()["get"]


# --------------------------------------------------------------------------- bytes


def test_records_come_by_signed_urls_and_are_hashed(tier: ObjectTier, store: Front, parts: Parts) -> None:
    batch = [parts.make(size) for size in (1, PAGE_BYTES - 1, MIB + 1, 2 * RANGE_BYTES + 5, 25 * MIB)]
    store_all(tier, batch)
    assert_loads(tier, batch)
    assert store.seen == [SIGNED] * (3 + 2 + 3)
    assert gets(tier) == len(store.seen)
    assert [got.answer.hashed for got in load(tier, batch)] == [(part.record.checksum,) for part in batch]


@pytest.mark.parametrize(("pieces", "is_hashed"), [
    ([PAGE_BYTES] * 3, True), ([1000, 24, 5 * PAGE_BYTES, 1], True), ([9 * MIB] * 3, True),
    ([9 * MIB + 1, 3, 14 * MIB], False),
])  # fmt: skip
def test_bundles_come_into_all_their_memory(
    tier: ObjectTier, store: Front, parts: Parts, pieces: list[int], is_hashed: bool
) -> None:
    one = parts.make(sum(pieces))
    store_all(tier, [one])
    first, *others = (ARENA.pages(size)[:size] for size in pieces)
    (found,) = tier.load([ToLoad(one.name, sum(pieces), first, others)], patient())
    assert found[:2] == (Outcome.DONE, one.record.checksum)
    assert b"".join(map(bytes, (first, *others))) == one.data
    assert ARENA.guards_are_whole()
    assert found.hashed == (tuple(checksum(some) for some in (first, *others)) if is_hashed else ())
    assert set(store.seen) == {SIGNED}


def test_what_is_not_there_is_missing_after_one_request(tier: ObjectTier, store: Front, parts: Parts) -> None:
    there, absent = parts.many(2, 1000)
    store_all(tier, [there])
    for _ in range(FAILURES):
        assert outcomes_of(tier, [absent]) == [Outcome.MISSING]
    assert gets(tier) == FAILURES
    assert_loads(tier, [there])
    assert set(store.seen) == {SIGNED}


# --------------------------------------------------------------------------- other answers


def chunked(request: Request) -> None:
    status, headers, body = request.of_store()
    request.send_response(status)
    for name in ("ETag", "Last-Modified", *(name for name in headers if name == "Content-Range")):
        request.send_header(name, headers[name])
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    for some in (body[:100], body[100:]):
        request.wfile.write(f"{len(some):x}\r\n".encode() + some + b"\r\n")
    request.wfile.write(b"0\r\n\r\n")


def status(number: int) -> Callable[[Request], None]:
    def answer(request: Request) -> None:
        where = f"http://127.0.0.1:{request.server.to_port}{request.path}"
        request.say(number, {"Location": where}, b"no")

    return answer


def other_range(request: Request) -> None:
    """As many bytes, from elsewhere."""
    number, headers, body = request.of_store(Range="bytes=1-" if "Range" in request.headers else "")
    request.say(number, headers, body[: 8 * MIB])


def changed(status: int | None = None, **headers: str) -> Callable[[Request], None]:
    def answer(request: Request) -> None:
        found, there, body = request.of_store()
        request.say(status or found, there | {name.replace("_", "-"): value for name, value in headers.items()}, body)

    return answer


def whole(request: Request) -> None:
    request.say(*request.of_store(Range=""))


def packed(request: Request) -> None:
    number, headers, body = request.of_store()
    request.say(number, headers | {"Content-Encoding": "gzip"}, gzip.compress(body, 1))


def ended(request: Request) -> None:
    number, headers, body = request.of_store()
    request.say(number, headers, body[:-1], missing=1)
    request.close_connection = True


def closed(request: Request) -> None:
    request.close_connection = True


def garbage(request: Request) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    request.close_connection = True


SMALL, LARGE = 100_000, 2 * RANGE_BYTES


@pytest.mark.parametrize(("answer", "sizes"), [
    (status(307), (SMALL, LARGE)), (status(400), (SMALL, LARGE)), (status(403), (SMALL, LARGE)),
    (status(416), (SMALL, LARGE)), (status(503), (SMALL, LARGE)), (chunked, (SMALL, LARGE)), (packed, (SMALL, LARGE)),
    (ended, (SMALL, LARGE)), (closed, (SMALL, LARGE)), (garbage, (SMALL, LARGE)), (changed(206), (SMALL,)),
    (changed(Content_Encoding="gzip"), (SMALL, LARGE)), (changed(200), (LARGE,)), (whole, (LARGE,)),
    (other_range, (LARGE,)), (changed(Content_Range="bytes"), (LARGE,)),
])  # fmt: skip
def test_any_other_answer_is_left_to_obstore(
    tier: ObjectTier, store: Front, parts: Parts, answer: Callable[[Request], None], sizes: tuple[int, ...]
) -> None:
    batch = [parts.make(size) for size in sizes]
    requests = sum(1 if part.record.length == SMALL else 2 for part in batch)
    store_all(tier, batch)
    store.answer = answer
    assert_loads(tier, batch)
    assert (store.seen.count(SIGNED), store.seen.count(OBSTORE)) == (requests, requests)
    assert gets(tier) == 2 * requests
    store.answer = None
    assert_loads(tier, batch)
    assert store.seen.count(OBSTORE) == requests


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("more", [-1, 1])
def test_an_object_of_another_length_is_damaged(
    tier: ObjectTier, store: Front, server: S3Server, parts: Parts, size: int, more: int
) -> None:
    one = parts.make(size)
    data = one.record.header() + one.data
    server.call("PUT", path_of(one), data[:more] if more < 0 else data + b"x")
    assert outcomes_of(tier, [one]) == [Outcome.DAMAGED]
    assert SIGNED in store.seen


def test_after_some_failures_obstore_is_asked_alone_for_a_while(
    tier: ObjectTier, store: Front, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(tier._receiver, "_clock", lambda: now_s)
    one = parts.make(SMALL)
    store_all(tier, [one])
    store.answer = status(403)
    for _ in range(FAILURES + 3):
        assert_loads(tier, [one])
    assert (store.seen.count(SIGNED), store.seen.count(OBSTORE)) == (FAILURES, FAILURES + 3)
    now_s += PAUSE_S
    assert_loads(tier, [one])
    assert store.seen.count(SIGNED) == FAILURES + 1
    store.answer = None
    now_s += PAUSE_S
    for _ in range(3):
        assert_loads(tier, [one])
    assert store.seen[-3:] == [SIGNED] * 3


def test_failures_with_answers_between_them_count_for_nothing(tier: ObjectTier, store: Front, parts: Parts) -> None:
    one = parts.make(SMALL)
    store_all(tier, [one])
    for _ in range(2 * FAILURES):
        for answer in (status(503), None):
            store.answer = answer
            assert_loads(tier, [one])
    assert store.seen.count(SIGNED) == 4 * FAILURES


@pytest.mark.parametrize(("parameter", "variables"), [
    ("&skip_signature=yes", {}), ("", {"AWS_SKIP_SIGNATURE": "true"}),
    ("", {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}),
])  # fmt: skip
def test_what_python_cannot_do_alike_is_left_to_obstore(
    store: Front, server: S3Server, parts: Parts, parameter: str, variables: dict[str, str]
) -> None:
    one = parts.make(SMALL)
    server.call("PUT", path_of(one), one.record.header() + one.data)
    with opened(store.url + parameter, **variables) as tier:
        load(tier, [one])
    assert set(store.seen) == {OBSTORE}


# --------------------------------------------------------------------------- connections


def test_connections_are_used_again(tier: ObjectTier, store: Front, parts: Parts) -> None:
    batch = [parts.make(SMALL), parts.make(LARGE)]
    store_all(tier, batch)
    for part in batch * 3:
        assert_loads(tier, [part])
    assert len(store.connections) <= 2, "as many as the ranges of the larger one"
    assert store.seen == [SIGNED] * 9


def test_a_connection_that_the_store_has_closed_is_replaced(tier: ObjectTier, store: Front, parts: Parts) -> None:
    """It says so at the next request, and nothing has failed."""
    one = parts.make(SMALL)
    store_all(tier, [one])

    def and_close(request: Request) -> None:
        request.pass_on()
        request.close_connection = True

    store.answer = and_close
    for _ in range(3):
        assert_loads(tier, [one])
    assert store.seen == [SIGNED] * 3 and gets(tier) == 3 and len(store.connections) == 3


def test_a_connection_that_took_long_is_left_to_obstore(tier: ObjectTier, store: Front, parts: Parts) -> None:
    """As where the first address of a store does not answer."""
    one = parts.make(SMALL)
    store_all(tier, [one])
    tier._receiver._connections._clock = itertools.count(0.0, 2 * CONNECT_S).__next__
    assert_loads(tier, [one])
    assert store.seen == [OBSTORE]


def test_loads_that_end_without_a_connection_are_failures(
    tier: ObjectTier, store: Front, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no address is found in time: they must not end so for ever."""
    now_s, ends, one = time.monotonic(), threading.Event(), parts.make(SMALL)
    store_all(tier, [one])

    def never(*_: object) -> None:
        nonlocal now_s
        now_s += 2 * UNUSUAL_S
        deadline.cancel()
        ends.wait()
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(tier._receiver, "_clock", lambda: now_s)
        patch.setattr(tier._receiver._connections, "new", never)
        try:
            for _ in range(FAILURES):
                deadline = patient()
                with soon():
                    assert tier.load([one.to_load()], deadline) == [Loaded(Outcome.LATE)]
            assert not store.seen
            assert_loads(tier, [one])
        finally:
            ends.set()
    assert store.seen == [OBSTORE]


# --------------------------------------------------------------------------- ends


@pytest.fixture
def halved(server: S3Server) -> Iterator[S3Server]:
    """Its answers stop in their midst."""
    server.half.touch()
    yield server
    server.half.unlink(missing_ok=True)


def test_a_load_that_has_ended_writes_to_no_page(halved: S3Server, parts: Parts) -> None:
    """The load keeps no view of its memory either: the memory could not be closed."""
    batch = [parts.make(SMALL), parts.make(3 * MIB)]
    for part in batch:
        halved.call("PUT", path_of(part), part.record.header() + part.data)
    with opened(halved.url) as tier:
        deadline = patient()
        memories = [mmap.mmap(-1, -(-part.record.length // PAGE_BYTES) * PAGE_BYTES) for part in batch]

        def cancel() -> None:
            eventually(lambda: all(any(one[:64]) for one in memories))  # half of each has come, or less
            deadline.cancel()

        watch = threading.Thread(target=cancel)
        watch.start()
        asked = [
            ToLoad(part.name, part.record.length, memoryview(one)) for part, one in zip(batch, memories, strict=True)
        ]
        with soon():
            assert tier.load(asked, deadline) == [Loaded(Outcome.LATE)] * 2
        before = [one[:] for one in memories]
        halved.half.unlink()
        watch.join()
        assert_loads(tier, batch)  # the store goes on
        assert [one[:] for one in memories] == before
        del asked
        for one in memories:
            one.close()


def test_a_page_that_is_still_written_to_ends_the_process(
    tier: ObjectTier, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the memory cannot be written to, and the write does not return."""
    begins, ends, deadline = threading.Event(), threading.Event(), patient()

    def received(*_: object) -> int:
        begins.set()
        deadline.cancel()
        ends.wait()
        return 0

    monkeypatch.setattr(objects, "RELEASE_S", 0.05)
    monkeypatch.setattr(objects_receive, "_received", received)
    one = parts.make(SMALL)
    store_all(tier, [one])
    try:
        with pytest.raises(StillRunning, match="pages are still written to"):
            load(tier, [one], deadline)
    finally:
        ends.set()
    assert begins.is_set()


def test_a_connection_of_a_request_that_outlives_the_tier_is_closed(store: Front) -> None:
    connections, url = _Connections(None, time.monotonic), urlsplit(store.address)
    first, second = connections.new(url), connections.new(url)
    connections.keep(url, first)
    connections.close()
    connections.keep(url, second)
    assert first.sock is None and second.sock is None and connections.kept(url) is None


# --------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls_is_received_from_a_store_that_is_trusted(server: S3Server, certificate: Path, parts: Parts) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    batch = [parts.make(SMALL), parts.make(LARGE)]
    with front(server.port, context) as store:
        with opened(f"{store.url}&ca_file={certificate}/cert.pem") as tier:
            store_all(tier, batch)
            for _ in range(2):
                assert_loads(tier, batch)
            assert store.seen == [SIGNED] * 6 and len(store.connections) <= 3
            connections = tier._receiver._connections
            connections.close()
            connections._tls = ssl.create_default_context()  # which does not trust it
            assert_loads(tier, batch)
        assert store.seen[6:] == [OBSTORE] * 3
