"""Weights that change: sessions move between namespaces, and what nobody runs any more goes first."""

from __future__ import annotations

import pytest
from table_helpers import PAGE, Client, chain, key, new_region, new_table as make_table

from kvdock._core import Mapping, Table, TableError

pytestmark = pytest.mark.weights

CHUNKS = 32
GRACE_MS = 2_000
POLICIES = ("adaptive", "lru")


def new_table(region: Mapping | None = None) -> Table:
    return make_table(CHUNKS * PAGE, region=region, grace_ms=GRACE_MS)


def of_weights(engine: Client, weights: str) -> int:
    """The number of that namespace."""
    base = next(view for view in engine.table.namespaces() if view.namespace == engine.space).base
    digest = key("weights", base, weights) if weights else base
    return engine.table.add_namespace(
        digest, chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, engine.part_bytes)],
        tenant=engine.tenant, base=base,
    )


def run(engine: Client, weights: str, now: int = 0) -> int:
    """The engine runs these from now on."""
    space = of_weights(engine, weights)
    engine.table.move_session(engine.session, space, now)
    engine.space = space
    return space


def left(table: Table) -> dict[int, int]:
    return {view.namespace: view.left_ms for view in table.namespaces() if view.left_ms is not None}


def state(table: Table, space: int, keys: list[bytes]) -> list[bool]:
    return [table.state_of(space, one) == "ready" for one in keys]


def adopt(region: Mapping, pool_bytes: int = CHUNKS * PAGE) -> Table:
    table, _ = Table.adopt(
        region, pool_id=1, lock_inode=0, segments=[(0, PAGE, pool_bytes)], limit_bytes=pool_bytes, session_cap=1.0,
        total_cap=1.0, grace_ms=GRACE_MS,
    )
    return table


def test_a_session_finds_and_stores_in_the_namespace_that_it_moved_to() -> None:
    table = new_table()
    engine, other = Client(table, PAGE, namespace="n"), Client(table, PAGE, name="other", namespace="n")
    keys, base = chain("a", 4), engine.space
    engine.store(keys)
    v1 = run(engine, "v1")
    assert engine.lookup(keys, "r1").hit_tokens == 0
    engine.store(keys[:2])
    assert engine.lookup(keys, "r2").hit_tokens == 32
    assert other.lookup(keys, "r").hit_tokens == 64
    assert (table.chunks_in(base), table.chunks_in(v1)) == (4, 2)
    run(engine, "")
    assert engine.space == base and engine.lookup(keys, "r3").hit_tokens == 64
    run(other, "v1")
    assert other.lookup(keys, "r2").hit_tokens == 32
    table.check_integrity()


def test_what_was_granted_before_a_move_keeps_its_chunks_and_its_namespace() -> None:
    table = new_table()
    engine = Client(table, PAGE)
    old, written, base = chain("old", 2), chain("written", 3), engine.space
    engine.store(old)
    lease = engine.lookup(old, "r").lease
    reservation = engine.reserve(written)
    v1 = run(engine, "v1", 1)
    table.check_integrity()
    parts = [(index, 0, 7 + index) for index, _ in reservation.chunks]
    assert table.commit(engine.session, reservation.grant, 0, parts, 2) == (3, [])
    assert state(table, base, written) == [True] * 3 and state(table, v1, written) == [False] * 3
    table.tick(GRACE_MS * 2)
    assert table.evict(CHUNKS * PAGE, CHUNKS) == 3, "what is leased stays"
    assert state(table, base, old) == [True] * 2
    assert table.release(engine.session, lease, [0]) == []
    table.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_nobody_runs_goes_first_the_oldest_left_before_the_newer(policy: str) -> None:
    table = new_table()
    table.set_eviction(policy)
    trained, other = Client(table, PAGE, name="trained"), Client(table, PAGE, name="other")
    theirs = chain("theirs", 8)
    other.store(theirs)  # unused longest: by age it would go first
    spaces = []
    for step in range(3):
        spaces.append(run(trained, f"v{step}", 1000 * step))
        trained.store(chain(step, 8))
    table.tick(2000 + GRACE_MS)
    now = chain("now", 4)
    for number in range(4):
        other.store([key("now", number, one) for one in now])
        gone = 4 * number + 4
        assert state(table, spaces[0], chain(0, 8)).count(True) == max(0, 8 - gone)
        assert state(table, spaces[1], chain(1, 8)).count(True) == min(8, 16 - gone)
    assert state(table, spaces[2], chain(2, 8)) == [True] * 8, "a session runs it"
    assert state(table, other.space, theirs) == [True] * 8
    gone_for = table.fates(spaces[0], chain(0, 8)[0])
    assert [run[:3] for run in gone_for] == [(1, "weights", 2000 + GRACE_MS)]
    table.check_integrity()


