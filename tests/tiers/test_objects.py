"""What only the tier over object stores does: its URL, ranges, uploads in pieces, two writers, HTTP, pages it gives
back; notes that grow old."""

from __future__ import annotations

import asyncio
import functools
import http.server
import itertools
import mmap
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import obstore.store
import pytest
from api_helpers import LATE_S, soon
from hypothesis import given, strategies as st
from objects_subject import BUCKET, KEYS, S3Server, environment, opened, s3_server
from ports import held_port
from tier_helpers import (
    ARENA,
    MIB,
    LooksBeforeItEnds,
    Part,
    Parts,
    assert_loads,
    load,
    outcomes_of,
    patient,
    store,
    store_all,
)

from bench.tiers.far import far_store
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.mover.write_behind import WriteBehind, WriteBudget, WriteObserver, WriteQueue
from kvdock.tiers.notes import begins, deletes
from kvdock.tiers.record import HEADER_BYTES, VERSION, Record, RecordError
from kvdock.tiers.stores import objects
from kvdock.tiers.stores.objects import NOTE_FRESH_S, ObjectTier, StoreLocation, open_location, open_tier
from kvdock.tiers.stores.objects_loads import RANGE_BYTES, Piece, Receiving, Sink, ranges_of
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Outcome, ReadOnly, StillRunning, TierError, TierUrlError, ToStore

pytestmark = pytest.mark.tiers


server = s3_server


@pytest.fixture
def tier(server: S3Server) -> Iterator[ObjectTier]:
    with opened(server.url) as one:
        yield one


def path_of(part: Part) -> str:
    return f"/a/prefix/{part.name.text()}"


# --------------------------------------------------------------------------- the URL


def location_of(url: str) -> StoreLocation:
    with environment(KEYS):
        return open_location(url, obstore.store)


@pytest.mark.parametrize(("url", "says"), [
    ("ftp://host/x", "found a URL of scheme 'ftp', wanted one of az, file, gs, http, https, s3"),
    ("s3://bucket?regoin=x", "found parameter 'regoin', wanted one of bytes, ca_file, connections, create, endpoint, "),
    ("s3://bucket?access_key_id=x", "found parameter 'access_key_id'"),
    ("s3://bucket?multipart_mib=4", "found multipart_mib='4', wanted a whole number from 5 to 5120"),
    ("s3://bucket?connections=257", "wanted a whole number from 1 to 256"),
    ("s3://bucket?create=maybe", "wanted yes or no"),
    ("s3://bucket?endpoint=", "wanted some text"),
    ("s3://bucket?ca_file=/no/such", "wanted the path of a file that is there"),
    ("s3:///prefix", "found no name of a bucket, container or host"),
    ("s3://me@bucket/x", "found a user in the URL, wanted credentials in the environment"),
    ("s3://me:secret@bucket/x", "found a password in the URL"),
    ("gs://bucket?region=x", "found parameter 'region'"),
    ("az://container", "wanted a URL that obstore can use"),
    ("http://host?endpoint=x", "found parameter 'endpoint'"),
    ("file:///no/such/folder", "wanted file:///PATH of a folder that exists"),
    ("s3://bucket?read_price=-1", "wanted dollars for a million requests, such as 5 or 0.4"),
    ("file://host/tmp", "wanted file:///PATH of a folder that exists"),
    ("file://", "wanted file:///PATH of a folder that exists"),
    ("file:///tmp?retries=1", "found parameter 'retries', wanted one of bytes, connections, tenant_bytes, unused_days"),
])  # fmt: skip
def test_a_url_that_is_not_understood_is_refused(url: str, says: str) -> None:
    with pytest.raises(TierUrlError) as caught:
        location_of(url)
    assert says in str(caught.value) and "secret" not in str(caught.value)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match=r"pip install 'kvdock\[objects\]'"):
        open_tier("s3://bucket", patient())


def test_what_a_url_says() -> None:
    location = location_of("s3://bucket/a/b?region=eu-west-1&endpoint=https://s3.example&virtual_hosted=yes&create=no"
                     "&connections=3&multipart_mib=5")  # fmt: skip
    assert location.store.config == {
        "bucket": "bucket", "region": "eu-west-1", "endpoint": "https://s3.example",
        "virtual_hosted_style_request": "true",
    } | {key: location.store.config[key] for key in location.store.config if "key" in key}  # fmt: skip
    assert location.store.prefix == "a/b" and "allow_http" not in location.store.client_options
    assert (location.can_create, location.connections, location.multipart_bytes) == (False, 3, 5 * MIB)
    assert location_of("s3://bucket?endpoint=http://x").store.client_options["allow_http"] in (True, "true")


