"""Long work goes in slices of the event loop: how much is done in one turn is counted, not how long it takes.

The real application in this process, without sockets. tests/table/test_slices.py has the table's part.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from api_helpers import PATIENCE_S, keys, manifest
from app_rig import CHAIN, OWN, SESSIONS, Rig, ask, commit, opened, store
from turns import turns_of

from kvdock.api import server, turns as slices_of_time
from kvdock.api.build import _routed_app
from kvdock.api.http.routes_people import _documents
from kvdock.api.keeper import Keeper
from kvdock.api.pool.registry import KEYS_OF_PART, SLICE_SESSIONS, NamespaceRecord
from kvdock.api.pool.sessions import work_off
from kvdock.api.record.curve import Curves
from kvdock.api.record.hits import MOST_ANSWERS, MOST_RUNS, HitRecord, Whose
from kvdock.api.record.journal import SLICE_EVENTS
from kvdock.api.record.requests import Detail, RecentRequests
from kvdock.api.reports.verdict import Judged, _differing
from kvdock.api.server import YOUNG_S, collect_garbage
from kvdock.api.service import SLICE_EVICTED, SLICE_RELEASES
from kvdock.api.turns import SLICE_WORK
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import Quota
from kvdock.protocol.events import Freed
from kvdock.protocol.forms import JSON, Codec, Form, RawBody
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.reports import RequestView
from kvdock.protocol.wire_types import MAX_ANSWERS, MAX_KEYS, MAX_STORE_KEYS

pytestmark = pytest.mark.security

SLICE_PINS = SLICE_WORK + MAX_KEYS
"""To end a lease takes a unit of work for each of its chunks, and some more."""
ABORT_CHUNK = 32
"""Units of work (csrc/base/work.h)."""
WHOLE = 40
"""Leases of a chain of MAX_KEYS chunks."""
PIECE_BYTES = 64 << 10


@pytest.fixture
def rig() -> Iterator[Rig]:
    with opened() as made:
        yield made


def most_in_a_turn(work: Callable[[], Coroutine[Any, Any, Any]], left: Callable[[], int]) -> tuple[int, int]:
    """By how much `left` fell in all while `work` ran, and by how much at most from one turn to the next."""
    async def story() -> tuple[int, int]:
        first = before = left()
        most, task = 0, asyncio.create_task(work())
        while not task.done():
            await asyncio.sleep(0)
            now = left()
            most, before = max(most, before - now), now
        await task
        return first - before, most

    return asyncio.run(story())


def lease_all(rig: Rig, count: int) -> None:
    """Leases of the whole chain, of the session of the rig."""
    async def work() -> None:
        for number in range(count):
            body = s.Lookup(session=rig.session, member="m", request=f"whole {number}", keys=CHAIN)
            assert (await rig.parts.handlers.service.lookup(OWN, body, JSON)).lease

    asyncio.run(work())


def leases(rig: Rig) -> Callable[[], int]:
    return lambda: rig.pool.table.stats()["leases"]


def leased_chunks(rig: Rig) -> Callable[[], int]:
    return lambda: sum(grant.chunks for grant in rig.pool.table.grants())


def test_an_engine_that_leaves_releases_its_leases_in_slices(rig: Rig) -> None:
    lease_all(rig, WHOLE)
    before = leased_chunks(rig)()

    async def leave() -> None:
        assert (await ask(rig.app, "DELETE", f"/v1/sessions/{rig.session}?member=m"))[0] == 204

    ended, most = most_in_a_turn(leave, leased_chunks(rig))
    assert ended == before > 3 * SLICE_PINS and most <= SLICE_PINS


def test_engines_that_are_killed_lose_their_leases_in_slices(rig: Rig) -> None:
    lease_all(rig, WHOLE)
    keeper, before = rig.parts.keeper, leased_chunks(rig)()
    rig.pool.lock_held = lambda offset: False  # type: ignore[method-assign]  # no process of this test is a member
    asyncio.run(keeper._watch_members())

    def now_ms() -> int:
        return 1 << 40

    keeper._clock.now_ms = now_ms  # type: ignore[method-assign]  # long after
    ended, most = most_in_a_turn(keeper._let_time_pass, leased_chunks(rig))
    assert ended == before > 3 * SLICE_PINS and most <= SLICE_PINS
    registry = rig.parts.handlers.lists._registry
    ended, most = most_in_a_turn(keeper._prune, lambda: len(registry.sessions()))
    assert ended > 2 * SLICE_SESSIONS and most <= SLICE_SESSIONS


def test_calls_that_release_much_have_one_slice_in_each_turn_all_together(rig: Rig) -> None:
    async def all_leases() -> list[str]:
        found = list[str]()
        cursor: str | None = "0"
        while cursor is not None:
            page = await rig.parts.handlers.lists.leases(OWN, 64, int(cursor))
            found, cursor = found + [one.grant for one in page.leases], page.next
        return found

    async def release() -> None:
        grants = await all_leases()
        bodies = [
            {"session": rig.session, "releases": [[lease, list(range(128))] for lease in grants[start : start + 200]]}
            for start in range(0, 1000, 200)
        ]
        answers = await asyncio.gather(*(ask(rig.app, "POST", "/v1/releases", body) for body in bodies))
        assert {status for status, _ in answers} == {200}

    ended, most = most_in_a_turn(release, leases(rig))
    assert ended == 1000 and most <= 2 * SLICE_RELEASES, "a call's first slice comes with the call itself"


def test_a_store_makes_room_in_slices_and_is_answered_in_another_turn(rig: Rig) -> None:
    def count(name: str) -> int:
        return rig.pool.table.stats()[name]

    async def stored(name: str) -> bool:
        """Whether others had a turn between the grant and the answer."""
        before, has_waited = count("reservations"), False
        task = asyncio.create_task(store(rig.parts, rig.session, name, keys(MAX_STORE_KEYS, name)))
        while not task.done():
            await asyncio.sleep(0)
            has_waited = has_waited or (count("reservations") > before and not task.done())
        await commit(rig.parts, rig.session, await task)
        return has_waited

    for number in itertools.count():
        assert asyncio.run(stored(f"fills {number}"))
        if count("evicted_chunks"):
            break
    evicted, most = most_in_a_turn(partial(stored, "more"), lambda: -count("evicted_chunks"))
    assert evicted == MAX_STORE_KEYS and most <= 4 * SLICE_EVICTED


def test_a_long_body_of_people_is_decoded_in_a_turn_of_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is one that is refused when it is decoded."""
    turn, decoded, answered = 0, list[int](), list[int]()
    plain = Codec.decode

    def decode(self: Codec[Any], raw: RawBody, form: Form) -> Any:
        decoded.append(turn)
        return plain(self, raw, form)

    monkeypatch.setattr(Codec, "decode", decode)

    async def story(body: bytes) -> int:
        nonlocal turn
        task = asyncio.create_task(ask(rig.app, "PATCH", "/v1/config", body))
        while not task.done():
            await asyncio.sleep(0)
            turn += 1
        answered.append(turn)
        return task.result()[0]

    quotas = b",".join(b'"tenant-%d":{"bytes":%d}' % (number, 1 << 30) for number in range(1000))
    assert asyncio.run(story(b'{"quotas":{%b}}' % quotas)) < 500
    assert asyncio.run(story(b'{"quotas":{%b},"eviction":7}' % quotas)) == 422
    # The answer itself is sent in one turn, and the task is seen to be done in the next one.
    assert [after - before for before, after in zip(decoded, answered, strict=True)] == [3, 3]


