"""What a call costs does not grow with the sessions, namespaces and grants that are there: each call is timed in a
table with few and in one with all that there may be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from table_helpers import PAGE, Client, key, new_table

from kvdock._core import MAX_NAMESPACES, MAX_SESSIONS, Table

pytestmark = [pytest.mark.table_model, pytest.mark.security]

FEW, CALLS = 8, 200
MOST_RATIO = 3.0
"""With walks over all of them it was 6 to 2,000."""
OWN, TENANT = bytes(16), key("tenant")[:16]
ALL_NAMESPACES, ALL_SESSIONS = MAX_NAMESPACES - 1, MAX_SESSIONS - 1


def filled(namespaces: int, sessions: int) -> Table:
    table = new_table(8 * PAGE)
    spaces = [
        table.add_namespace(
            key("space", number), chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, PAGE)], tenant=TENANT
        ) for number in range(namespaces)
    ]
    for number in range(sessions):
        table.open_session(key("session", number)[:16], spaces[number % namespaces], 0)
    table.open_session(key("last")[:16], spaces[7], 0)
    return table


@pytest.fixture(scope="module")
def few() -> Table:
    return filled(FEW, FEW)


@pytest.fixture(scope="module")
def many() -> Table:
    return filled(ALL_NAMESPACES, ALL_SESSIONS)


def median_s(work: Callable[[], object]) -> float:
    took_s = list[float]()
    for _ in range(CALLS):
        began_s = time.thread_time()
        work()
        took_s.append(time.thread_time() - began_s)
    return statistics.median(took_s)


@pytest.mark.parametrize(("name", "ask"), [
    ("session_of", lambda table: table.session_of(bytes(16))),
    ("open_session", lambda table: table.open_session(key("last")[:16], 7, 0)),
    ("namespace", lambda table: table.namespace(7)),
    ("stats", lambda table: table.stats()),
    ("most_holding", lambda table: table.most_holding(by_grants=True)),
])
def test_a_call_takes_as_long_with_all_sessions_as_with_few(
    name: str, ask: Callable[[Table], object], few: Table, many: Table
) -> None:
    assert median_s(lambda: ask(many)) < MOST_RATIO * median_s(lambda: ask(few)), name


def test_sessions_and_namespaces_are_found_by_their_names_as_they_come_and_go() -> None:
    table = new_table(8 * PAGE)
    first = Client(table, PAGE, "first")
    assert table.session_of(key("session", "first")[:16]) == first.session
    assert table.namespace(first.space).digest == key("space", "first", PAGE)
    table.leave(first.member)
    assert table.session_of(key("session", "first")[:16]) == 0
    assert table.drop_idle_namespaces() == [] and not table.has_namespace(key("space", "first", PAGE))
    again = Client(table, PAGE, "first")
    assert table.session_of(key("session", "first")[:16]) == again.session != first.session
    table.check_integrity()


def test_a_tenants_namespaces_count_as_long_as_sessions_are_in_them() -> None:
    table = new_table(8 * PAGE)
    one, two = (Client(table, PAGE, name, tenant=TENANT) for name in ("one", "two"))
    third = Client(table, PAGE, "third", namespace="two", tenant=TENANT)
    assert table.namespaces_in_use(TENANT) == 2 and table.namespaces_in_use(OWN) == 0
    assert table.namespaces_in_use(TENANT, leaving=one.space) == 1, "its only session leaves it"
    assert table.namespaces_in_use(TENANT, leaving=two.space) == 2, "another session stays"
    table.leave(third.member)
    assert table.namespaces_in_use(TENANT, leaving=two.space) == 1


def test_who_holds_most_is_found_by_grants_and_by_bytes() -> None:
    table = new_table(16 * PAGE)
    wide, many = Client(table, 4 * PAGE, "wide"), Client(table, PAGE, "many")
    assert table.most_holding(by_grants=True) is None
    wide.store([key("wide")])
    many.store([key("many")])
    assert wide.lookup([key("wide")], request="w").lease
    assert many.lookup([key("many")], request="a").lease and many.lookup([key("many")], request="b").lease
    found = table.most_holding(by_grants=True), table.most_holding(by_grants=False)
    assert [one is not None and one.session for one in found] == [many.session, wide.session]


READERS, LEASES, MOST = 128, 40, 1000


def test_a_heartbeat_asks_so_much_at_once_and_the_rest_when_that_is_answered() -> None:
    table = new_table(8 * PAGE)
    engine = Client(table, PAGE)
    engine.store([key("k")])
    for number in range(LEASES):
        table.lookup(
            engine.session, engine.member, key(number)[:16], 1, key("k"), readers=READERS, skip_tokens=0, now_ms=0
        )
    later_ms, asked = 10**8, set[int]()
    while questions := table.heartbeat(engine.member, later_ms, MOST):
        assert sum(8 + len(ranks) for _, ranks in questions) < MOST + 8 + READERS
        for grant, ranks in questions:
            asked.add(grant)
            table.done(engine.member, grant, ranks)
    assert len(asked) == LEASES and table.stats()["leases"] == 0
