"""KV events for routers: what a real server tells over ZeroMQ and as server-sent events is what its lookups find."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, Engine, ServerProcess, access_file, attach, eventually, http_connection, keys, raw
from kv_readers import Belief, ZmqReader, endpoints, streamed
from msgspec import UNSET

from kvdock.api.access.access_file import entry
from kvdock.api.errors import SettingsError
from kvdock.api.feeds import kv
from kvdock.api.feeds.kv import BATCH_CHUNKS, BATCH_TOKENS, CHUNK_BYTES, KvLog, Source
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.errors import ApiError
from kvdock.protocol.kv_events import AllBlocksCleared, BlockNames, BlockStored, named

CHUNK = 16
"""Tokens of a chunk of api_helpers.manifest."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(**endpoints(), kv_events_topic="kv@node:here@{model}") as process:
        yield process


@pytest.fixture
def reader(server: ServerProcess) -> Iterator[ZmqReader]:
    made = ZmqReader(server, "kv@")
    yield made
    made.close()


def names_of(chain: list[str], blocks: int = 4) -> list[BlockNames]:
    """What an engine might call these: hashes that follow from the keys."""
    hashes = [[int(key[:12], 16) << 8 | at for at in range(blocks)] for key in chain]
    before = [None, *(one[-1] for one in hashes)]
    return [named(before[at], one, range(CHUNK * at, CHUNK * (at + 1))) for at, one in enumerate(hashes)]


def store(engine: Engine, chain: list[str], names: list[BlockNames] | None, name: str = "s") -> None:
    granted = engine.client.reserve(s.Reserve(
        session=engine.session, member=engine.member, store=name, keys=chain,
        blocks=names if names is not None else UNSET,
    ))
    parts = [s.PartDone(chunk.index, 0, "0" * 15 + "1") for chunk in granted.chunks]
    assert granted.reservation is not None
    engine.client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=parts))


def tells(server: ServerProcess, token: str, hashes: list[str]) -> bool:
    ((_, body),) = streamed(server, token=token)
    return [event.get("block_hashes") for event in body["events"]] == [None, hashes]


def key_hash(key: str) -> int:
    return int(key[-16:], 16)


# ------------------------------------------------------------------ what is told


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_is_stored_and_cleared_is_told_as_the_engine_knows_it(form: str) -> None:
    with ServerProcess(**endpoints(), kv_events_form=form, kv_events_topic="kv@node:here@{model}") as server:
        reader = ZmqReader(server, "kv@")
        with Client(server.unix) as client:
            engine, chain = attach(client, served_model_name="meta/llama-8b"), keys(2)
            assert engine.attached.wants_blocks
            store(engine, chain, names_of(chain))
            topic, number, (cleared, first, second) = reader.next()
            assert topic == "kv@node:here@meta/llama-8b" and cleared == {"type": "AllBlocksCleared"}
            names = names_of(chain)
            assert first.items() >= {
                "type": "BlockStored", "block_hashes": list(names[0].hashes), "parent_block_hash": None,
                "token_ids": list(range(CHUNK)), "block_size": CHUNK // 4, "medium": "CPU",
            }.items()
            assert second["parent_block_hash"] == names[0].hashes[-1]
            assert second["token_ids"] == list(range(CHUNK, 2 * CHUNK))
            client.clear(ClearCache())
            _, following, removed = reader.next()
            assert following == number + 1
            assert sorted(tuple(one["block_hashes"]) for one in removed) == sorted(name.hashes for name in names)
            assert all((one["type"], one["medium"]) == ("BlockRemoved", "CPU") for one in removed)
            engine.close()
        reader.close()