def test_each_step_of_the_keeper_has_a_turn_of_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, begun = 0, list[tuple[int, str]]()

    def noted(name: str) -> Callable[[Keeper], Coroutine[Any, Any, None]]:
        real = getattr(Keeper, name)

        async def step(keeper: Keeper) -> None:
            begun.append((turn, name))
            await real(keeper)

        return step

    names = ["_watch_members", "_let_time_pass", "_forget_benches", "_empty_left", "_prune", "_follow_access_file",
             "_keep_quotas", "_keep_free"]
    for name in names:
        monkeypatch.setattr(Keeper, name, noted(name))

    async def story() -> None:
        nonlocal turn
        keeper = asyncio.create_task(rig.parts.keeper.run())
        while len(begun) < len(names):
            turn += 1
            await asyncio.sleep(0)
        keeper.cancel()

    asyncio.run(story())
    assert [name for _, name in begun[: len(names)]] == names
    assert len({at for at, _ in begun[: len(names)]}) == len(names)


def test_what_is_kept_with_the_pool_is_made_in_short_pieces(rig: Rig) -> None:
    """900 namespaces of long manifests; two years of days, each with many models."""
    registry = rig.parts.handlers.lists._registry
    for number in range(900):
        described = manifest(model=f"{number}-" + "x" * 200, revision="r" * 1000, groups=(s.Group(part_bytes=4096),))
        digest = hashlib.sha256(described.model.encode()).digest()
        space = rig.pool.table.add_namespace(
            digest, chunk_tokens=16, block_tokens=4, writers=1, groups=[("full", 0, 4096)]
        )
        registry.add_namespace(space, digest, described, holds_chunks=True)
    hits = rig.parts.sampler._tally.hits
    ended = OutcomeView(prompt_tokens=2, local_tokens=0, found_tokens=0, loaded_tokens=0)
    for day in range(100):
        hits._wall_s = partial(float, 1e9 + 86400.0 * day)
        for model in range(64):
            hits.ended(Whose("", f"model {model}", "e"), ended)
    pieces = list(rig.parts.sampler._history._content(1.0))
    assert sum(map(len, pieces)) > 2 << 20
    assert max(map(len, pieces)) < PIECE_BYTES and len(pieces) > 1000


