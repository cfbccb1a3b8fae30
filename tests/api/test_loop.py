"""Large calls keep the event loop for a few ms at most: long token lists go in slices, walks too.

What a turn of the loop costs is measured as processor time of its thread, in which other processes of a busy machine
do not count, and the least of several tries is taken. The bounds are several times what a quiet machine needs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admin_helpers import call, refused
from api_helpers import MIB, ServerProcess, attach, keys, raw, small_pool
from hypothesis import given, settings, strategies as st
from turns import Turns, quickest, turns_of

from kvdock._core import decoding_within
from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import Peer
from kvdock.api.admin import Admin
from kvdock.api.background import Background
from kvdock.api.build import build
from kvdock.api.clock import Clocks, ServerClock
from kvdock.api.keeper import EVICT_SLICE_CHUNKS
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.pool.quotas import UNLIMITED, Quotas
from kvdock.api.pool.registry import Names, Registry
from kvdock.api.pool.sessions import Drain, Sessions
from kvdock.api.record.journal import Journal
from kvdock.api.record.labels import MOST_NAMES, Labels
from kvdock.api.record.troubles import Troubles
from kvdock.api.reports.contents import PAUSE, Contents
from kvdock.api.settings import Settings
from kvdock.api.tiers.clears import CLEAR_SLICE_RECORDS, Clears, OrderFile
from kvdock.api.tokens import LONG_BODY_BYTES, cut_tokens, hash_tokens
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import JSON, MAX_COST, PACKED, Codec
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.schemas import Group, Lookup, Manifest

TURN_MS = 15.0
"""The longest turn of a call. Decoding a million tokens at once takes about 60 ms, hashing them 25 ms."""
TOKENS = [random.Random(7).randrange(150_000) for _ in range(1 << 12)] * 256
DECODER = msgspec.json.Decoder(Lookup)


def test_a_million_tokens_are_decoded_and_hashed_in_short_turns() -> None:
    body = msgspec.json.encode({"namespace": "0" * 64, "tokens": TOKENS, "request": "r"})
    cut: list[Any] = []

    def measured() -> Turns:
        async def work() -> None:
            rest, tokens = await cut_tokens(body)
            assert tokens is not None and len(tokens) == 1 << 20
            cut[:] = rest, await hash_tokens(bytes(32), tokens, 256)

        return turns_of(work)

    turns = quickest(measured, TURN_MS)
    assert turns.longest_ms < TURN_MS and turns.number > 100
    assert DECODER.decode(cut[0]).request == "r"
    assert cut[1] == b"".join(chunk_keys(bytes(32), TOKENS, 256))


def padded(body: bytes) -> bytes:
    """Long enough to be cut."""
    return body + b" " * LONG_BODY_BYTES


@pytest.mark.parametrize("array", [
    b"[1,2,", b"[1,2,]", b"[,1]", b"[1,,2]", b"[1 2]", b"[-1]", b"[4294967296]", b"[1.5]", b'["1"]', b"[[1],2]",
    b"[null]", b"[1,2", b"1", b"{}", b"[" + b"1," * 20_000 + b"]", b"[" + b"1," * 20_000 + b"x]",
])
def test_what_is_no_list_of_tokens_is_refused_cut_or_not(server: ServerProcess, array: bytes) -> None:
    json = {"Content-Type": "application/json"}
    with Client(server.unix) as client:
        space = attach(client).attached.namespace.encode()
    body = b'{"namespace":"' + space + b'","tokens":' + array + b"}"
    for sent in (body, padded(body)):
        status, _, content = raw(server.unix, "POST", "/v1/lookups", sent, json)
        assert status in (400, 422) and msgspec.json.decode(content)["code"] in ("invalid_body", "malformed_json")


@pytest.mark.parametrize("body", [
    b'{"request":"tokens","tokens":[1]}', b'{"tokens": [ ] }', b'{"request":"\\"tokens\\":[","tokens":[1,2]}',
    b'{"tokens" : [ 1 , 2\n, 3 ] ,"epoch":1}', b'{"tokens":[1],"tokens":[2]}', b'{"keys":[]}', b'{"tokens":null}',
])
def test_a_body_that_was_cut_means_what_it_meant_whole(body: bytes) -> None:
    rest, tokens = asyncio.run(cut_tokens(padded(body)))
    decoded = DECODER.decode(rest)
    if tokens is not None:
        decoded.tokens = tokens.tolist()
    assert decoded == DECODER.decode(body)


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=50), st.integers(0, 3000), st.sampled_from([None, 0, 1, 2]),
    st.sampled_from([" ", "", "\n"]),
)
def test_cutting_finds_every_token_however_the_list_is_written(
    some: list[int], repeats: int, indent: int | None, space: str
) -> None:
    text = f",{space}".join(map(str, some * repeats))
    body = padded(f'{{"epoch":{indent or 0},"tokens":[{space}{text}{space}],"request":"r"}}'.encode())
    rest, tokens = asyncio.run(cut_tokens(body))
    assert tokens is not None and tokens.tolist() == some * repeats
    assert DECODER.decode(rest).tokens == []


def test_too_many_tokens_are_refused_while_they_are_read() -> None:
    body = b'{"tokens":[' + b",".join([b"1"] * ((1 << 20) + 1)) + b"]}"
    with pytest.raises(ApiError, match="too many tokens"):
        asyncio.run(cut_tokens(body))


def test_a_packed_body_cannot_be_cut_so_long_lists_are_refused_in_it(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    packed = {"Content-Type": "application/msgpack", "Accept": "application/json"}
    for count, status in ((1 << 16, 200), (MAX_COST, 422)):
        body = {"namespace": engine.attached.namespace, "tokens": TOKENS[:count]}
        found, _, content = raw(server.unix, "POST", "/v1/lookups", msgspec.msgpack.encode(body), packed)
        assert found == status, content
        body["tokens"] = TOKENS[: min(count, (1 << 16) + 15)]  # no more than 4,096 chunks
        assert call(server.http, "POST", "/v1/lookups", body)[0] == 200, "JSON is the way for long ones"
    engine.close()


MANY = 8_000_000
HOLLOW = b"\x81\xa1x\xdd" + MANY.to_bytes(4, "big")
BOMBS: dict[str, Callable[[], bytes]] = {
    "nils": lambda: HOLLOW + b"\xc0" * MANY,
    "lists": lambda: HOLLOW + b"\x90" * MANY,
    "maps": lambda: HOLLOW + b"\x80" * MANY,
    "texts": lambda: HOLLOW + b"\xa0" * MANY,
    "announced": lambda: HOLLOW,
    "nested": lambda: b"\x92" * 60_000,
    "hashes": lambda: msgspec.msgpack.encode({"blocks": [[None, [1 << 63] * 1024, b""]] * 1024}),
    "JSON lists": lambda: b'{"x":[' + b"[]," * 330_000 + b"[]]}",
    "JSON numbers": lambda: b'{"x":[' + b"0," * 500_000 + b"0]}",
    "JSON spaces": lambda: b'{"x":' + b" " * (4 << 20) + b"1}",
}
"""Bodies that hold so many values, or are so long, that to decode one would hold the event loop for too long."""


@pytest.mark.security
@pytest.mark.parametrize("name", BOMBS)
def test_a_body_that_would_take_long_to_decode_is_refused_before(name: str) -> None:
    body, codec, took_s = BOMBS[name](), Codec(Lookup), []
    for _ in range(5):
        began_s = time.thread_time()
        with pytest.raises(ApiError, match=r"too many values|too_large"):
            codec.decode(body, JSON if "JSON" in name else PACKED)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.001


@pytest.mark.security
def test_what_decoding_costs_is_counted_by_every_kind_of_value() -> None:
    def cost(value: object, *, packed: bool) -> int:
        body = (msgspec.msgpack if packed else msgspec.json).encode(value)
        return next(limit for limit in range(200) if decoding_within(body, limit, packed=packed))

    for value, in_packed, in_json in (
        (None, 1, 1), (-3, 1, 1), (1.5, 1, 1), (1 << 63, 2, 1), ("a" * 300, 1, 1), ([], 4, 5), ([None] * 10, 14, 14),
        ({"a": 1, "b": 2}, 8, 6), ([-5, -500, -70_000, 1 << 40, "é", True], 11, 10), ([[]] * 20, 84, 104),
    ):
        assert (cost(value, packed=True), cost(value, packed=False)) == (in_packed, in_json), value
    extension = msgspec.msgpack.Ext(5, bytes(9))
    assert cost([extension, bytes(70_000), {}, 1], packed=True) == 11


def test_too_many_keys_and_chunks_are_refused(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    body = {"namespace": engine.attached.namespace}
    many = refused(server.http, "POST", "/v1/lookups", {**body, "keys": keys(1) * 4097})
    assert (many["code"], many["found"]) == ("invalid_body", "$.keys")
    chunks = refused(server.http, "POST", "/v1/lookups", {**body, "tokens": TOKENS[: 4097 * 16]})
    assert (chunks["code"], chunks["found"], chunks["wanted"]) == ("bad_argument", 4097, 4096)
    engine.close()


@contextmanager
def full_pool() -> Iterator[tuple[Settings, Pool, Registry]]:
    """12 000 chunks that nobody holds."""
    loaded = Settings.load(small_pool(pool_bytes=64 * MIB, segment_bytes=64 * MIB))
    pool = open_pool(loaded, random.Random(time.time_ns()).getrandbits)
    try:
        registry = Registry(pool.table.first_incarnation, pool.secret)
        asyncio.run(pool.grow_first())
        table, manifest = pool.table, Manifest(
            model="m", kv_dtype="f", layers=1, kv_heads=1, head_size=1, chunk_tokens=16, block_tokens=4,
            groups=(Group(part_bytes=4096),),
        )
        space = table.add_namespace(bytes(32), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 4096)])
        registry.add_namespace(space, bytes(32), manifest)
        session = table.open_session(bytes(16), space, 0)
        member = table.add_member(session, bytes(16), [0], True, 0)
        for store in range(12):
            chain = bytes.fromhex("".join(keys(1000, f"chain {store}")))
            granted = table.reserve(
                session, member, store.to_bytes(16, "big"), b"", chain, groups=0, temporary=False,
                deadline_ms=60_000, now_ms=0,
            )
            table.commit(session, granted.grant, 0, [(index, 0, 1) for index in range(1000)], 0)
        yield loaded, pool, registry
    finally:
        pool.close()


def test_clearing_many_chunks_goes_in_short_turns(tmp_path: Path) -> None:
    """Admin alone."""
    def measured() -> Turns:
        with full_pool() as (loaded, pool, registry):
            table = pool.table
            cleared: list[int] = []
            journal = Journal(time.time)
            sessions = Sessions(
                pool, registry, Names(1), Quotas(table, UNLIMITED), Drain(loaded, pool, time.monotonic), ServerClock()
            )
            clears = Clears(table, registry, journal, OrderFile(tmp_path / "orders"), (), Background(print))
            labels = Labels(registry, pool.table)
            admin = Admin(loaded, sessions, journal, clears, Troubles(time.time), labels, lambda: None)

            async def work() -> None:
                cleared.append((await admin.clear(ClearCache())).chunks)

            turns = turns_of(work)
            assert cleared == [12_000] and table.stats()["ready_chunks"] == 0
            return turns

    turns = quickest(measured, TURN_MS)
    assert turns.longest_ms < TURN_MS and turns.number >= 12_000 // CLEAR_SLICE_RECORDS


def test_all_that_is_cached_is_counted_in_short_turns_and_once_for_all_who_ask() -> None:
    """12 000 chunks."""
    with full_pool() as (_, pool, registry):
        peer = Peer("a test", frozenset({"admin"}), None, is_unix=True)

        def measured() -> Turns:
            read: list[float] = []

            def now_s() -> float:
                read.append(time.monotonic())
                return read[-1]

            contents = Contents(pool.table, registry, Labels(registry, pool.table), ServerClock(), now_s)

            async def work() -> None:
                asked = await asyncio.gather(*(contents.prefixes(peer, 5) for _ in range(20)))
                assert {found.prefix_count for found in asked} == {12}
                assert [one.chunks for one in asked[0].prefixes] == [1000] * 5

            turns = turns_of(work)
            assert turns.number > 10, "as many as slices: to look at, find the ways of, add and rank 12 000"
            assert len(read) < 60, "the clock is read twice in each slice of a count"
            return turns

        assert quickest(measured, TURN_MS).longest_ms < TURN_MS


def test_what_goes_on_from_a_chunk_and_what_is_searched_for_is_counted_in_short_turns() -> None:
    """12 000 chunks, and all labels that a server keeps."""
    with full_pool() as (_, pool, registry):
        peer, labels = Peer("a test", frozenset({"admin"}), None, is_unix=True), Labels(registry, pool.table)
        (space,) = registry.namespaces()
        whole = asyncio.run(Contents(pool.table, registry, labels, ServerClock(), time.monotonic).prefixes(peer, 12))
        for number in range(MOST_NAMES):
            labels.name(space, bytes.fromhex(whole.prefixes[number % 12].last_key), f"name {number}")

        def measured() -> Turns:
            contents = Contents(pool.table, registry, labels, ServerClock(), time.monotonic)

            async def work() -> None:
                first = whole.prefixes[0]
                below = contents.prefixes(peer, 5, namespace=first.namespace, below=first.key)
                searches = (contents.prefixes(peer, 5, search=text) for text in ("name 7", "m", first.key))
                found = await asyncio.gather(below, *searches)
                assert [one.prefix_count for one in found] == [1, len({n % 12 for n in (7, *range(70, 80))}), 12, 1]
                assert found[0].prefixes[0].chunks == 999

            turns = turns_of(work)
            assert turns.number > 30, "four censuses, one after the other"
            return turns

        assert quickest(measured, TURN_MS).longest_ms < TURN_MS


def test_a_search_of_what_is_cached_leaves_most_of_the_time_to_others() -> None:
    """12 000 chunks, and a clock by which each slice takes 1 ms."""
    waits: list[float] = []

    class Hurried(asyncio.SelectorEventLoop):
        def call_later(  # type: ignore[override]  # asyncio's is generic in the arguments
            self, delay: float, callback: Callable[..., object], *args: Any, **more: Any
        ) -> asyncio.TimerHandle:
            waits.append(delay)
            return super().call_later(0.0, callback, *args, **more)

    with full_pool() as (_, pool, registry), asyncio.Runner(loop_factory=Hurried) as runner:
        read = itertools.count()
        labels = Labels(registry, pool.table)
        contents = Contents(pool.table, registry, labels, ServerClock(), lambda: next(read) / 1000)
        peer = Peer("a test", frozenset({"admin"}), None, is_unix=True)
        runner.run(contents.prefixes(peer, 5, search="m"))
        assert len(waits) > 10 and waits == pytest.approx([PAUSE / 1000] * len(waits))


@pytest.mark.security
def test_a_tenant_far_above_its_quota_is_evicted_in_short_turns() -> None:
    """The keeper, over a table with 12 000 chunks."""
    def measured() -> Turns:
        with full_pool() as (loaded, pool, _):
            parts = build(loaded, pool, AccessFile(""), Clocks())
            pool.table.set_quota(bytes(16), bytes=None, chunks=0)

            async def work() -> None:
                keeper = asyncio.create_task(parts.keeper.run())
                while pool.table.stats()["ready_chunks"]:
                    await asyncio.sleep(0)
                keeper.cancel()

            return turns_of(work)

    turns = quickest(measured, TURN_MS)
    assert turns.number >= 12_000 // EVICT_SLICE_CHUNKS
    assert turns.longest_ms < TURN_MS
