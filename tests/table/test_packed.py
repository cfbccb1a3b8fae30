"""Namespaces whose parts are packed: slots have the length of packed parts, and a part that could not be packed gets
one for its raw bytes, whatever happens to the server meanwhile."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from table_helpers import PAGE, key, new_region, new_table

from kvdock._core import Mapping, Reservation, Table, TableError

RAW, PACKED = 7 * PAGE, 5 * PAGE
POOL = 64 * PAGE
MOVE_AT, MOVE_BYTES = 104, 32
"""Where the table's header describes the move of a part (csrc/table/layout.h)."""
PAGES_AT = 1 << 21
"""The pages of records come after it, and all other arrays that a move changes before."""


@dataclass
class Packing:
    """An engine of two ranks whose one group is packed."""

    table: Table
    tenant: bytes = bytes(16)
    stores: int = 0

    def __post_init__(self) -> None:
        self.space = self.table.add_namespace(
            key("packed"), chunk_tokens=16, block_tokens=4, writers=2, groups=[("full", 0, RAW)],
            packed_bytes=[PACKED], tenant=self.tenant,
        )
        self.session = self.table.open_session(key("session")[:16], self.space, 0)
        self.member = self.table.add_member(self.session, key("member")[:16], [0, 1], True, 0)

    def reserve(self, *keys: bytes) -> Reservation:
        self.stores += 1
        return self.table.reserve(
            self.session, self.member, key("store", self.stores)[:16], b"", b"".join(keys), groups=0, temporary=False,
            deadline_ms=60_000, now_ms=0,
        )

    def make_raw(self, grant: int, rank: int, *parts: tuple[int, int]) -> tuple[Sequence[tuple[int, ...]], str]:
        return self.table.make_raw(self.session, grant, rank, list(parts), 0)

    def commit(self, grant: int, rank: int, *parts: tuple[int, int, int]) -> tuple[int, list[int]]:
        return self.table.commit(self.session, grant, rank, list(parts), 0)

    def parts(self, *keys: bytes) -> Sequence[Sequence[tuple[int, ...]]]:
        found = self.table.lookup(
            self.session, self.member, key("request", self.stores)[:16], 1, b"".join(keys), readers=1, skip_tokens=0,
            now_ms=0,
        )
        self.table.release(self.session, found.lease, [0])
        return found.chunks


def lengths(parts: Sequence[tuple[int, ...]]) -> list[int]:
    return [part[4] for part in parts]


def test_parts_have_the_packed_length_unless_their_writer_asks_for_the_raw_one() -> None:
    table = new_table(POOL)
    engine = Packing(table)
    keys = [key(n) for n in range(3)]
    granted = engine.reserve(*keys)
    assert all(lengths(parts) == [PACKED, PACKED] for _, parts in granted.chunks)
    made, limited = engine.make_raw(granted.grant, 1, (2, 0), (0, 0))
    assert limited == "" and [(one[0], one[1], one[4]) for one in made] == [(2, 0, RAW), (0, 0, RAW)]
    assert engine.make_raw(granted.grant, 1, (0, 0), (2, 0)) == (made[::-1], ""), "a repeat changes nothing"
    table.check_integrity()
    for rank in (0, 1):
        engine.commit(granted.grant, rank, *((at, 0, 10 * rank + at) for at in range(3)))
    found = engine.parts(*keys)
    assert [lengths(parts) for parts in found] == [[PACKED, RAW], [PACKED, PACKED], [PACKED, RAW]]
    assert [part[2:5] for part in (found[2][1], found[0][1])] == [one[2:] for one in made]
    assert len({part[3] for parts in found for part in parts}) == 6
    stats = table.stats()
    assert stats["ready_bytes"] == 4 * PACKED + 2 * RAW
    assert (stats["kv_bytes"], stats["raw_parts"], stats["held_bytes"]) == (6 * RAW, 2, 0)
    table.clear(-1, 0, 100)
    assert (table.stats()["kv_bytes"], table.stats()["raw_parts"], table.free_bytes()) == (0, 0, POOL)
    table.check_integrity()


def test_a_part_that_is_committed_or_not_the_ranks_stays_as_it_is() -> None:
    table = new_table(POOL)
    engine = Packing(table)
    granted = engine.reserve(key(0))
    engine.commit(granted.grant, 0, (0, 0, 5))
    for rank, part, code in ((0, (0, 0), "already_committed"), (1, (1, 0), "not_reserved"), (1, (0, 1), "not_reserved"),
                             (2, (0, 0), "not_a_holder")):
        with pytest.raises(TableError) as caught:
            engine.make_raw(granted.grant, rank, part)
        assert caught.value.code == code
    engine.table.abort(engine.session, granted.grant, [0, 1])
    with pytest.raises(TableError) as caught:
        engine.make_raw(granted.grant, 1, (0, 0))
    assert caught.value.code == "grant_closed"
    table.check_integrity()