def test_a_chunk_that_no_engine_has_named_is_told_by_its_key_until_one_names_it(
    client: Client, reader: ZmqReader
) -> None:
    engine, chain = attach(client), keys(2)
    store(engine, chain, None)
    _, _, (_, first, second) = reader.next()
    assert first["block_hashes"] == [key_hash(chain[0])] and first["token_ids"] == []
    assert (first["parent_block_hash"], first["block_size"]) == (None, CHUNK)
    assert (second["block_hashes"], second["parent_block_hash"]) == ([key_hash(chain[1])], key_hash(chain[0]))
    granted = client.reserve(s.Reserve(
        session=engine.session, member=engine.member, store="again", keys=chain[:1],
        blocks=[named(None, [], range(CHUNK))],
    ))
    assert granted.present == [0]
    _, _, (gone, there) = reader.next()
    assert (gone["type"], gone["block_hashes"]) == ("BlockRemoved", [key_hash(chain[0])])
    assert there["block_hashes"] == [key_hash(chain[0])] and there["token_ids"] == list(range(CHUNK))
    engine.close()


@pytest.mark.parametrize(("names", "found"), [
    (names_of(keys(1)), "$.blocks: 1"),
    ([named(None, [], range(CHUNK)), named(None, [], range(CHUNK - 1))], "$.blocks[1]: 60 bytes of tokens"),
    ([named(None, [1, 2, 3], range(CHUNK))] * 2, "$.blocks[0]: 3 hashes"),
])
def test_names_that_do_not_fit_are_refused(names: list[BlockNames], found: str, client: Client) -> None:
    engine = attach(client)
    with pytest.raises(ApiError) as refused:
        store(engine, keys(2), names)
    assert refused.value.code == "invalid_body" and refused.value.found == found
    assert client.lookup(s.Lookup(namespace=engine.attached.namespace, keys=keys(2))).hit_tokens == 0
    engine.close()


def test_a_hash_has_64_bits() -> None:
    assert BlockNames((1 << 64) - 1, (1,), bytes(4 * CHUNK)).fault(CHUNK) == ""
    assert BlockNames(None, (1 << 64,), bytes(4 * CHUNK)).fault(CHUNK) == "a hash of more than 64 bits"


def test_a_router_believes_what_lookups_find_whatever_happens() -> None:
    """Stores in a pool that is too small, clears and deletions; the stream and ZeroMQ agree."""
    source, belief = random.Random(1), Belief()
    with ServerProcess(**endpoints(), pool_bytes=4 * MIB, segment_bytes=4 * MIB) as small, \
            Client(small.unix) as client:
        follower = ZmqReader(small)
        engine = attach(client, groups=(s.Group(part_bytes=256 << 10),))
        chains = [keys(4, str(number)) for number in range(12)]
        for step in range(60):
            chain = source.choice(chains)
            names = names_of(chain)
            granted = client.reserve(s.Reserve(
                session=engine.session, member=engine.member, store=str(step), keys=chain, blocks=names,
            ))
            if granted.reservation is not None:
                parts = [s.PartDone(chunk.index, 0, "0" * 15 + "1") for chunk in granted.chunks]
                client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=parts))
            if step % 20 == 19:
                client.clear(ClearCache())

        def truth() -> set[int]:
            found: set[int] = set()
            for chain in chains:
                hit = client.lookup(s.Lookup(namespace=engine.attached.namespace, keys=chain)).hit_tokens // CHUNK
                found |= {one for name in names_of(chain)[:hit] for one in name.hashes}
            return found

        for chain in chains[:3]:
            store(engine, chain, names_of(chain), f"last {chain[0]}")
        def snapshot() -> tuple[set[int], int]:
            told, last = Belief(), ""
            for name, body in streamed(small):
                last = name or last
                told.hear([
                    {**event, "block_hashes": [int(one, 16) for one in event.get("block_hashes", ())]}
                    for event in body["events"]
                ])
            return told.there, int(last.rpartition("-")[2])

        wanted = truth()
        assert wanted
        eventually(lambda: snapshot()[0] == wanted)
        until, number = snapshot()[1], -1
        while number < until:
            _, number, events = follower.next()
            belief.hear(events)
        assert belief.there == wanted
        follower.close()
        engine.close()


# ------------------------------------------------------------------ who was away, or comes late