@pytest.mark.parametrize(("url", "kind"), [
    ("gs://bucket/x?endpoint=http://127.0.0.1:1&skip_signature=yes", "GCSStore"),
    ("az://container/x?account=me&endpoint=https://me.example&machine_role=yes", "AzureStore"),
    ("https://host/x", "HTTPStore"),
])  # fmt: skip
def test_each_scheme_has_its_store(url: str, kind: str) -> None:
    location = location_of(url)
    assert type(location.store).__name__ == kind
    assert location.read_only is location.ranges is (kind == "HTTPStore") or location.ranges is (kind != "HTTPStore")


@pytest.mark.parametrize("url", [
    "s3://no-such-bucket/x?endpoint=http://127.0.0.1:PORT&retries=0", "http://127.0.0.1:PORT/x?retries=0",
])  # fmt: skip
def test_a_store_that_is_not_there_is_a_tier_error(url: str) -> None:
    with environment(KEYS), pytest.raises(TierError, match="error sending request"):
        open_tier(url.replace("PORT", str(held_port())), Deadline(20))


def test_a_bucket_that_is_not_there_is_a_tier_error(server: S3Server) -> None:
    url = server.url.replace(BUCKET, "another-bucket")
    with environment(KEYS), pytest.raises(TierError, match="NoSuchBucket"):
        open_tier(url, patient())


