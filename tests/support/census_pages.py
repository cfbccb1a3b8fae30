"""Counts of a table whose pages are used again for larger records meanwhile, of which fewer fit into one."""

from __future__ import annotations

import os
from collections.abc import Iterable

from table_helpers import PAGE, Client, key, new_table

from kvdock._core import Census, Mapping, Table

RECORDS, CHUNKS, WRITERS, GROUPS = 256, 10, range(8), range(16)
BEHIND_BYTES = 64 << 20


def counts_while_pages_change(stops: Iterable[int]) -> list[tuple[list[bytes], int]]:
    """First keys of the prefixes, and how many there are, for each number of pieces of work before the change."""
    return [_count(stop) for stop in stops]


def _region_with_an_end() -> Mapping:
    """Who reads behind it is killed by SIGBUS: it is mapped, and there is no memory."""
    size = Table.region_bytes(2 * RECORDS, 256)
    fd = os.memfd_create("kvdock-census")
    os.ftruncate(fd, size + BEHIND_BYTES)
    region = Mapping(fd, size + BEHIND_BYTES)
    os.ftruncate(fd, size)
    os.close(fd)
    return region


def _count(stop: int) -> tuple[list[bytes], int]:
    table = new_table(8 << 20, records=2 * RECORDS, region=_region_with_an_end())
    client = Client(table, PAGE)
    for number in range(RECORDS):
        client.store([key("old", number)])
    census, place = Census(table), 0
    for _ in range(stop):
        census.step(1)
    while place >= 0:
        _, place = table.clear(client.space, place, 1 << 20)
    space = _store_wide(client)
    while not census.step(1):
        pass
    found, count, _ = census.prefixes([client.space, space], RECORDS)
    return [one[1] for one in found], count


def _store_wide(client: Client) -> int:
    """Chunks of 128 parts, in a namespace that is returned."""
    table = client.table
    space = table.add_namespace(
        key("space"), chunk_tokens=16, block_tokens=4, writers=len(WRITERS), groups=[("full", 0, PAGE) for _ in GROUPS]
    )
    client.session = table.open_session(key("session")[:16], space, 0)
    client.member = table.add_member(client.session, key("member")[:16], list(WRITERS), True, 0)
    got = client.reserve([key("wide", at) for at in range(CHUNKS)])
    for rank in WRITERS:
        parts = [(index, group, 1) for index, _ in got.chunks for group in GROUPS]
        table.commit(client.session, got.grant, rank, parts, 0)
    assert table.state_of(space, key("wide", CHUNKS - 1)) == "ready"
    return space