def test_what_was_missed_is_sent_again_by_its_number_and_else_a_snapshot(client: Client, reader: ZmqReader) -> None:
    engine = attach(client)
    heard = []
    for number in range(3):
        store(engine, keys(1, str(number)), names_of(keys(1, str(number))), str(number))
        heard.append(reader.next())  # a batch each
    numbers = [number for _, number, _ in heard]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert reader.ask(numbers[1]) == heard[1:] and reader.ask(numbers[2] + 1) == []
    client.clear(ClearCache())
    _, last, _ = reader.next()
    store(engine, keys(2, "x"), names_of(keys(2, "x")), "x")
    _, last, _ = reader.next()
    for unknown in (0, numbers[0] - 1, last + 2, (1 << 64) - 1):
        ((topic, number, events),) = reader.ask(unknown)
        assert topic == "kv@node:here@test-model" and number == last
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
        assert Belief().hear(events) == {one for name in names_of(keys(2, "x")) for one in name.hashes}
    engine.close()


def test_the_next_server_s_numbers_are_higher_and_what_it_took_over_is_told(tmp_path: Path) -> None:
    settings = {"socket_path": str(tmp_path / "kvdock.sock"), **endpoints()}
    with ServerProcess(**settings) as first:
        reader = ZmqReader(first)
        with Client(first.unix) as client:
            engine, chain = attach(client), keys(3)
            store(engine, chain, names_of(chain))
            _, before, _ = reader.next()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(10.0)
        with ServerProcess(**settings) as second, Client(second.unix) as client:
            assert client.attach(engine.body).namespace == engine.attached.namespace
            eventually(lambda: len(streamed(second)[0][1]["events"]) == 4)
            eventually(reader.is_connected)
            engine.client = client
            store(engine, keys(1, "new"), names_of(keys(1, "new")), "new")
            _, after, _ = reader.next()
            assert after > before + 1, "a gap, so the router asks"
            ((_, number, events),) = reader.ask(before + 1)
            assert number == after and events[0] == {"type": "AllBlocksCleared"}
            adopted = [one["block_hashes"][0] for one in events[1:] if not one["token_ids"]]
            assert sorted(adopted) == sorted(map(key_hash, chain)), "no engine has named them to this server"
        engine.close()
        reader.close()


def test_a_stream_goes_on_behind_the_last_id_and_else_begins_with_a_snapshot(
    client: Client, server: ServerProcess
) -> None:
    engine = attach(client)
    store(engine, keys(1, "a"), names_of(keys(1, "a")), "a")
    eventually(lambda: len(streamed(server)[0][1]["events"]) == 2)
    ((first, body),) = streamed(server)
    assert body["model"] == "test-model" and body["events"][0] == {"type": "AllBlocksCleared"}
    assert body["events"][1]["block_hashes"] == [f"{one:016x}" for one in names_of(keys(1, "a"))[0].hashes]
    assert streamed(server, last_id=first) == []
    store(engine, keys(1, "b"), names_of(keys(1, "b")), "b")
    eventually(lambda: streamed(server, last_id=first) != [])
    ((second, body),) = streamed(server, last_id=first)
    assert int(second) == int(first) + 1 and [event["type"] for event in body["events"]] == ["BlockStored"]
    for unknown in ("1", "elsewhere", str(int(second) + 9)):
        ((found, body),) = streamed(server, last_id=unknown)
        assert found == second
        assert [event["type"] for event in body["events"]] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
    engine.close()


def test_who_follows_gets_what_comes_until_the_server_drains(client: Client, server: ServerProcess) -> None:
    with closing(http_connection(server.unix)) as connection:
        connection.request("GET", "/v1/kv-events?follow=1")
        answer = connection.getresponse()
        assert answer.readline() == b"retry: 1000\n"
        engine = attach(client)
        store(engine, keys(1), names_of(keys(1)))
        line = next(line for line in iter(answer.readline, b"") if b"BlockStored" in line)
        assert line.startswith(b"data: ")
        engine.close()
        server.process.send_signal(signal.SIGTERM)
        answer.read()
    assert server.process.wait(10.0) == 0