@pytest.mark.parametrize("url", ["s3://bucket/x?region=us-east-1", "gs://bucket/x", "az://container/x?account=me"])
def test_without_a_key_no_service_of_a_cloud_is_asked_unless_the_url_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    """What listens here stands for the clouds' metadata service."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as service:
        where = f"127.0.0.1:{service.getsockname()[1]}"
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{where}")
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://{where}/token")
        with pytest.raises(TierUrlError, match=r"found no credentials in the environment, wanted .* machine_role=yes"):
            open_tier(f"{url}{'&' if '?' in url else '?'}endpoint=http://127.0.0.1:1&retries=0", Deadline(2))
        service.settimeout(0.2)
        with pytest.raises(TimeoutError):
            service.accept()
        if url.startswith("s3"):
            with pytest.raises(TierError):
                open_tier(f"{url}&endpoint=http://127.0.0.1:1&retries=0&machine_role=yes", Deadline(2))
            service.settimeout(10)
            service.accept()[0].close()


# --------------------------------------------------------------------------- records


def test_an_object_is_the_header_and_then_the_bytes(tier: ObjectTier, server: S3Server, parts: Parts) -> None:
    one = parts.make(50_001)
    store_all(tier, [one])
    assert server.call("GET", path_of(one)) == one.record.header() + one.data


@pytest.mark.parametrize("create", ["yes", "no"])
def test_of_two_writers_the_first_stays_where_the_store_can(server: S3Server, parts: Parts, create: str) -> None:
    first = parts.make(50_000)
    second = parts.make(50_000, first.name)
    with opened(f"{server.url}&create={create}") as tier:
        store_all(tier, [first])
        store_all(tier, [second])
        assert_loads(tier, [first if create == "yes" else second])
        data = server.call("GET", path_of(first))
        for damaged in (data[:-1], b"\0" + data[1:], b""):
            server.call("PUT", path_of(first), damaged)
            store_all(tier, [second])
            assert_loads(tier, [second])


def test_large_parts_go_and_come_in_pieces(server: S3Server, parts: Parts) -> None:
    sizes = [RANGE_BYTES, 2 * RANGE_BYTES - 1, 2 * RANGE_BYTES, 17 * MIB + 3]
    batch = [parts.make(size) for size in sizes]
    with opened(f"{server.url}&multipart_mib=5&connections=2") as tier:
        store_all(tier, batch)
        assert_loads(tier, batch)
        assert server.call("GET", path_of(batch[3])) == batch[3].record.header() + batch[3].data
        again = parts.make(17 * MIB + 3, batch[3].name)
        store_all(tier, [again])
        assert_loads(tier, [again])


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 9 * MIB, 18 * MIB, 29 * MIB])
def test_a_cut_or_longer_object_is_damaged(tier: ObjectTier, server: S3Server, parts: Parts, left: int) -> None:
    large, small = parts.make(19 * MIB), parts.make(100)
    for one in (large, small):
        whole = one.record.header() + one.data
        server.call("PUT", path_of(one), whole[:left].ljust(left, b"\0"))
    assert outcomes_of(tier, [large, small]) == [Outcome.DAMAGED] * 2


def test_large_parts_come_in_ranges_from_a_folder(tmp_path: Path, parts: Parts) -> None:
    batch = [parts.make(size) for size in (RANGE_BYTES, 2 * RANGE_BYTES, 25 * MIB + 1)]
    with opened(tmp_path.as_uri()) as tier:
        store_all(tier, batch)
        assert_loads(tier, batch)
        path = tmp_path / batch[2].name.text()
        path.write_bytes(path.read_bytes()[:-1])
        assert outcomes_of(tier, batch) == [Outcome.DONE, Outcome.DONE, Outcome.DAMAGED]


@given(length=st.integers(1, 200 * MIB), one=st.booleans())
def test_ranges_are_the_whole_object_and_end_with_stripes(length: int, one: bool) -> None:
    found = ranges_of(length, one=one)
    assert [some.begin for some in found] == [0, *(some.end for some in found[:-1])]
    assert found[-1].end == HEADER_BYTES + length and {some.total for some in found} == {found[-1].end}
    assert all((some.end - HEADER_BYTES) % 4096 == 0 for some in found[:-1])
    assert len(found) == (1 if one or length < 2 * RANGE_BYTES else length // RANGE_BYTES)
    assert all(some.begin < some.end < some.begin + 2 * RANGE_BYTES + PAGE_BYTES for some in found) or one


def test_requests_receive_no_more_at_once_than_was_said() -> None:
    """And none waits for ever: neither one that is too large, nor one behind another that was cancelled."""
    now, most = list[int](), list[int]()

    async def receive(receiving: Receiving, size_bytes: int) -> None:
        async with receiving.admitted(size_bytes):
            now.append(size_bytes)
            most.append(sum(now) if len(now) > 1 else 0)
            await asyncio.sleep(0)
            now.remove(size_bytes)

    async def receive_all() -> None:
        receiving = Receiving(4, most_bytes=100)
        given_up, *others = (
            asyncio.ensure_future(receive(receiving, size)) for size in (90, 60, 40, 300, 10, 10, 10, 70, 101)
        )
        behind = asyncio.ensure_future(receive(receiving, 90))
        for _ in range(2):
            await asyncio.sleep(0)
        given_up.cancel()
        others[0].cancel()
        async with asyncio.timeout(LATE_S):
            await asyncio.gather(behind, *others[1:])

    asyncio.run(receive_all())
    assert max(most) <= 100 and len(most) >= 8


def test_what_was_not_told_by_the_deadline_is_late(tier: ObjectTier, server: S3Server, parts: Parts) -> None:
    """Reads go on when others were given up, and pages that were to be sent are free at once."""
    batch = parts.many(3, 9 * MIB)
    store_all(tier, batch)
    server.send(signal.SIGSTOP)
    try:
        with soon():
            assert outcomes_of_late(tier, batch) == {Outcome.LATE}
            assert store(tier, parts.many(2, 20 * MIB), Deadline(0.3)) == [Outcome.LATE] * 2
    finally:
        server.send(signal.SIGCONT)
    assert_loads(tier, batch)


@pytest.mark.parametrize("looks", [1, 2, 3, 4])
def test_a_deadline_that_is_over_at_once_ends_what_has_hardly_begun(
    tier: ObjectTier, server: S3Server, parts: Parts, looks: int
) -> None:
    one = parts.make(1000).to_store()
    server.send(signal.SIGSTOP)
    resumed = threading.Timer(LATE_S, server.send, [signal.SIGCONT])
    resumed.start()
    try:
        with soon():
            assert tier.store([one], Deadline(5, LooksBeforeItEnds(looks))) == [Outcome.LATE]
    finally:
        resumed.cancel()
        server.send(signal.SIGCONT)


def test_pages_of_a_store_that_was_given_up_are_held_by_nobody(
    tier: ObjectTier, server: S3Server, parts: Parts
) -> None:
    """Memory of which a view exists cannot be closed."""
    record = parts.make(1).record
    memory = mmap.mmap(-1, 24 * MIB)
    pages = memoryview(memory)
    server.send(signal.SIGSTOP)
    try:
        asked = [ToStore(Record(record.name, 24 * MIB, 0), pages)]
        assert tier.store(asked, Deadline(0.3)) == [Outcome.LATE]
        del asked
        pages.release()
        memory.close()
    finally:
        server.send(signal.SIGCONT)


def test_an_object_that_is_replaced_between_two_ranges_is_not_loaded(
    server: S3Server, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = parts.make(17 * MIB)
    second = parts.make(17 * MIB, first.name)
    add, taken = Sink.add, list[int]()

    def add_and_replace(sink: Sink, piece: Piece, share: int) -> None:
        if not taken:
            taken.append(piece.number)
            server.call("PUT", path_of(first), second.record.header() + second.data)
        add(sink, piece, share)

    monkeypatch.setattr(Sink, "add", add_and_replace)
    with opened(f"{server.url}&connections=1") as tier:  # so that one range is asked for after the other
        store_all(tier, [first])
        assert outcomes_of(tier, [first]) == [Outcome.DAMAGED]
        assert taken
        assert_loads(tier, [second])


def test_a_store_that_cannot_refuse_to_overwrite_is_written_all_the_same(server: S3Server, parts: Parts) -> None:
    batch = parts.many(3, 1000)
    with environment({"AWS_CONDITIONAL_PUT": "disabled"}), opened(server.url) as tier:
        store_all(tier, batch)
        store_all(tier, batch)
        assert_loads(tier, batch)


def outcomes_of_late(tier: ObjectTier, batch: list[Part]) -> set[Outcome]:
    return {answer.outcome for answer in tier.load([part.to_load() for part in batch], Deadline(0.3))}


def test_pages_that_are_still_read_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be cancelled leaves a buffer that is held elsewhere."""
    monkeypatch.setattr(objects, "RELEASE_S", 0.05)
    view = ARENA.pages(100)[:100]
    held = pickle.PickleBuffer(view)
    with pytest.raises(StillRunning):
        objects._release([view])
    held.release()
    objects._release([view])
    with pytest.raises(ValueError):
        len(view)


