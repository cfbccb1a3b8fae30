"""Packed groups over the API: another namespace than raw ones, and what a server says to a format that it does not
know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_helpers import MIB, ServerProcess, attach, keys
from msgspec import UNSET

from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Group, MakeRaw, Packed, RawPart

RAW, PACKED = 40 << 10, 28 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB) as process:
        yield process


def group(marks: int = 176, bytes_: int = PACKED) -> Group:
    return Group(part_bytes=RAW, packed=Packed(planes=2, marks=marks, units=40, bytes=bytes_))


def test_parts_have_their_own_lengths_and_reservations_exchange_slots(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client, groups=(group(),))
        granted = engine.reserve(keys(3, "lengths"))
        assert [part.length for chunk in granted.chunks for part in chunk.parts] == [PACKED] * 3
        assert granted.reservation is not None
        body = MakeRaw(session=engine.session, rank=0, parts=[RawPart(1, 0)])
        answer = client.make_raw(granted.reservation, body)
        assert answer == client.make_raw(granted.reservation, body) and answer.limited_by is None
        assert [(slot.index, slot.group, slot.length) for slot in answer.parts] == [(1, 0, RAW)]
        assert engine.commit(granted).ready == 3
        found = engine.lookup(keys(3, "lengths"))
        assert [part.length for parts in found.chunks for part in parts] == [PACKED, RAW, PACKED]
        engine.release(found.lease, 0)
        pool = client.status().pool
        assert (pool.kv_bytes, pool.raw_parts, pool.ready_bytes) == (3 * RAW, 1, 2 * PACKED + RAW)
        assert pool.packed_ratio == pytest.approx(3 * RAW / (2 * PACKED + RAW))
        engine.leave()


def test_engines_share_only_with_those_that_pack_alike(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        spaces = set()
        for one in (group(), group(marks=208), group(bytes_=PACKED + 4096), Group(part_bytes=RAW)):
            engine = attach(client, groups=(one,))
            spaces.add(engine.attached.namespace)
            engine.store(keys(1, "apart"))
            engine.leave()
        assert len(spaces) == 4


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"bytes": RAW}, "bad_argument"), ({"marks": 12}, "invalid_body"), ({"format": "kvp2"}, "invalid_body"),
     ({"books": "fixed"}, "invalid_body")],
)
def test_a_format_that_a_server_does_not_know_is_refused(
    server: ServerProcess, changes: dict[str, object], code: str
) -> None:
    """As a server without packing refuses `packed` itself: a field that it does not know."""
    with Client(server.unix) as client:
        known = msgspec.to_builtins(group().packed)
        odd = msgspec.defstruct("Odd", [(name, type(value)) for name, value in {**known, **changes}.items()])
        packed: Any = odd(**{**known, **changes})
        with pytest.raises(ApiError) as caught:
            attach(client, groups=(Group(part_bytes=RAW, packed=packed),))
        assert caught.value.code == code


def test_a_group_that_is_not_packed_says_nothing_of_it() -> None:
    """So its namespace is that of engines that know no packing."""
    assert Group(part_bytes=RAW).packed is UNSET
    assert msgspec.to_builtins(Group(part_bytes=RAW)) == {"kind": "full", "window_tokens": 0, "part_bytes": RAW}