@pytest.mark.security
def test_a_tenant_s_routers_see_its_own_and_zeromq_has_the_server_s_own(tmp_path: Path) -> None:
    tokens = {name: f"{name}-" + "t" * 40 for name in ("a", "b")}
    entries = [entry(name, token, ["engine"], f"tenant-{name}") for name, token in tokens.items()]
    with ServerProcess(**endpoints(), access_file=str(access_file(tmp_path, *entries))) as server:
        reader = ZmqReader(server)
        for name, token in tokens.items():
            with Client(server.unix, access_token=token) as client:
                engine = attach(client)
                store(engine, keys(1, name), names_of(keys(1, name)))
                engine.close()
        for name, token in tokens.items():
            wanted = [f"{one:016x}" for one in names_of(keys(1, name))[0].hashes]
            eventually(partial(tells, server, token, wanted))
        with Client(server.unix) as client:
            own = attach(client)
            store(own, keys(1, "own"), names_of(keys(1, "own")))
            _, _, (_, stored) = reader.next()
            assert stored["block_hashes"] == list(names_of(keys(1, "own"))[0].hashes)
            own.close()
        assert raw(server.http, "GET", "/v1/kv-events", headers={"Authorization": ""})[0] == 401
        reader.close()


# ------------------------------------------------------------------ bounds


class Scripted:
    """A table's log, and what is there, as a test says."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, bytes, bool, bytes]] = []
        self.is_complete = True
        self.there: list[tuple[int, bytes, bool, bytes]] = []

    def since(self, since: int, at_most: int) -> tuple[list[tuple[int, bytes, bool, bytes]], int, bool]:
        is_complete, self.is_complete = self.is_complete, True
        found = self.changes[since : since + at_most] if is_complete else []
        return found, since + len(found) if is_complete else len(self.changes), is_complete

    def ready(self, start: int, budget: int) -> tuple[list[tuple[int, bytes, bool, bytes]], int]:
        end = start + budget
        return self.there[start:end], end if end < len(self.there) else -1


def followed(most_bytes: int = 1 << 30) -> tuple[KvLog, Scripted]:
    table = Scripted()
    log = KvLog(table.since, table.ready, lambda: 1.0, most_bytes=most_bytes)
    log.met(0, Source(b"d", "", "m", CHUNK))
    log._is_walked = True
    return log, table


def follow(log: KvLog) -> None:
    asyncio.run(log._follow())


def test_of_what_does_not_fit_into_memory_routers_are_told_that_it_is_gone() -> None:
    log, table = followed(most_bytes=10 * CHUNK_BYTES)
    table.changes = [(0, bytes([number]) * 32, True, bytes(32)) for number in range(25)]
    follow(log)
    batches, is_snapshot = log.since("", 1000)
    belief = Belief()
    for batch in batches:
        belief.hear([
            {"type": type(event).__name__, "block_hashes": getattr(event, "block_hashes", [])}
            for event in batch.events()
        ])
    assert not is_snapshot and log.chunks == 10
    assert belief.there == {int.from_bytes(bytes([number]) * 8, "big") for number in range(15, 25)}


@pytest.mark.security
def test_a_tenant_with_many_chunks_leaves_another_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other's routers are told after each chunk that the one before it is gone, and its readers that follow
    get a snapshot in place of each event."""
    monkeypatch.setattr(kv, "KEPT_BYTES", 20 * CHUNK_BYTES)
    log, table = followed(most_bytes=10 * CHUNK_BYTES)
    log.met(1, Source(b"e", "other", "m", CHUNK))
    log._is_walked = True
    table.changes = [(0, bytes([number]) * 32, True, bytes(32)) for number in range(25)]
    follow(log)
    first = log.next_of("other")
    for number in range(4):
        table.changes.append((1, bytes([number]) * 32, True, bytes(32)))
        follow(log)
    batches = log.kept("other", first)
    assert batches is not None
    assert [type(event) for batch in batches for event in batch.events()] == [AllBlocksCleared, *[BlockStored] * 4]
    assert [len(log._logs.of(tenant).there) for tenant in ("other", "")] == [4, 6]
    table.changes += [(1, bytes([number]) * 32, True, bytes(32)) for number in range(4, 25)]
    follow(log)
    assert sorted(len(one.there) for one in log._logs) == [5, 5]
    logs = list(log._logs)
    assert log._room.used_bytes == sum(chunk.size_bytes for one in logs for page in one.there.pages()
                                       for chunk in page.values()) == sum(one.there_bytes for one in logs)
    assert log._logs._kept_bytes == sum(one.kept_bytes for one in logs) <= kv.KEPT_BYTES