@pytest.mark.parametrize("multipart", [False, True])
def test_obstore_lets_go_of_the_pages_of_a_request_that_is_given_up(server: S3Server, multipart: bool) -> None:
    """What _release() builds on: a view that is being sent cannot be released."""
    view = ARENA.pages(24 * MIB)[:]
    location = location_of(server.url)

    async def send() -> None:
        data: list[Any] = [b"header", view]
        request = asyncio.ensure_future(obstore.put_async(location.store, "x", data, use_multipart=multipart))
        await asyncio.sleep(0.2)
        if not multipart:  # obstore reads pieces of its own size, and waits for the server before the first
            with pytest.raises(BufferError):
                view.release()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    server.send(signal.SIGSTOP)
    try:
        asyncio.run(send())
        objects._release([view])
    finally:
        server.send(signal.SIGCONT)


def test_a_full_store_is_full(tier: ObjectTier, server: S3Server, parts: Parts) -> None:
    server.flag.touch()
    try:
        assert store(tier, [parts.make(1000)]) == [Outcome.FULL]
    finally:
        server.flag.unlink()


def test_deleting_a_part_that_goes_meanwhile_is_done(tmp_path: Path, parts: Parts) -> None:
    batch = parts.many(20, 10)
    with opened(tmp_path.as_uri()) as tier:
        store_all(tier, batch)
        done: list[list[Outcome]] = []
        names = [part.name for part in batch]
        rivals = [threading.Thread(target=lambda: done.append(tier.delete(names, patient()))) for _ in range(4)]
        for rival in rivals:
            rival.start()
        for rival in rivals:
            rival.join()
        assert len(done) == 4 and {outcome for some in done for outcome in some} <= {Outcome.DONE, Outcome.MISSING}
        assert tier.exists(names, patient()) == [False] * 20


