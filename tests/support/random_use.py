"""Engines that make random calls to a chunk table: legal ones, late ones and repeats.

What a call answers is not looked at; tests/support/model.py has a model that knows it. A call may be refused, but the
table never finds itself corrupt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from table_helpers import PAGE

from kvdock._core import Census, Mapping, Table, TableError


class Kind(NamedTuple):
    """A kind of model, and whose it is."""

    writers: int
    groups: list[tuple[str, int, int]]
    tenant: bytes


KINDS: Final = (
    Kind(1, [("full", 0, PAGE)], bytes(16)),
    Kind(2, [("full", 0, PAGE), ("window", 20, 2 * PAGE)], b"t" * 16),
    Kind(3, [("full", 0, 2 * PAGE)], bytes(16)),
)
SLOTS: Final = 300
FACTS: Final = [(0, PAGE, SLOTS * PAGE)]
READERS: Final = (1, 2, 65)


@dataclass
class Engine:
    nonce: bytes
    kind: int
    lock_offset: int
    session: int = 0
    member: int = 0
    reservations: list[int] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)


class RandomUse:
    def __init__(self, table: Table, source: random.Random, now_ms: int = 1) -> None:
        self.table, self.source, self.now_ms = table, source, now_ms
        self.engines: list[Engine] = []
        self.made = 0
        """Calls so far."""
        self._named = 0
        self._spaces = self._add_spaces()

    def go_on_with(self, table: Table, now_ms: int) -> None:
        """The engines attach again to a table that was adopted."""
        self.table, self.now_ms = table, max(self.now_ms, now_ms)
        self._spaces = self._add_spaces()
        for engine in self.engines:
            self._attach(engine)

    def calls(self, count: int) -> None:
        """Raises TableError("corrupt")."""
        chosen, weights = zip(*self._CALLS, strict=True)
        self.made += count
        for call in self.source.choices(chosen, weights, k=count):
            self.now_ms += self.source.choice([0, 1, 3, 60])
            try:
                if len(self.engines) < 4:
                    self._enter()
                call(self, self.source.choice(self.engines))
            except TableError as error:
                if error.code == "corrupt":
                    raise

    # ---------------------------------------------------------------- engines

    def _add_spaces(self) -> list[int]:
        return [
            self.table.add_namespace(
                bytes([number + 1]) * 32, chunk_tokens=16, block_tokens=16, writers=kind.writers, groups=kind.groups,
                tenant=kind.tenant,
            )
            for number, kind in enumerate(KINDS)
        ]

    def _name(self) -> bytes:
        self._named += 1
        return self._named.to_bytes(16, "big")

    def _enter(self) -> None:
        engine = Engine(self._name(), self.source.randrange(len(KINDS)), 5000 + self._named)
        self._attach(engine)
        self.engines.append(engine)

    def _attach(self, engine: Engine) -> None:
        ranks = list(range(KINDS[engine.kind].writers))
        engine.session = self.table.open_session(engine.nonce, self._spaces[engine.kind], self.now_ms)
        engine.member = self.table.add_member(
            engine.session, engine.nonce, ranks, True, self.now_ms, engine.lock_offset
        )

    def _chain(self, engine: Engine) -> bytes:
        prompt, chunks = self.source.randrange(4), self.source.randint(1, 8)
        return b"".join(bytes([engine.kind + 1, prompt, at]).ljust(32, b"\1") for at in range(chunks))

    # ---------------------------------------------------------------- calls

    def _reserve(self, engine: Engine) -> None:
        got = self.table.reserve(
            engine.session, engine.member, self._name(), b"", self._chain(engine), groups=0,
            temporary=self.source.random() < 0.1, deadline_ms=self.source.choice([50, 10**6]), now_ms=self.now_ms,
        )
        if not got.grant:
            return
        engine.reservations.append(got.grant)
        if self.source.random() < 0.8:
            for rank in range(KINDS[engine.kind].writers):
                parts = [(index, part[0], 7) for index, parts in got.chunks for part in parts if part[1] == rank]
                self.table.commit(engine.session, got.grant, rank, parts, self.now_ms)

    def _commit_again(self, engine: Engine) -> None:
        if engine.reservations:
            grant, index = self.source.choice(engine.reservations), self.source.randrange(8)
            rank = self.source.randrange(KINDS[engine.kind].writers)
            self.table.commit(engine.session, grant, rank, [(index, 0, 7)], self.now_ms)

    def _abort(self, engine: Engine) -> None:
        if engine.reservations:
            grant = engine.reservations.pop(self.source.randrange(len(engine.reservations)))
            self.table.abort(engine.session, grant, list(range(KINDS[engine.kind].writers)))

    def _lookup(self, engine: Engine) -> None:
        got = self.table.lookup(
            engine.session, engine.member, self._name(), 1, self._chain(engine), readers=self.source.choice(READERS),
            skip_tokens=self.source.choice([0, 0, 16]), now_ms=self.now_ms, computes=self.source.random() < 0.3,
        )
        if got.lease:
            engine.leases.append(got.lease)

    def _hold(self, engine: Engine) -> None:
        got = self.table.hold(engine.session, engine.member, self._name(), self._chain(engine), self.now_ms)
        if got.lease:
            engine.leases.append(got.lease)

    def _release(self, engine: Engine) -> None:
        if engine.leases:
            lease = engine.leases.pop(self.source.randrange(len(engine.leases)))
            self.table.release(engine.session, lease, list(range(self.source.choice(READERS))))

    def _mismatch(self, engine: Engine) -> None:
        if engine.leases:
            self.table.mismatch(engine.session, self.source.choice(engine.leases), [self.source.randrange(8)])

    def _tick(self, engine: Engine) -> None:
        self.table.tick(self.now_ms)

    def _heartbeat(self, engine: Engine) -> None:
        for grant, ranks in self.table.heartbeat(engine.member, self.now_ms):
            self.table.done(engine.member, grant, ranks)

    def _end(self, engine: Engine) -> None:
        self.engines.remove(engine)
        if self.source.random() < 0.5:
            self.table.leave(engine.member)
        else:
            self.table.member_dead(engine.member, self.now_ms)

    def _delete(self, engine: Engine) -> None:
        self.table.delete(self._spaces[engine.kind], self._chain(engine))

    def _prefer(self, engine: Engine) -> None:
        space, keys = self._spaces[engine.kind], self._chain(engine)
        self.table.retain(space, keys, 5, self.now_ms + 50)
        self.table.lower(space, keys, -5)
        self.table.pin(space, keys, self.now_ms + 100)

    def _evict(self, engine: Engine) -> None:
        self.table.evict(self.source.randrange(SLOTS * PAGE), 20)
        self.table.set_quota(b"t" * 16, bytes=self.source.choice([None, 40 * PAGE]), chunks=None)
        self.table.evict_over_quota(10)

    def _clear(self, engine: Engine) -> None:
        self.table.clear(-1 if self.source.random() < 0.1 else self._spaces[engine.kind], 0, 10**6)

    def _report(self, engine: Engine) -> None:
        space, keys = self._spaces[engine.kind], self._chain(engine)
        census = Census(self.table)
        while not census.step(64):
            pass
        census.spaces()
        census.prefixes(self._spaces, 20)
        reports: tuple[Callable[[], object], ...] = (
            self.table.stats, self.table.grants, self.table.sessions, self.table.members, self.table.tenants,
            self.table.namespaces, lambda: self.table.next_out(10 * PAGE), lambda: self.table.all_changes(0, 500),
            lambda: self.table.ready(0, 500), lambda: self.table.fates(space, keys),
            lambda: self.table.children(space, keys[:32]), lambda: self.table.peek(space, keys),
        )
        for report in reports:
            report()

    _CALLS: Final = (
        (_reserve, 30), (_lookup, 28), (_release, 20), (_commit_again, 4), (_abort, 4), (_hold, 2), (_mismatch, 0.5),
        (_tick, 5), (_heartbeat, 3), (_end, 1), (_delete, 2), (_prefer, 1), (_evict, 2), (_clear, 0.3), (_report, 1),
    )


def new_table(region: Mapping) -> Table:
    table = Table(
        region, pool_id=1, incarnation=1, limit_bytes=SLOTS * PAGE, max_records=512, max_grants=64, lock_inode=7,
        session_cap=1.0, total_cap=1.0, ask_ms=400, settle_ms=100, suspect_ms=10**9,
    )
    table.add_segment(*FACTS[0])
    return table


def adopted(region: Mapping) -> tuple[Table, dict[str, int]]:
    """Raises TableError."""
    return Table.adopt(
        region, pool_id=1, lock_inode=7, segments=FACTS, limit_bytes=SLOTS * PAGE, session_cap=1.0, total_cap=1.0,
        ask_ms=400, settle_ms=100, suspect_ms=10**9,
    )