def test_who_falls_behind_the_table_clears_all_and_tells_what_is_there() -> None:
    log, table = followed()
    table.changes = [(0, b"a" * 32, True, bytes(32))]
    follow(log)
    table.is_complete, table.there = False, [(0, b"b" * 32, True, bytes(32)), (0, b"c" * 32, True, b"b" * 32)]
    follow(log)
    (_, after), is_snapshot = log.since("", 1000)
    assert not is_snapshot
    assert [type(event).__name__ for event in after.events()] == ["AllBlocksCleared", "BlockStored", "BlockStored"]


def test_a_snapshot_is_cut_into_batches_that_end_with_the_newest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "KEPT_BYTES", 1000 * CHUNK_BYTES)
    log, table = followed()
    table.changes = [(0, struct.pack("<Q", number) * 4, True, bytes(32)) for number in range(3000)]
    follow(log)
    newest = log.next_of("") - 1
    found, is_snapshot = log.since("", 1000)
    assert is_snapshot and log.snapshots == 1
    table.changes = [(0, b"later" * 7, True, bytes(32))]
    follow(log)  # what comes while batches are made is not in them
    batches = list(found)
    assert {batch.seq for batch in batches} == {newest} and len(batches) > 3000 * CHUNK // BATCH_TOKENS
    assert all(len(batch.items) <= BATCH_CHUNKS + 1 for batch in batches)
    events = [event for batch in batches for event in batch.events()]
    assert len(events) == 3001 and sum(isinstance(event, BlockStored) for event in events[1:]) == 3000
    newest = log.next_of("") - 1
    kept, is_snapshot = log.since("", newest - 2)
    assert not is_snapshot and [batch.seq for batch in kept] == list(range(newest - 2, newest + 1))
    logs = log._logs
    assert logs._kept_bytes == sum(batch.size_bytes for batch in logs.of("")._kept) <= 1000 * CHUNK_BYTES


def test_what_engines_say_of_chunks_that_never_come_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    name = named(None, [1], range(CHUNK))
    monkeypatch.setattr(kv, "NAMES_BYTES", 10 * (CHUNK_BYTES + 64 + 4 * CHUNK))
    log, table = followed()
    log.named(0, b"".join(bytes([number]) * 32 for number in range(25)), [name] * 25)
    assert len(log._names) == 10
    table.changes = [(0, bytes([number]) * 32, True, bytes(32)) for number in (14, 15)]
    follow(log)
    (batch,), _ = log.since("", 1000)
    assert [len(getattr(event, "token_ids", [])) for event in batch.events()] == [0, 0, CHUNK]