def test_it_goes_like_any_other_until_the_grace_is_over_and_once_somebody_runs_it_again() -> None:
    table = new_table()
    table.set_eviction("lru")
    engine, other = Client(table, PAGE), Client(table, PAGE, name="other")
    theirs, v1 = chain("theirs", 16), run(engine, "v1")
    other.store(theirs)
    engine.store(chain("v1", 16))
    run(engine, "v2", 1000)
    table.tick(1000 + GRACE_MS - 1)
    other.store(chain("new", 2))
    assert state(table, v1, chain("v1", 16)) == [True] * 16
    table.tick(1000 + GRACE_MS)
    other.store(chain("newer", 2))
    assert state(table, v1, chain("v1", 16)).count(False) == 2
    assert run(engine, "v1", 5_000) == v1
    other.store(chain("newest", 2))
    assert state(table, v1, chain("v1", 16)).count(False) == 2
    assert state(table, other.space, theirs).count(False) == 4
    table.check_integrity()


def test_the_weights_that_engines_start_with_go_first_only_where_a_session_moved_out_of_them() -> None:
    table = new_table()
    stays, moves = Client(table, PAGE, name="stays"), Client(table, PAGE, name="moves")
    bases = [stays.space, moves.space]
    for one in (stays, moves):
        one.store(chain(one.name, 2))
    v1 = run(moves, "v1", 500)
    assert left(table) == {bases[1]: 500}
    moves.store(chain("v1", 2))
    table.tick(700)
    for one in (stays, moves):
        table.leave(one.member)
    assert left(table) == {bases[1]: 500, v1: 700}
    back = Client(table, PAGE, name="again", namespace="moves")
    assert back.space == bases[1] and left(table) == {v1: 700}
    table.leave(back.member)
    assert left(table) == {v1: 700}, "since then nobody moved out of it"


def test_an_older_namespace_is_left_when_its_last_session_goes() -> None:
    table = new_table()
    engines = [Client(table, PAGE, name=f"e{at}", namespace="n") for at in range(4)]
    engines[0].store(chain("a", 2))
    base = engines[0].space
    for at, engine in enumerate(engines):
        assert left(table) == {}
        run(engine, "v1", at + 1)
    assert left(table) == {base: 4}


def test_a_namespace_that_was_left_is_no_more_once_it_is_empty_and_its_number_is_used_again() -> None:
    table = new_table()
    engine = Client(table, PAGE)
    numbers = set()
    for step in range(3000):
        numbers.add(run(engine, f"v{step}", step))
        engine.store(chain(step, 2))
        table.empty_left(1, 1000)
        table.drop_idle_namespaces()
        assert len(table.namespaces()) <= 2
    assert len(numbers) <= 3
    table.check_integrity()


def test_the_oldest_left_are_emptied_whole_and_the_latest_kept_and_only_those_of_the_tenant() -> None:
    table = new_table()
    mine, theirs = Client(table, PAGE), Client(table, PAGE, name="theirs", tenant=b"another tenant..")
    spaces = []
    for step in range(4):
        for engine in (mine, theirs):
            spaces.append(run(engine, f"v{step}", step + 1))
            engine.store(chain(step, 2))
    assert table.empty_left(0, 3, mine.tenant) == 3
    assert [table.chunks_in(space) for space in spaces] == [0, 2, 1, 2, 2, 2, 2, 2]
    assert table.empty_left(0, 100, theirs.tenant) == 6
    assert [table.chunks_in(space) for space in spaces] == [0, 0, 1, 0, 2, 0, 2, 2]
    assert table.empty_left(1, 100) == 1
    assert [table.chunks_in(space) for space in spaces] == [0, 0, 0, 0, 2, 0, 2, 2]
    assert table.empty_left(0, 100, b"no such tenant..") == 0
    table.check_integrity()


def test_quotas_take_what_the_tenant_left_first() -> None:
    table = new_table()
    engine = Client(table, PAGE, tenant=b"another tenant..")
    other = Client(table, PAGE, name="other", tenant=b"another tenant..")
    table.set_quota(engine.tenant, bytes=None, chunks=8)
    other.store(chain("other", 4))
    v1 = run(engine, "v1", 0)
    engine.store(chain("v1", 4))
    run(engine, "v2", 1)
    table.tick(1 + GRACE_MS)
    assert engine.store(chain("v2", 4)) == 4
    assert table.chunks_in(v1) == 0 and table.chunks_in(other.space) == 4


