"""What a grant's holders may say, whose bytes count against a cap, and what a late repeat sees."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, key, new_region, new_table

from kvdock._core import Table, TableError

pytestmark = pytest.mark.table_model


def test_a_rank_equal_to_the_number_of_readers_or_writers_is_no_holder() -> None:
    engine = Client(new_table(8 * PAGE), PAGE)
    engine.store([key("k")])
    lease = engine.lookup([key("k")]).lease
    with pytest.raises(TableError) as released:
        engine.table.release(engine.session, lease, [1])
    grant = engine.reserve([key("new")]).grant
    with pytest.raises(TableError) as committed:
        engine.table.commit(engine.session, grant, 1, [(0, 0, 1)], 0)
    with pytest.raises(TableError) as aborted:
        engine.table.abort(engine.session, grant, [1])
    assert [error.value.code for error in (released, committed, aborted)] == ["not_a_holder"] * 3
    assert [g.remaining for g in engine.table.grants()] == [[0], [0]], "nobody was discharged"
    engine.table.check_integrity()


def test_a_chunk_that_others_hold_counts_against_a_cap_and_one_that_i_hold_does_not() -> None:
    table = new_table(8 * PAGE)
    first = Client(table, PAGE, "first")
    second, third = (Client(table, PAGE, name, namespace="first") for name in ("second", "third"))
    for name in ("shared", "mine"):
        first.store([key(name)])
    table.set_limits(limit_bytes=8 * PAGE, session_cap=1 / 8, total_cap=1.0)
    for engine in (first, second):
        assert engine.lookup([key("shared")], request=engine.name).lease
    assert third.lookup([key("mine")], request="mine").lease
    over = third.lookup([key("shared")], request="more")
    assert (over.hit_tokens, over.lease, over.limited) == (0, 0, "held_bytes"), "others' pins are not mine"
    again = second.lookup([key("shared")], request="again")
    assert (again.hit_tokens, again.limited) == (16, ""), "what I hold already costs nothing"
    table.check_integrity()


def test_a_commit_repeated_after_its_record_was_used_again_looks_at_nothing_of_the_new_one() -> None:
    table = new_table(PAGE)
    engine = Client(table, PAGE)
    old = engine.reserve([key("old")])
    parts = [(0, 0, 7)]
    assert table.commit(engine.session, old.grant, 0, parts, 0) == (1, [])
    for n in range(4):  # the first takes another record before it evicts the old one; a later one gets the old record
        new = engine.reserve([key(n)])
        assert new.chunks == old.chunks, "the only slot is used again"
        assert table.commit(engine.session, old.grant, 0, parts, 0) == (1, [])
        assert table.state_of(engine.space, key(n)) == "reserved"
        assert table.commit(engine.session, new.grant, 0, [(0, 0, 8 + n)], 0) == (1, [])
        assert table.commit(engine.session, old.grant, 0, parts, 0) == (1, [])
    assert engine.lookup([key(3)]).chunks[0][0][5] == 11
    table.check_integrity()


def test_a_skip_that_ends_inside_a_chunk_leases_that_chunk() -> None:
    engine = Client(new_table(8 * PAGE), PAGE)
    keys = [key(n) for n in range(3)]
    engine.store(keys)

    def look(skip: int, request: int) -> tuple[int, int, int]:
        found = engine.table.lookup(engine.session, engine.member, key(request)[:16], 1, b"".join(keys), readers=1,
                                    skip_tokens=skip, now_ms=0)  # fmt: skip
        return found.hit_tokens, found.first_chunk, found.chunk_count

    assert [look(skip, skip) for skip in (12, 16, 20, 44)] == [(48, 0, 3), (48, 1, 2), (48, 1, 2), (48, 2, 1)]
    engine.table.check_integrity()


def test_what_a_dead_member_held_is_released_a_settling_time_after_its_death_was_seen() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)  # its last heartbeat is at 0
    engine.store([key("one")])
    assert engine.lookup([key("one")]).lease
    table.member_dead(engine.member, 10_000)
    table.tick(12_999)
    assert table.stats()["leases"] == 1
    table.tick(13_000)
    assert table.stats()["leases"] == 0


def test_adoption_keeps_a_rank_that_has_committed_the_later_of_two_chunks_only() -> None:
    region = new_region()
    engine = Client(new_table(8 * PAGE, region=region), PAGE)
    granted = engine.reserve([key("first"), key("second")])
    engine.table.commit(engine.session, granted.grant, 0, [(1, 0, 7)], 0)
    table, _ = Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, PAGE, 8 * PAGE)], limit_bytes=8 * PAGE, session_cap=1.0,
        total_cap=1.0,
    )
    view = table.grant(granted.grant)
    assert view is not None and view.remaining == [0], "it may still be writing the first chunk"