@pytest.mark.security
def test_a_tenant_that_names_all_it_can_makes_no_other_tenants_names_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose name was forgotten is told by its key, which no router looks for."""
    name = named(None, [1], range(CHUNK))
    monkeypatch.setattr(kv, "NAMES_BYTES", 10 * (CHUNK_BYTES + 64 + 4 * CHUNK))
    log, table = followed()
    log.met(1, Source(b"its own", "honest", "m", CHUNK))
    log.named(1, b"".join(bytes([number]) * 32 for number in range(3)), [name] * 3)
    log.named(0, b"".join(bytes([number]) * 32 for number in range(100, 200)), [name] * 100)
    assert len(log._names) == 10
    log.named(1, bytes([3]) * 32 + bytes([4]) * 32, [name] * 2)
    assert 8 <= len(log._names) <= 10
    table.changes = [(1, bytes([number]) * 32, True, bytes(32)) for number in range(5)]
    follow(log)
    (batch,), _ = log.since("honest", 1000)
    assert [len(getattr(event, "token_ids", [])) for event in batch.events()] == [0, *[CHUNK] * 5]


def test_a_number_that_another_namespace_has_now_gives_it_neither_chunks_nor_names() -> None:
    name = named(None, [1], range(CHUNK))
    log, table = followed()
    log.named(0, b"a" * 32, [name])
    table.changes = [(0, b"a" * 32, True, bytes(32)), (0, b"b" * 32, True, b"a" * 32)]
    follow(log)
    log.named(0, b"c" * 32, [name])
    log.met(0, Source(b"another", "another tenant", "m", CHUNK))
    asyncio.run(log._remove_gone())
    batches, is_snapshot = log.since("", log._logs._first)
    assert [len(batch.events()) for batch in batches] == [3, 2] and not is_snapshot
    assert log.chunks == 0 and not +log._count
    table.changes += [(0, key * 32, True, bytes(32)) for key in (b"a", b"b", b"c")]
    follow(log)
    (batch,), _ = log.since("another tenant", 1000)
    assert [len(getattr(event, "token_ids", [])) for event in batch.events()] == [0, 0, 0, 0], "its own are not named"


# ------------------------------------------------------------------ the start


@pytest.mark.security
@pytest.mark.parametrize(("given", "said"), [
    ({"kv_events_endpoint": "tcp://127.0.0.1:1"}, "wanted kv_events in observe="),
    ({"observe": "kv_events", "kv_events_endpoint": "127.0.0.1:5557"}, "wanted tcp://host:port or ipc://path"),
    ({"observe": "kv_events", "kv_events_replay_endpoint": "tcp://127.0.0.1:1"}, "wanted kv_events_endpoint as well"),
    ({"observe": "kv_events", "kv_events_endpoint": "tcp://0.0.0.0:5557"}, "or kv_events_readers=anybody: whoever"),
    ({"observe": "kv_events", "kv_events_endpoint": "tcp://*:5557"}, "wanted an address on loopback"),
    ({"observe": "kv_events", "kv_events_endpoint": "tcp://[::]:5557"}, "wanted an address on loopback"),
    ({"kv_events_form": "list"}, "wanted map or array; found kv_events_form='list'"),
])
def test_half_a_wish_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.load(given)
    assert said in str(refused.value)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///run/kv"])
def test_addresses_of_this_machine_need_no_leave(endpoint: str) -> None:
    given = {"observe": "kv_events", "kv_events_endpoint": endpoint}
    assert Settings.load(given).kv_events_readers == "loopback"
    Settings.load({**given, "kv_events_endpoint": "tcp://0.0.0.0:1", "kv_events_readers": "anybody"})


def serve(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before}\nfrom kvdock.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "serve", "--observe", "kv_events", *arguments], capture_output=True, text=True,
        timeout=60,
    )


def test_without_the_package_the_server_does_not_start_and_says_what_to_install() -> None:
    found = serve("--kv-events-endpoint", "tcp://127.0.0.1:0", before="sys.modules['zmq'] = None")
    assert found.returncode == 1 and "pip install 'kvdock[zmq]'" in found.stderr and found.stderr.count("\n") == 1


def test_a_port_in_use_is_refused_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = serve("--kv-events-endpoint", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert found.returncode == 1 and "cannot be published at" in found.stderr and found.stderr.count("\n") == 1


def test_nobody_reads_what_is_switched_off() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        assert not engine.attached.wants_blocks
        assert raw(server.http, "GET", "/v1/kv-events")[0] == 404
        engine.close()
