"""The kill matrix: which process is killed at which point, doing what; and what must hold afterwards.

One case: a server, a writer and a reader live; a prefix is stored and read. Then the operation begins, the victim
reaches the point and is killed there. A killed server has a successor at its socket, a killed engine another beside
it. Then: whatever can be read is right, a whole prefix can be stored and read again, the table's check of everything
passes (one owner a slot, bytes by state, pins, no READY chunk without all its parts), nothing is held when the engines
have left, and nothing is in shared memory when the server has.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import admin_helpers
from kill_engine import CHUNK_BYTES
from kill_helpers import Child, Nursery, settings_at, until

from kvdock.api.pool.lock import left_pools
from kvdock.client.client import Client
from kvdock.shm import objects as shm

KNOWN, NEW, AFTER, CROWD = 1, 2, 3, 10
"""Conversations: read and stored before; what is under way; what follows; and many more."""
CHUNKS = 4
ROLES = ("server", "writer", "reader")


class Case(NamedTuple):
    operation: str
    point: str
    victim: str
    skip: int = 0


def _cases(operation: str, victim: str, *points: str | tuple[str, int]) -> list[Case]:
    return [Case(operation, *((p, victim) if isinstance(p, str) else (p[0], victim, p[1]))) for p in points]


CASES = [
    *_cases("publish", "server", "reserve.slab_written", "reserve.slab_open", "reserve.slots_taken",
            "reserve.body_written", ("reserve.reserved", 1), "grant.body_begun", ("grant.block_linked", 0),
            ("grant.entry_written", 2), "reserve.entries_written", "grant.body_written", "grant.open",
            ("publish.part_set", 1), "publish.whole", ("publish.ready", 1), "publish.completed", "discharge.begun",
            "discharge.half", "discharge.closed"),
    *_cases("publish", "writer", "ask.lookup", "told.lookup", "ask.reserve", "told.reserve", ("copy.gathering", 40),
            "ask.commit", "told.commit"),
    *_cases("raw", "server", "raw.slot_taken", "raw.move_written", "raw.move_begun", "raw.move_half", ("raw.moved", 1)),
    *_cases("raw", "writer", "ask.raw", "told.raw"),
    *_cases("load", "server", "grant.body_written", "grant.open", "grant.block_linked", ("grant.entry_written", 1)),
    *_cases("load", "reader", "ask.lookup", "told.lookup", ("copy.scattering", 40)),
    *_cases("evict", "server", "evict.unlinked", "evict.quarantined", "quarantine.held_by_none", "quarantine.freed"),
    *_cases("clear", "server", "clear.half", "clear.raised", ("evict.quarantined", 2), ("quarantine.freed", 3),
            "evict.slab_closed"),
    *_cases("quarantine", "server", "evict.unlinked", "evict.quarantined"),
    *_cases("quarantine", "reader", "ask.mismatch", "told.mismatch"),
    *_cases("grow", "server", "grow.named", "map.mapped", "grow.header_half", "grow.allocated", "grow.entry_written",
            "grow.known", "prefault.before", "prefault.after"),
    *_cases("shrink", "server", "retire.begun", "retire.empty", "retire.gone", "retire.unlinked"),
    *_cases("attach", "server", "attach.session_written", "attach.session_open", "attach.member_written",
            "attach.member_live"),
    *_cases("attach", "writer", "lock.taken", "lock.mapped", "ask.attach", "told.attach", "map.mapped"),
    *_cases("weights", "server", "move.filed", "move.left"),
    *_cases("weights", "writer", "ask.weights", "told.weights"),
    *_cases("adopt", "server", "adopt.lock_taken", "map.mapped", "adopt.segments_mapped", "prefault.after",
            "adopt.judged", "adopt.new_life", "adopt.grant_relinked", "adopt.holders_half", "adopt.grants_restarted",
            ("adopt.one_aborted", 0), "adopt.records_done", "adopt.taken_over", "adopt.settled"),
    *_cases("adopt", "writer", "ask.attach", "told.attach"),
    *_cases("start", "server", "open.lock_named", "open.table_named", "grow.named", "grow.header_half",
            "grow.allocated", "prefault.before"),
]


class Run:
    """The processes of one case."""

    def __init__(self, nursery: Nursery, folder: Path, case: Case) -> None:
        self.nursery, self.case = nursery, case
        self.settings = settings_at(folder)
        self.unix = f"unix:{self.settings['socket_path']}"
        self.children: list[Child] = []
        self.pools: set[int] = set()
        self.http = ""
        self.server: Child | None = None
        """The one that serves now."""

    def serve(self, point: str = "", skip: int = 0) -> Child:
        child = self.nursery.fork("server", point=point, skip=skip, settings=self.settings)
        self.children.append(child)
        return child

    def ready(self, child: Child) -> int:
        at = child.answer()
        assert "error" not in at, at
        self.http = at["http"]
        self.pools.add(at["pool_id"])
        self.server = child
        return int(at["pool_id"])

    def engine(self, seed: int, point: str = "", skip: int = 0) -> Child:
        child = self.nursery.fork("engine", point=point, skip=skip, address=self.unix, seed=seed,
                                  packs=self.case.operation == "raw")
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            child.close()


def run_case(nursery: Nursery, folder: Path, case: Case) -> None:
    run = Run(nursery, folder, case)
    try:
        _start(run) if case.operation == "start" else _live(run)
    finally:
        run.close()


def _start(run: Run) -> None:
    """The first server of all is killed while it opens its pool: the next one has a pool all the same."""
    first = run.serve(run.case.point)
    until(lambda: first.page.reached, "the point is reached")
    first.end()
    server = run.serve()
    run.ready(server)
    writer, reader = run.engine(1), run.engine(2)
    writer.answer(), reader.answer()
    _finish(run, writer, reader)


def _live(run: Run) -> None:
    case = run.case
    server = run.serve()
    pool = run.ready(server)
    writer, reader = run.engine(1), run.engine(2)
    assert (writer.answer(), reader.answer()) == ("attached", "attached")
    writer.do("store", KNOWN, CHUNKS)
    assert reader.do("load", KNOWN, CHUNKS) == (CHUNKS, 0)
    if case.operation == "shrink":
        for other in range(4):
            writer.do("store", CROWD + other, CHUNKS)
    victim = _reach(run, server, writer, reader)
    victim.end()
    if case.victim == "server":
        assert run.ready(run.serve()) == pool, "the next server has the pool"
    elif victim is writer:
        writer = run.engine(3)
        writer.answer()
    elif victim is reader:
        reader = run.engine(4)
        reader.answer()
    _finish(run, writer, reader)


def _reach(run: Run, server: Child, writer: Child, reader: Child) -> Child:
    """Begins the operation; the process that stands at the point."""
    case = run.case
    victim = {"server": server, "writer": writer, "reader": reader}[case.victim]
    if case.operation == "adopt":
        if case.victim == "server":
            _leave_much(writer, reader)
            server.end()
            victim = run.serve(case.point, case.skip)
        else:
            victim.page.arm(case.point, case.skip)
            server.end()
            run.ready(run.serve())
    elif case.operation == "attach":
        if case.victim == "server":
            server.page.arm(case.point, case.skip)
            run.engine(5)
        else:
            victim = run.engine(5, case.point, case.skip)
    else:
        victim.page.arm(case.point, case.skip)
        _begin(run, writer, reader)
    until(lambda: victim.page.reached, f"{case.victim} reaches {case.point}")
    return victim


def _leave_much(writer: Child, reader: Child) -> None:
    """An open reservation and an open lease, of engines that stand where they hold one."""
    writer.page.arm("told.reserve")
    writer.begin("store", NEW, CHUNKS)
    until(lambda: writer.page.reached, "a reservation is open")
    reader.page.arm("copy.scattering", 3)
    reader.begin("load", KNOWN, CHUNKS)
    until(lambda: reader.page.reached, "a lease is open")


def _begin(run: Run, writer: Child, reader: Child) -> None:
    operation = run.case.operation
    if operation in ("publish", "raw"):
        writer.begin("store", NEW, CHUNKS)
    elif operation == "load":
        reader.begin("load", KNOWN, CHUNKS)
    elif operation in ("evict", "grow"):
        writer.begin("fill", CROWD, 10, CHUNKS)
    elif operation == "quarantine":
        for _, name in shm.segment_names(next(iter(run.pools))):
            with Path(f"{shm.SHM_DIR}{name}").open("r+b") as segment:
                segment.seek(4096)
                segment.write(b"\xaa" * (15 * CHUNK_BYTES))
        reader.begin("load", KNOWN, CHUNKS)
    elif operation == "clear":
        reader.begin("call", run.unix, "POST", "/v1/cache/clear", {})
    elif operation == "weights":
        writer.do("run", "step-1")
    elif operation == "shrink":
        reader.begin("call", run.unix, "PATCH", "/v1/config", {"pool_bytes": 2 << 20})


def _finish(run: Run, writer: Child, reader: Child) -> None:
    """What must hold, whoever was killed where."""
    server = run.server
    assert server is not None
    for child in run.children:
        if child not in (server, writer, reader):
            child.end()
    if run.case.operation == "adopt" and run.case.victim == "server":
        for child in (writer, reader):
            child.end()  # they stand at their points
        writer, reader = run.engine(6), run.engine(7)
        writer.answer(), reader.answer()
    if run.case.operation == "weights":
        for child in (writer, reader):
            child.do("run", "step-1")
    for conversation in (KNOWN, NEW, CROWD):
        assert reader.do("load", conversation, CHUNKS)[1] == 0, f"wrong bytes of {conversation}"
    for conversation in (NEW, KNOWN, AFTER):

        def stored_and_read(conversation: int = conversation) -> bool:
            writer.do("store", conversation, CHUNKS)
            loaded, wrong = reader.do("load", conversation, CHUNKS)
            assert wrong == 0
            return bool(loaded == CHUNKS)

        until(stored_and_read, f"{conversation} is stored and read whole")
    assert server.do("check") == ""
    for child in (writer, reader):
        child.do("leave")
    with Client(run.unix) as client:

        def held_by_none() -> bool:
            status = client.status()
            return not (status.sessions or status.leases or status.reservations or status.pool.held_bytes)

        until(held_by_none, "nobody holds anything")
    assert admin_helpers.ok(run.unix, "POST", "/v1/cache/clear", {}) is not None

    def empty() -> bool:
        with Client(run.unix) as client:
            pool = client.status().pool
            used = (pool.reserved_bytes, pool.ready_bytes, pool.quarantined_bytes)
            segments = client.segments().segments
            return used == (0, 0, 0) and pool.free_bytes == sum(one.bytes - one.data_offset for one in segments)

    until(empty, "every byte is free again")
    assert server.do("check") == ""
    server.end(signal.SIGTERM)
    for pool in run.pools:
        assert shm.pool_objects().get(pool, []) == [], "nothing is left in shared memory"
    assert [left for left in left_pools() if left.address == run.settings["socket_path"]] == []
