"""Calls that the API allows, and that once crashed the server, leaked, or took what never came back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from table_helpers import Client, key, new_region, new_table

from kvdock._core import Table, TableError

pytestmark = [pytest.mark.table_model, pytest.mark.security]

MIB = 1 << 20
LARGEST = 2044
"""Parts of a record that fills its page: (65,536 - 112) / 32."""


def add_wide(table: Table, writers: int, groups: int) -> int:
    return table.add_namespace(
        key("wide", writers, groups), chunk_tokens=16, block_tokens=16, writers=writers,
        groups=[("full", 0, 4096)] * groups,
    )


@pytest.mark.parametrize(("writers", "groups"), [(128, 16), (127, 16), (128, 15), (2, 2)])
def test_a_chunk_of_more_parts_than_a_page_can_name_is_refused_at_attach(writers: int, groups: int) -> None:
    table = new_table(64 * MIB)
    if writers * groups > LARGEST:
        with pytest.raises(TableError, match="too many parts") as refused:
            add_wide(table, writers, groups)
        assert (refused.value.code, refused.value.found) == ("bad_argument", writers * groups)
        assert table.drop_idle_namespaces() == []
        return
    space = add_wide(table, writers, groups)
    session = table.open_session(b"s" * 16, space, 0)
    member = table.add_member(session, b"m" * 16, list(range(writers)), True, 0)
    granted = table.reserve(
        session, member, b"r" * 16, b"", key("chunk"), groups=0, temporary=False, deadline_ms=1000, now_ms=0
    )
    assert len(granted.chunks[0][1]) == writers * groups
    table.check_integrity()


def test_a_namespace_without_session_and_chunk_is_used_again() -> None:
    table = new_table(64 * MIB)
    stays = Client(table, 4096, "stays")
    stays.store([key("kept")])
    table.leave(stays.member)
    for number in range(3000):
        table.leave(Client(table, 4096 * (1 + number % 7), f"adapter-{number}").member)
    table.check_integrity()
    assert table.drop_idle_namespaces() == [stays.space]
    assert stays.has(key("kept"))
    first, second = Client(table, 8192, "first"), Client(table, 12288, "second")
    assert len({stays.space, first.space, second.space}) == 3
    assert first.store([key("kept")]) == second.store([key("kept")]) == 1
    assert table.drop_idle_namespaces() == sorted([stays.space, first.space, second.space])
    table.check_integrity()


def test_as_many_namespaces_as_have_chunks_are_all_that_there_can_be() -> None:
    table = new_table(64 * MIB)
    full = [Client(table, 4096, f"full-{number}") for number in range(1024)]
    with pytest.raises(TableError, match="every namespace has sessions or chunks"):
        Client(table, 4096, "one more")
    table.leave(full[17].member)
    assert Client(table, 4096, "one more").space == full[17].space


def test_a_new_namespace_hears_nothing_of_the_one_whose_number_it_has() -> None:
    table = new_table(64 * MIB)
    old = Client(table, 4096, "old")
    since = table.changes(old.space, 1 << 62, 10)[1]
    old.store([key("secret")])
    assert table.changes(old.space, since, 10)[0] == [(key("secret"), True)]
    table.delete(old.space, key("secret"))
    table.leave(old.member)
    table.drop_idle_namespaces()
    new = Client(table, 4096, "new")
    assert new.space == old.space
    assert table.changes(new.space, since, 10)[0] == []


def test_namespaces_with_gaps_are_adopted() -> None:
    region = new_region()
    table = new_table(64 * MIB, region=region)
    clients = [Client(table, 4096 * (1 + at), f"c{at}") for at in range(4)]
    for client in clients[::2]:
        client.store([key("chunk")])
    for client in clients:
        table.leave(client.member)
    assert table.drop_idle_namespaces() == [clients[0].space, clients[2].space]
    del table
    adopted, _ = Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, 4096, 64 * MIB)],
        limit_bytes=64 * MIB, ask_ms=1000, settle_ms=1000, suspect_ms=1000, session_cap=1.0, total_cap=1.0,
    )
    assert adopted.drop_idle_namespaces() == [clients[0].space, clients[2].space]
    assert adopted.state_of(clients[2].space, key("chunk")) == "ready"
    adopted.check_integrity()


def test_one_commit_cannot_name_a_part_twice_with_two_checksums() -> None:
    client = Client(new_table(MIB), 4096)
    granted = client.reserve([key("a"), key("b")])
    with pytest.raises(TableError, match="twice") as refused:
        client.table.commit(client.session, granted.grant, 0, [(0, 0, 5), (1, 0, 7), (0, 0, 6)], 0)
    assert refused.value.code == "already_committed"
    assert not client.has(key("a")) and not client.has(key("b")), "nothing of it was done"
    assert client.table.commit(client.session, granted.grant, 0, [(0, 0, 5), (1, 0, 7), (0, 0, 5)], 0)[0] == 2


def test_a_pin_that_is_renewed_leaves_nothing_of_the_one_before() -> None:
    client = Client(new_table(8 * MIB), 4096)
    keys = [key(number) for number in range(1000)]
    assert client.store(keys) == 1000
    client.table.pin(client.space, b"".join(keys), 1_000_000)
    for renewal in range(300):
        client.table.pin(client.space, b"".join(keys), 1_000_000 + renewal)
    client.table.check_integrity()  # one entry for each kept chunk
    client.table.tick(1_000_000)
    assert client.table.stats()["kept_bytes"] == 1000 * 4096, "the last wish holds"
    client.table.tick(1_000_299)
    assert client.table.stats()["kept_bytes"] == 0
    client.table.check_integrity()


STALE = """
import ctypes, os, sys
from table_helpers import Client, key, new_table
from kvdock._core import Table
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mmap(None, 256 << 20, 0, 0x22, -1, 0)  # what lies behind the region may not be read
table = new_table(1 << 30, records=64)
small = Client(table, 4096, "small")
last, count = None, 0
while count < 1000:
    granted = small.reserve([key(count, n) for n in range(60)])
    table.commit(small.session, granted.grant, 0, [(at, 0, 5) for at, _ in granted.chunks], 0)
    count, last = count + len(granted.chunks), granted