def test_raw_slots_are_made_by_eviction_within_the_quota_and_the_caps() -> None:
    table = new_table(26 * PAGE)
    engine = Packing(table, tenant=key("tenant")[:16])
    first = engine.reserve(key("old"))
    for rank in (0, 1):
        engine.commit(first.grant, rank, (0, 0, 1))
    granted = engine.reserve(key("new"))
    made, limited = engine.make_raw(granted.grant, 0, (0, 0))
    assert (len(made), limited) == (1, "") and table.state_of(engine.space, key("old")) == "absent"
    table.set_quota(engine.tenant, bytes=PACKED + RAW, chunks=None)
    assert engine.make_raw(granted.grant, 1, (0, 0)) == ([], "quota")
    table.set_quota(engine.tenant, bytes=None, chunks=None)
    table.set_limits(limit_bytes=POOL, session_cap=12 / 64, total_cap=1.0)
    assert engine.make_raw(granted.grant, 1, (0, 0)) == ([], "held_bytes")
    table.check_integrity()
    full = new_table(16 * PAGE)  # six pages are free
    crowded = Packing(full)
    granted = crowded.reserve(key(0))
    assert crowded.make_raw(granted.grant, 0, (0, 0)) == ([], "no_space")
    full.check_integrity()


def test_a_packed_group_is_smaller_than_its_raw_parts() -> None:
    table = new_table(POOL)
    for packed, message in (([RAW], "packed parts are not smaller"), ([1, 1], "packed_bytes of each group")):
        with pytest.raises(TableError, match=message):
            table.add_namespace(key("x"), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, RAW)],
                                packed_bytes=packed)


# ------------------------------------------------------------------ a server killed meanwhile


def sealed(value: int) -> int:
    return value | (value * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 48 << 48


def adopt(content: bytes) -> Table:
    region = new_region()
    memoryview(region)[:] = content
    table, _ = Table.adopt(region, pool_id=1, lock_inode=0, segments=[(0, PAGE, POOL)], limit_bytes=POOL,
                           session_cap=1.0, total_cap=1.0)
    return table


def snapshots() -> tuple[bytes, bytes]:
    """The region before and after a part is moved: the second of a chunk's two, in the second record."""
    region: Mapping = new_region()
    table = new_table(POOL, region=region)
    engine = Packing(table)
    done = engine.reserve(key("done"))
    for rank in (0, 1):
        engine.commit(done.grant, rank, (0, 0, 1))
    granted = engine.reserve(key("open"))
    before = bytes(memoryview(region))
    engine.make_raw(granted.grant, 1, (0, 0))
    return before, bytes(memoryview(region))


def test_a_server_killed_while_it_moves_a_part_leaves_its_old_slot_or_its_new_one() -> None:
    before, after = snapshots()
    move = slice(MOVE_AT + 8, MOVE_AT + MOVE_BYTES)
    differing = [at for at in range(MOVE_AT + MOVE_BYTES, len(before), 8) if before[at : at + 8] != after[at : at + 8]]
    changed = [at for at in differing if at >= PAGES_AT]
    opened = [at for at in differing if at < PAGES_AT and before[at : at + 8] == bytes(8)]
    assert opened and 3 <= len(changed) <= 4 and after[MOVE_AT : MOVE_AT + 8] == bytes(8)
    begun = bytearray(before)
    for at in opened:  # a slab of raw slots, before the move; that of the old slot is closed after it
        begun[at : at + 8] = after[at : at + 8]
    begun[move] = after[move]
    assert adopt(bytes(begun)).stats()["quarantined_bytes"] == 2 * PACKED, "it was not begun"
    begun[MOVE_AT : MOVE_AT + 8] = struct.pack("<Q", sealed((1 << 8 | 1) + 1))
    for count in range(len(changed) + 1):
        for written in itertools.combinations(changed, count):
            state = bytearray(begun)
            for at in written:
                state[at : at + 8] = after[at : at + 8]
            table = adopt(bytes(state))
            stats = table.stats()
            assert (stats["quarantined_bytes"], stats["ready_bytes"]) == (PACKED + RAW, 2 * PACKED)
            assert table.free_bytes() == POOL - 3 * PACKED - RAW
    assert adopt(after).stats()["quarantined_bytes"] == PACKED + RAW


@pytest.mark.parametrize("word", [1, sealed((1 << 8 | 200) + 1), sealed((77777 << 8) + 1)])
def test_a_move_that_cannot_be_is_refused(word: int) -> None:
    content = bytearray(snapshots()[0])
    content[MOVE_AT : MOVE_AT + 8] = struct.pack("<Q", word)
    with pytest.raises(TableError, match="the move of a part is damaged"):
        adopt(bytes(content))