def test_answers_that_wait_for_outcomes_are_in_small_dicts(rig: Rig) -> None:
    """A large dict is made anew as a whole when it is full."""
    lease_all(rig, 10)
    answers = rig.parts.sampler._tally.learned.answers
    sizes = [len(part) for part in answers._open._parts]
    assert sum(sizes) >= 10 and len(sizes) >= MOST_ANSWERS // KEYS_OF_PART


def test_new_objects_are_looked_at_for_garbage_soon_however_many_others_are_freed(rig: Rig) -> None:
    """Python itself counts those that were made less those that were freed."""
    made, old = list[tuple[int]](), [[at] for at in range(5000)]

    async def story() -> None:
        collecting = asyncio.create_task(collect_garbage())
        for at in range(5000):
            made.append((at,))
            old.pop()
            if at % 100 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(4 * YOUNG_S)
        collecting.cancel()

    asyncio.run(story())
    assert len(made) == 5000 and not any(map(gc.is_tracked, made)), "a collection takes tuples of numbers out"


def test_garbage_that_has_grown_old_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        collecting = asyncio.create_task(collect_garbage())
        until_s = time.monotonic() + PATIENCE_S
        while seen() is not None and time.monotonic() < until_s:
            await asyncio.sleep(YOUNG_S)
        collecting.cancel()

    monkeypatch.setattr(server, "FULL_EVERY", 5)
    circle = Circle()
    seen = weakref.ref(circle)
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # Python's own collections would find it, too
    try:
        gc.collect()  # it is of the oldest generation now
        del circle
        asyncio.run(story())
    finally:
        gc.set_threshold(*thresholds)
    assert seen() is None