# --------------------------------------------------------------------------- HTTP


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Into no log."""


def test_a_web_server_is_read_and_not_written(tmp_path: Path, parts: Parts) -> None:
    small, large, absent = parts.make(1000), parts.make(9 * MIB), parts.make(10)
    with opened(tmp_path.as_uri()) as tier:
        store_all(tier, [small, large])
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with opened(f"http://127.0.0.1:{web.server_port}/") as tier:
            assert_loads(tier, [small, large])
            assert load(tier, [absent])[0].answer.outcome is Outcome.MISSING
            assert tier.exists([small.name, absent.name], patient()) == [True, False]
            cut = tmp_path / small.name.text()
            cut.write_bytes(cut.read_bytes()[:-1])
            assert outcomes_of(tier, [small]) == [Outcome.DAMAGED]
            with pytest.raises(TierError, match="can only be read"):
                store(tier, [absent])
            with pytest.raises(TierError, match="can only be read"):
                tier.delete([small.name], patient())
        assert_is_not_written(f"http://127.0.0.1:{web.server_port}/")
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


def assert_is_not_written(url: str) -> None:
    """Its mover does not try to, and what it refuses all the same is nothing that an operator need know."""
    handle = TierHandle(open_tier(url, patient()), clock=time.monotonic, lost=lambda _: None)
    with pytest.raises(ReadOnly):
        handle.change(b"s" * 32, begins(1), patient())
    assert handle.stores.state == "open"
    queue = WriteQueue(MIB, batch_bytes=MIB, budget=WriteBudget(0, lambda: 0, time.monotonic))
    space: Any = SimpleNamespace(digest=b"s" * 32, chunk_bytes=1000)
    served: Any = None
    observer = WriteObserver(stored=lambda *_: None, gone=lambda *_: None)
    WriteBehind(handle, served, served, served, queue, observer=observer).offer(space, [b"k" * 32])
    assert not queue.waiting_bytes
    handle.close(patient())


PIECE = HEADER_BYTES - 7


def test_a_store_that_lies_about_a_range_is_not_believed(parts: Parts) -> None:
    """A range that is shorter, longer or another one than was asked for, and one that ends in the header, too."""
    one = parts.make(1000)
    data = one.record.header() + one.data

    class Found:
        def __init__(self, at: tuple[int, int], sent: bytes) -> None:
            self.range, self._sent = at, sent

        async def bytes_async(self) -> bytes:
            return self._sent

    def take(*some: Found, edges: Sequence[int] = (0, len(data))) -> bytes:
        pages = ARENA.pages(1000)
        sink = Sink([pages[:1000]])
        for found, (begin, end) in zip(some, itertools.pairwise(edges), strict=True):
            asyncio.run(sink.take(found, begin, end))
        sink.close()
        Record.read_of(bytes(sink.header), one.name, 1000)
        return bytes(pages[:1000])

    whole = (0, len(data))
    assert take(Found(whole, data)) == one.data
    for edge in (1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1):
        halves = [Found((0, edge), data[:edge]), Found((edge, len(data)), data[edge:])]
        assert take(*halves, edges=(0, edge, len(data))) == one.data
    for found in (Found(whole, data[:-1]), Found(whole, data + b"x"), Found((1, len(data)), data), Found(whole, b"")):
        with pytest.raises(RecordError):
            take(found)


# --------------------------------------------------------------------------- notes


@pytest.fixture
def small(tmp_path: Path) -> Iterator[S3Server]:
    """A server that keeps 150,000 bytes. Beyond that it deletes the oldest objects, notes among them."""
    one = S3Server(tmp_path, 150_000, with_notes=True)
    yield one
    one.kill()


@pytest.mark.parametrize("age_s", [NOTE_FRESH_S / 2, 2 * NOTE_FRESH_S], ids=["new", "old"])
def test_a_note_is_written_again_before_a_rule_of_the_bucket_deletes_it(
    small: S3Server, parts: Parts, age_s: float
) -> None:
    namespace, now_s = bytes(32), [time.time()]
    with environment(KEYS):
        tier = ObjectTier(open_location(small.url, obstore.store), obstore, clock=lambda: now_s[0])
    note = tier.change(namespace, begins(3), patient())
    store_all(tier, [parts.make(50_000), parts.make(50_000)])
    now_s[0] += age_s
    assert tier.notes([namespace], patient()) == tier.notes([namespace], patient()) == [note]
    store_all(tier, [parts.make(50_000)])
    assert tier.notes([namespace], patient()) == [note if age_s > NOTE_FRESH_S else None]
    tier.close(patient())


def test_a_note_that_is_written_again_keeps_what_others_have_changed(server: S3Server) -> None:
    namespace, now_s = secrets.token_bytes(32), [time.time()]
    with environment(KEYS):
        tier = ObjectTier(open_location(server.url, obstore.store), obstore, clock=lambda: now_s[0])
    tier.change(namespace, begins(3), patient())
    tier.notes([namespace], patient())
    with opened(server.url) as other:
        changed = other.change(namespace, deletes([bytes(32)], 3), patient())
        now_s[0] += 2 * NOTE_FRESH_S
        assert tier.notes([namespace], patient()) == other.notes([namespace], patient()) == [changed]
    tier.close(patient())


def test_a_clock_that_is_ahead_writes_a_note_no_more_often(server: S3Server) -> None:
    """Each change by others gives the note another version, and the time of the store's clock."""
    namespace = secrets.token_bytes(32)
    with environment(KEYS):
        location = open_location(server.url, obstore.store)
    tier = ObjectTier(location, obstore, clock=lambda: time.time() + 2 * NOTE_FRESH_S)
    with opened(server.url) as other:
        for number in range(4):
            changed = other.change(namespace, deletes([bytes([number]) * 32], 3), patient())
            assert tier.notes([namespace], patient()) == [changed]
    assert tier.requests()["put"] == 1
    tier.close(patient())