def test_what_an_administrator_keeps_stays_and_what_engines_wished_to_retain_does_not() -> None:
    table = new_table()
    engine, other = Client(table, PAGE), Client(table, PAGE, name="other")
    v1 = run(engine, "v1")
    kept, retained = chain("kept", 2), chain("retained", 2)
    engine.store(kept)
    engine.store(retained)
    table.pin(v1, b"".join(kept), 1 << 40)
    assert table.retain(v1, b"".join(retained), 5, 1 << 40) == (2, 0)
    run(engine, "v2", 1)
    table.tick(1 + GRACE_MS)
    other.store(chain("other", CHUNKS - 4))
    table.check_integrity()
    assert table.evict(2 * PAGE, 100) == 2
    assert state(table, v1, retained) == [False] * 2 and state(table, v1, kept) == [True] * 2
    assert table.empty_left(0, 100) == 0
    table.pin(v1, b"".join(kept), 0)
    assert table.empty_left(0, 100) == 2
    table.check_integrity()


def test_what_is_left_is_never_named_as_what_goes_next() -> None:
    table = new_table()
    engine, other = Client(table, PAGE), Client(table, PAGE, name="other")
    v1 = run(engine, "v1")
    engine.store(chain("v1", 4))
    other.store(chain("other", 4))
    assert set(table.next_out(CHUNKS * PAGE)) == {v1, other.space}
    run(engine, "v2", 1)
    assert set(table.next_out(CHUNKS * PAGE)) == {other.space}


def test_a_promise_made_under_other_weights_holds_nobody_up() -> None:
    table = new_table()
    maker, asker = Client(table, PAGE, namespace="n"), Client(table, PAGE, name="asker", namespace="n")
    keys = chain("a", 4)

    def look(engine: Client, request: str, computes: bool) -> int:
        return engine.table.lookup(
            engine.session, engine.member, key(request)[:16], 1, b"".join(keys), readers=1, skip_tokens=0, now_ms=5,
            computes=computes,
        ).being_stored

    assert look(maker, "r", True) == 0
    assert look(asker, "q", False) == 64
    run(maker, "v1", 5)
    assert look(asker, "q2", False) == 0
    assert look(maker, "r", True) == 0, "the same request promises anew"
    table.check_integrity()
    run(asker, "v1", 5)
    assert look(asker, "q3", False) == 64
    table.withdraw(maker.session, key("r")[:16])
    assert look(asker, "q4", False) == 0
    table.check_integrity()


def test_a_session_moves_within_its_own_manifest_and_tenant_only() -> None:
    table = new_table()
    engine, other = Client(table, PAGE), Client(table, PAGE, name="other")
    for space, code in ((other.space, "bad_argument"), (999, "unknown_namespace")):
        with pytest.raises(TableError) as refused:
            table.move_session(engine.session, space, 0)
        assert refused.value.code == code
    with pytest.raises(TableError) as refused:
        table.move_session(1 << 40, engine.space, 0)
    assert refused.value.code == "unknown_session"
    v1 = run(engine, "v1")
    digest = next(view.digest for view in table.namespaces() if view.namespace == v1)
    with pytest.raises(TableError) as refused:
        table.add_namespace(
            digest, chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, PAGE)], base=key("another")
        )
    assert refused.value.code == "bad_argument"
    nonce = key("session", engine.name)[:16]
    assert table.session_of(nonce) == engine.session and table.session_of(bytes(16)) == 0
    base = of_weights(engine, "")
    assert table.open_session(nonce, base, 0) == engine.session
    assert [view.namespace for view in table.sessions([engine.session])] == [v1], "it stays where it is"
    with pytest.raises(TableError) as refused:
        table.open_session(nonce, other.space, 0)
    assert refused.value.code == "id_reused"


def test_the_next_server_finds_sessions_where_they_were_filed_and_knows_what_was_left() -> None:
    region = new_region()
    table = new_table(region)
    engine = Client(table, PAGE)
    base, keys = engine.space, chain("a", 2)
    engine.store(keys)
    table.tick(700)
    v1 = run(engine, "v1", 700)
    engine.store(keys)
    table.tick(900)
    v2 = run(engine, "v2", 900)
    del table
    again = adopt(region)
    assert left(again) == {base: 700, v1: 900}
    assert [(view.namespace, view.session) for view in again.sessions()] == [(v2, engine.session)]
    again.tick(900 + GRACE_MS)
    assert again.evict(CHUNKS * PAGE, 3) == 3
    assert (again.chunks_in(base), again.chunks_in(v1)) == (0, 1)
    again.check_integrity()


def test_the_next_server_knows_that_weights_were_left_whose_last_session_ended_unseen() -> None:
    region = new_region()
    table = new_table(region)
    engine = Client(table, PAGE)
    base, v1 = engine.space, run(engine, "v1", 5)
    engine.store(chain("a", 2))
    table.tick(800)
    table.leave(engine.member)
    view = next(one for one in table.namespaces() if one.namespace == v1)
    with memoryview(region) as memory:
        at = bytes(memory).find((800).to_bytes(8, "little"), bytes(memory).find(view.digest))
        assert at > 0
        memory[at : at + 8] = bytes(8)  # killed before it was noted
    del table
    again = adopt(region)
    assert left(again) == {base: 5, v1: 800}