cursor = 0
if sys.argv[1] == "expire":
    for n in range(0, 60):
        table.pin(small.space, key(count - 60, n), 5000)
while cursor != -1:
    _, cursor = table.clear(-1, cursor, 1000)
space = table.add_namespace(key("wide"), chunk_tokens=16, block_tokens=16, writers=128, groups=[("full", 0, 4096)] * 8)
session = table.open_session(b"w" * 16, space, 0)
member = table.add_member(session, b"w" * 16, list(range(128)), True, 0)
for store in range(9):
    table.reserve(session, member, bytes([store]) * 16, b"", key("wide", store), groups=0, temporary=False,
                  deadline_ms=1000, now_ms=0)
if sys.argv[1] == "evict":
    table.evict(1 << 40, 5)
elif sys.argv[1] == "expire":
    table.tick(6000)
else:
    table.commit(small.session, last.grant, 0, [(at, 0, 5) for at, _ in last.chunks], 7)
table.check_integrity()
"""


@pytest.mark.parametrize("follows", ["evict", "expire", "commit"])
def test_an_id_whose_page_has_larger_records_by_now_is_not_followed(follows: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STALE, follows], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "support")}, check=False,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])


@pytest.mark.parametrize("bit", [45, 52, 62])
def test_a_damaged_last_generation_is_refused(bit: int) -> None:
    region = new_region()
    table = new_table(MIB, region=region)
    Client(table, 4096).store([key("a")])
    del table
    memory = memoryview(region).cast("B")
    at = 72  # last_generation
    memory[at + bit // 8] ^= 1 << bit % 8
    with pytest.raises(TableError, match="the last generation is damaged") as refused:
        Table.adopt(
            region, pool_id=1, lock_inode=0, segments=[(0, 4096, MIB)], limit_bytes=MIB, ask_ms=1, settle_ms=1,
            suspect_ms=1, session_cap=1.0, total_cap=1.0,
        )
    assert refused.value.code == "not_adoptable"


def test_room_is_made_for_the_sizes_that_stores_ask_for() -> None:
    table = new_table(64 * MIB)
    small, large = Client(table, 64 << 10, "small"), Client(table, 3 * MIB, "large")
    turn = 0
    while not table.stats()["evicted_chunks"]:
        turn += 1
        small.store([key("small", turn, n) for n in range(8)])
    assert table.available_bytes() == table.free_bytes()
    assert large.store([key("large")]) == 1  # by eviction, so room is wanted for that size
    for n in range(200):  # holes that no large slot fits into
        table.delete(small.space, key("small", n // 2, n % 8))
    assert table.available_bytes() < table.free_bytes()
    while table.evict(12 * MIB, 16):
        pass
    before = table.stats()["evicted_chunks"]
    assert large.store([key("large", n) for n in range(3)]) == 3
    assert table.stats()["evicted_chunks"] == before
    table.check_integrity()