def test_a_note_that_cannot_be_written_again_is_read_all_the_same(server: S3Server) -> None:
    namespace, now_s = secrets.token_bytes(32), [time.time()]
    with environment(KEYS):
        tier = ObjectTier(open_location(server.url, obstore.store), obstore, clock=lambda: now_s[0])
    note = tier.change(namespace, begins(3), patient())
    now_s[0] += 2 * NOTE_FRESH_S
    server.flag.touch()
    try:
        assert tier.notes([namespace], Deadline(10)) == [note]
    finally:
        server.flag.unlink()
    tier.close(patient())


def test_what_others_have_put_beside_the_namespaces_is_left_out(tmp_path: Path, parts: Parts) -> None:
    tier = open_tier(tmp_path.as_uri(), patient())
    try:
        tier.change(parts.namespace, begins(1), patient())
        for name in ("zz" * 32, "mine", parts.namespace.hex().upper()):
            (tmp_path / f"kvdock/{VERSION}" / name).mkdir()
            (tmp_path / f"kvdock/{VERSION}" / name / "file").touch()
        assert tier.namespaces(patient()) == [parts.namespace]
        assert [one.namespace for one in tier.holdings(patient())] == [parts.namespace]
    finally:
        tier.close(patient())


def test_requests_are_counted_as_the_store_counts_them(parts: Parts) -> None:
    batch = [parts.make(PAGE_BYTES) for _ in range(4)]
    with far_store() as store, opened(f"{store.url}&read_price=0.4&write_price=5") as tier:
        store_all(tier, batch)
        store_all(tier, [parts.make(PAGE_BYTES, batch[0].name)])
        assert_loads(tier, batch)
        tier.exists([part.name for part in batch], patient())
        note = tier.change(parts.namespace, begins(1), patient())
        tier.mark(parts.namespace, b"", patient())
        tier.holdings(patient())
        tier.delete([batch[0].name, batch[1].name], patient())
        tier.sweep(parts.namespace, note, patient())
        counts, found = tier.requests(), store.counts()
        assert [counts["get"] + counts["list"], counts["head"], counts["put"], counts["delete"]] == [
            found["GET"], found["HEAD"], found["PUT"], found.get("POST", 0) + found.get("DELETE", 0)
        ]
        assert min(counts.values()) > 0
        dollars = (0.4 * (counts["get"] + counts["head"]) + 5 * (counts["put"] + counts["list"])) / 1e6
        assert tier.dollars == pytest.approx(dollars)


def test_the_pieces_of_an_upload_are_requests(server: S3Server, parts: Parts) -> None:
    with opened(f"{server.url}&multipart_mib=5&write_price=1000") as tier:
        before = tier.requests()["put"]
        store_all(tier, [parts.make(17 * MIB)])
        assert tier.requests()["put"] - before == 4, "one begins it, two carry pieces, and one ends it"
        assert tier.dollars >= 4 * 1000 / 1e6
