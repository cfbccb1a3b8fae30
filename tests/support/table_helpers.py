"""A chunk table on memory of its own, and one engine's calls to it as short sentences."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from kvdock._core import Lookup, Mapping, Reservation, Table

PAGE = 4096


def new_region(records: int = 4096) -> Mapping:
    size = Table.region_bytes(records, 256)
    fd = os.memfd_create("kvdock-table")
    os.ftruncate(fd, size)
    region = Mapping(fd, size)
    os.close(fd)
    return region


def new_table(
    pool_bytes: int, *, segments: int = 1, records: int = 4096, region: Mapping | None = None, grace_ms: int = 10_000
) -> Table:
    """A table over `segments` equal segments, without caps."""
    table = Table(
        region or new_region(records), pool_id=1, incarnation=3, limit_bytes=pool_bytes, max_records=records,
        max_grants=256, session_cap=1.0, total_cap=1.0, grace_ms=grace_ms,
    )
    for segment in range(segments):
        table.add_segment(segment, PAGE, pool_bytes // segments // PAGE * PAGE)
    return table


def key(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


def chain(name: object, count: int) -> list[bytes]:
    return [key("chain", name, at) for at in range(count)]


@dataclass
class Client:
    """One engine with one rank, storing chunks of one part."""

    table: Table
    part_bytes: int
    name: str = "engine"
    namespace: str = ""  # whose namespace it uses; "": one of its own
    tenant: bytes = bytes(16)
    stores: int = 0

    def __post_init__(self) -> None:
        self.space = self.table.add_namespace(
            key("space", self.namespace or self.name, self.part_bytes), chunk_tokens=16, block_tokens=4, writers=1,
            groups=[("full", 0, self.part_bytes)], tenant=self.tenant,
        )
        self.session = self.table.open_session(key("session", self.name)[:16], self.space, 0)
        self.member = self.table.add_member(self.session, key("member", self.name)[:16], [0], True, 0)

    def reserve(self, keys: list[bytes], parent: bytes = b"", now: int = 0, **more: Any) -> Reservation:
        self.stores += 1
        return self.table.reserve(
            self.session, self.member, key("store", self.name, self.stores)[:16], parent, b"".join(keys),
            groups=0, temporary=False, deadline_ms=60_000, now_ms=now, **more,
        )

    def store(self, keys: list[bytes], parent: bytes = b"") -> int:
        """Reserves and commits; returns how many were granted."""
        got = self.reserve(keys, parent)
        if got.grant:
            self.table.commit(self.session, got.grant, 0, [(index, 0, 1 + index) for index, _ in got.chunks], 0)
        return len(got.chunks)

    def lookup(self, keys: list[bytes], request: object = "r", epoch: int = 1, now: int = 0) -> Lookup:
        return self.table.lookup(
            self.session, self.member, key(request)[:16], epoch, b"".join(keys), readers=1, skip_tokens=0, now_ms=now
        )

    def has(self, one: bytes) -> bool:
        return self.table.state_of(self.space, one) == "ready"