@pytest.fixture
def settled() -> Iterator[None]:
    """The server's settings of the collector; all objects of the tests are set aside meanwhile."""
    thresholds = gc.get_threshold()
    asyncio.run(server._settle())
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_the_more_objects_are_new_the_sooner_all_are_looked_at(settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sixty streams that begin together are walked in one collection of 2 ms."""
    monkeypatch.setattr(server, "FULL_EVERY", 1 << 30)
    monkeypatch.setattr(server, "SHORT_S", 0.001)
    kept, full = [[0]], list[int]()

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "stop" and about["generation"] == 2:
            full.append(len(kept))

    async def story() -> None:
        collecting = asyncio.create_task(collect_garbage())
        for _ in range(200):
            if not full:
                kept.extend([at] for at in range(2000))
                await asyncio.sleep(YOUNG_S)
        collecting.cancel()

    gc.callbacks.append(note)
    try:
        asyncio.run(story())
    finally:
        gc.callbacks.remove(note)
    assert full


def test_no_collection_comes_in_the_turn_of_a_call(settled: None) -> None:
    """A heartbeat of 1,024 entries, each with a list, came with ten collections of young objects and one of older
    ones."""
    seen = list[str]()
    body = JSON.encode({"member": "m", "done": [{"grant": "0" * 16, "ranks": [0]}] * MAX_ANSWERS})

    async def story() -> int:
        collecting = asyncio.create_task(collect_garbage())
        await asyncio.sleep(2 * YOUNG_S)
        seen.clear()
        decoded = [Codec(s.Heartbeat).decode(body, JSON) for _ in range(5)]
        in_turn = len(seen)
        await asyncio.sleep(4 * YOUNG_S)
        collecting.cancel()
        assert len(decoded) == 5 and len(seen) > in_turn, "they come in turns of their own"
        return in_turn

    def note(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    try:
        assert asyncio.run(story()) == 0
    finally:
        gc.callbacks.remove(note)


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("makes_circles", [False, True])
def test_a_long_collection_is_the_last_that_walks_what_it_left(
    makes_circles: bool, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, collections = [[0]], list[str]()

    def note(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    async def story() -> None:
        collecting = asyncio.create_task(collect_garbage())
        while len(collections) < 8:
            if makes_circles:
                Circle()
            await asyncio.sleep(0)
        collecting.cancel()

    monkeypatch.setattr(server, "FULL_EVERY", 1)
    monkeypatch.setattr(server, "YOUNG_S", 0.001)
    monkeypatch.setattr(server, "SHORT_S", 0.0)
    gc.callbacks.append(note)
    try:
        asyncio.run(story())
    finally:
        gc.callbacks.remove(note)
    walked = any(one is kept[0] for one in gc.get_objects())
    assert walked == makes_circles, "while circles are made nothing is set aside, because one of them would stay"


def test_a_stream_leaves_nothing_for_collections(rig: Rig) -> None:
    async def read() -> None:
        with suppress(IndexError):  # the reader has gone before the answer begins
            await ask(rig.app, "GET", "/v1/events?follow=true")

    asyncio.run(read())
    gc.collect()
    gc.disable()
    try:
        asyncio.run(read())
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("method", "path", "body"), [
    ("GET", "/v1/nothing", b""), ("DELETE", "/v1/status", b""), ("GET", "/v1/status?x=1", b""),
    ("GET", "/v1/sessions/00", b""), ("POST", "/v1/lookups", b"{"), ("POST", "/v1/cache/clear", b'{"x":1}'),
    ("PATCH", "/v1/config", b'{"x":1}'),
])
def test_a_call_that_is_refused_leaves_nothing_for_collections(method: str, path: str, body: bytes, rig: Rig) -> None:
    """If it were set aside while it is answered, a circle of its error and the error's traceback would stay for
    good."""
    async def refused() -> int:
        return (await ask(rig.app, method, path, body))[0]

    asyncio.run(refused())
    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(refused()) in range(400, 500)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_no_collection_walks_what_the_documents_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the event loop for 30 ms, although a thread makes them."""
    enabled, app = list[bool](), _routed_app()

    async def story() -> None:
        collecting = asyncio.create_task(collect_garbage())
        await _documents(app)
        await asyncio.sleep(4 * YOUNG_S)
        collecting.cancel()

    def note(phase: str, info: dict[str, int]) -> None:
        enabled.append(gc.isenabled())

    monkeypatch.setattr(server, "YOUNG_S", 0.001)
    gc.callbacks.append(note)
    try:
        asyncio.run(story())
    finally:
        gc.callbacks.remove(note)
    assert enabled and all(enabled), "a collection ran while they were made"
    assert not any(one is app.openapi_schema for one in gc.get_objects()), "it is never walked again"


@pytest.mark.parametrize("path", ["/v1/events", "/metrics"])
def test_events_that_wait_are_handed_out_in_slices_before_they_are_read(path: str, rig: Rig) -> None:
    journal = rig.parts.feeds._journal  # nothing else hands out events here
    for number in range(10 * SLICE_EVENTS):
        journal.publish(Freed(bytes=number))

    async def read() -> None:
        status, content = await ask(rig.app, "GET", path)
        assert status == 200 and content

    handed_out, most = most_in_a_turn(read, lambda: len(journal._queue))
    assert handed_out >= 10 * SLICE_EVENTS and most <= SLICE_EVENTS


def test_all_tenants_are_looked_at_in_slices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices end by time: here each look is one."""
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    quotas, count = rig.parts.handlers.metrics._quotas, 200
    for number in range(count):
        quotas.put(f"tenant {number}", Quota(chunks=number))
    turns = turns_of(quotas.views).number
    assert turns >= 2 * count and len(asyncio.run(quotas.views())) >= count


WALKS: dict[str, Callable[[Rig], Coroutine[Any, Any, Any]]] = {
    "the keeper's look at locks": lambda rig: rig.parts.keeper._watch_members(),
    "what benchmarks have left": lambda rig: rig.parts.handlers.lists._registry.left_by_benches(),
    "copy rates": lambda rig: rig.parts.handlers.lists.copy_rates(),
    "the sessions that looked up most": lambda rig: rig.parts.handlers.lists.most_used_sessions(OWN),
    "silent engines": lambda rig: rig.parts.handlers.judge._silent(Judged(OWN, HitTotals(), {})),
    "engines that share nothing": lambda rig: rig.parts.handlers.judge._shares_nothing(Judged(OWN, HitTotals(), {})),
    "namespaces": lambda rig: rig.parts.handlers.lists.namespaces(OWN, 10, 0),
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_over_all_sessions_goes_in_slices(walk: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices end by time: here each look is one."""
    bench = NamespaceRecord(1 << 20, bytes(32), manifest(), "", base=bytes(32))
    bench.use.is_bench = True
    rig.parts.handlers.lists._registry._namespaces[b"bench"] = bench
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    assert turns_of(partial(WALKS[walk], rig)).number >= SESSIONS


class Held:
    """Counts those that are left."""

    left = 0

    def __init__(self) -> None:
        Held.left += 1

    def __del__(self) -> None:
        Held.left -= 1


@pytest.mark.parametrize("reads", [False, True])
def test_sessions_that_ended_at_once_are_freed_in_slices(
    reads: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while somebody walks all of them."""
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    table, registry, lists = rig.pool.table, rig.parts.handlers.lists._registry, rig.parts.handlers.lists

    async def end() -> None:
        for session in registry.sessions():
            for member in tuple(session.members.values()):
                await work_off(lambda: table.leave(member.table_id, SLICE_WORK))  # noqa: B023  # it is called at once
                registry.drop_member(session, member)
            session.label = Held()  # type: ignore[assignment]  # any object is freed with its session

    async def prune() -> None:
        walk = asyncio.create_task(lists.copy_rates()) if reads else None
        await asyncio.sleep(0)
        await registry.prune(table)
        if walk is not None:
            await walk

    asyncio.run(end())
    freed, most = most_in_a_turn(prune, lambda: Held.left)
    assert freed >= SESSIONS - 1 and most <= SLICE_SESSIONS + 1


def test_engines_and_days_of_hits_are_summed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    now, engines = {"s": 1_764_000_000.0}, 100
    record = HitRecord(lambda: now["s"], lambda: now["s"])
    outcome = OutcomeView(prompt_tokens=1, local_tokens=0, found_tokens=0, loaded_tokens=0)
    for _ in range(9):
        for number in range(engines):
            record.ended(Whose("", f"m{number}", f"e{number}"), outcome)
        now["s"] += 86_400
    now["s"] -= 86_400
    assert turns_of(lambda: record.lately.sums(lambda tenant: True)).number >= engines
    assert turns_of(lambda: record.days(lambda tenant: True, 8)).number >= 8


def test_manifests_of_one_model_are_compared_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    manifests = [manifest(cache_salt=f"{number}") for number in range(200)]
    assert turns_of(lambda: _differing(manifests)).number >= 200
    assert asyncio.run(_differing(manifests)) == ["cache_salt"]


def test_a_clear_closes_reservations_in_slices(rig: Rig) -> None:
    """All that nobody has committed yet."""
    table = rig.pool.table

    async def reserve() -> None:
        for number in range(6):
            await store(rig.parts, rig.session, f"open {number}", keys(MAX_STORE_KEYS, f"open {number}"))

    async def clear() -> None:
        status, content = await ask(rig.app, "POST", "/v1/cache/clear", {})
        assert status == 200, content

    asyncio.run(reserve())
    closed, most = most_in_a_turn(clear, lambda: table.stats()["reserved_chunks"])
    of_slice = SLICE_WORK // ABORT_CHUNK
    assert closed == 6 * MAX_STORE_KEYS > 3 * of_slice and most <= of_slice + MAX_STORE_KEYS
    table.check_integrity()


def test_a_search_for_a_request_looks_at_a_few_rows_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And misses none, though others come meanwhile. Slices end by time: here each look is one."""
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    recent, count = RecentRequests(4000), 4000

    def add(number: int) -> None:
        recent.add("", RequestView(
            at=0.0, kind="lookup", session="s", label="", request=f"r{number}", tokens=1, hit_tokens=0, chunks=0,
            bytes=0, took_us=0,
        ), Detail(b""))

    for number in range(count):
        add(number)

    async def search() -> None:
        found = asyncio.create_task(recent.named("r2500", lambda tenant: True, 10))
        for number in range(count, count + 20):  # while it is looked for
            await asyncio.sleep(0)
            add(number)
        assert [one.request for one, _ in await found] == ["r2500"]
        shown, cursor = await recent.view(2, 0, lambda tenant: True, "r3")
        assert [one.request for one in shown] == ["r3999", "r3998"] and cursor is not None
        add(count + 20)
        shown, _ = await recent.view(1, int(cursor), lambda tenant: True, "r3")
        assert [one.request for one in shown] == ["r3997"]

    assert turns_of(search).number >= count // 64


def test_the_curve_of_many_namespaces_is_made_in_slices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_of_time, "SLICE_S", 0.0)
    curves = rig.parts.handlers.overview._curves
    assert isinstance(curves, Curves)
    count = 200
    for number in range(count):
        base = hashlib.sha256(b"%d" % number).digest()
        space = NamespaceRecord(number, base, manifest(), "", base=base)
        curves.looked_up(space, base, 0)
    assert turns_of(partial(curves.view, OWN)).number >= 3 * count
    assert turns_of(partial(curves.total, OWN._replace(scopes=frozenset({"read"})))).number >= count


def test_why_chunks_are_missing_is_looked_into_for_so_many_runs_of_them(rig: Rig) -> None:
    """The prompt's chunks were deleted, or never there, in turns."""
    service, answers = rig.parts.handlers.service, rig.parts.sampler._tally.learned.answers
    registry = rig.parts.handlers.lists._registry
    space, table_id = registry.namespaces()[0].table_id, registry.sessions()[0].table_id
    never = keys(MAX_KEYS, "never")
    mixed = [one if at % 2 else other for at, (one, other) in enumerate(zip(CHAIN, never, strict=True))]
    assert rig.pool.table.delete(space, bytes.fromhex("".join(CHAIN))) == MAX_KEYS

    async def missing(asked: list[str]) -> list[tuple[int, str]]:
        body = s.Lookup(session=rig.session, member="m", request=asked[1], keys=asked)
        assert (await service.lookup(OWN, body, JSON)).hit_tokens == 0
        await rig.parts.sampler._tally.catch_up()
        of_request = answers._open.get((table_id, service._names.digest(body.request)))
        assert of_request is not None
        return [(one.end, one.why) for one in of_request[0].missing]

    found = asyncio.run(missing(mixed))
    assert len(found) == MOST_RUNS and found[-1][0] == MAX_KEYS
    assert found[:3] == [(1, "never_stored"), (2, "deleted"), (3, "never_stored")]
    assert asyncio.run(missing(never)) == [(MAX_KEYS, "never_stored")]
