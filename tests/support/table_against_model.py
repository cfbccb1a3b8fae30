"""A Hypothesis state machine that drives the chunk table and a plain-Python model with the same calls."""

from __future__ import annotations

import hashlib
import math
import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model import UNKNOWN, Grant, Model, Quota, Record, Refused, Space

from kvdock._core import Lookup, Mapping, Reservation, Table, TableError

SLOT = 4096
SLOTS = 24
CHUNK, BLOCK = 16, 4
SPACES = [
    Space(CHUNK, 2, [None]), Space(CHUNK, 1, [None, 24], tenant=1), Space(CHUNK, 1, [None], tenant=1),
    Space(CHUNK, 2, [None], base=0), Space(CHUNK, 2, [None], base=0),
]
TENANTS = [bytes(16), b"another tenant.."]
SESSION_CAP, TOTAL_CAP = 0.6, 1.0
SETTLE_MS, SUSPECT_MS, GRACE_MS = 3_000, 10**9, 2_000

Path = tuple[int, ...]
# A few trunks that share prefixes, so that stores and lookups meet.
trunks = st.sampled_from([(0, 0, 0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 1)])
paths = st.tuples(trunks, st.integers(1, 6)).map(lambda t: t[0][: t[1]])
sessions = st.integers(0, 3)
spaces = st.integers(0, len(SPACES) - 1)
seldom = st.integers(0, 7).map(lambda n: n == 5)


def digest(*what: object) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


def keys_of(path: Path) -> list[bytes]:
    return [digest("key", path[: i + 1]) for i in range(len(path))]


def new_table() -> tuple[Table, Mapping]:
    """The table, and the region in which it lies."""
    size = Table.region_bytes(256, 64)
    fd = os.memfd_create("kvdock-table")
    os.ftruncate(fd, size)
    region = Mapping(fd, size)
    os.close(fd)
    table = Table(
        region, pool_id=1, incarnation=3, limit_bytes=SLOTS * SLOT, max_records=256, max_grants=64,
        settle_ms=SETTLE_MS, suspect_ms=SUSPECT_MS, session_cap=SESSION_CAP, total_cap=TOTAL_CAP, grace_ms=GRACE_MS,
    )
    table.set_eviction("lru")  # whose order the model knows
    table.add_segment(0, SLOT, SLOTS * SLOT)
    return table, region


class TableAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.region = new_table()
        self.model, self.now, self.serial = Model(SPACES, SLOTS, SESSION_CAP, TOTAL_CAP, self.is_gone, GRACE_MS), 0, 0
        self.spaces = [
            self.table.add_namespace(
                digest("space", i), chunk_tokens=s.chunk_tokens, block_tokens=BLOCK, writers=s.writers,
                groups=[("full", 0, SLOT) if w is None else ("window", w, SLOT) for w in s.windows],
                tenant=TENANTS[s.tenant], base=None if s.base is None else digest("space", s.base),
            )
            for i, s in enumerate(SPACES)
        ]
        self.session_space = [0, 0, 1, 2]
        self.session = [0] * 4
        self.nonce = [0] * 4
        self.member: list[list[int]] = [[] for _ in range(4)]
        self.state: list[list[str]] = [[] for _ in range(4)]
        self.died: dict[tuple[int, int], int] = {}
        self.epochs: dict[tuple[int, int], int] = {}
        self.followed: dict[int, set[bytes]] = {}
        """By namespace: the keys that are there, by the changes that the table reported. Absent: begin anew."""
        self.since = [0] * len(SPACES)
        self.generations = [0] * len(SPACES)
        for i in range(4):
            self.attach(i)

    def attach(self, i: int) -> None:
        """Two members: rank 0, which is the scheduler too, and rank 1."""
        self.serial += 1
        self.nonce[i] = self.serial
        self.state[i] = ["live", "live"]
        space = self.spaces[self.session_space[i]]
        self.session[i] = self.table.open_session(digest("s", self.serial)[:16], space, self.now)
        self.model.enter(self.session_space[i], i)
        self.member[i] = [self.present(i, rank) for rank in (0, 1)]

    def is_gone(self, r: Record) -> bool:
        return bool(self.table.state_of(self.spaces[r.space], r.key) != "ready")

    def present(self, i: int, rank: int) -> int:
        nonce = digest("m", self.nonce[i], rank)[:16]
        return self.table.add_member(self.session[i], nonce, [rank], rank == 0, self.now, 77 + rank)

    def tenant_of(self, i: int) -> int:
        return SPACES[self.session_space[i]].tenant

    def live(self, kind: str) -> list[int]:
        return [n for n, g in self.model.grants.items() if g.kind == kind and g.holders]

    # -- stores

    @rule(i=sessions, path=paths, start=st.sampled_from([0, 0, 2]), window=st.booleans(), temporary=seldom,
          knows_parent=st.booleans())
    def store(
        self, i: int, path: Path, window: bool, temporary: bool, start: int = 0, knows_parent: bool = True
    ) -> None:
        """Reserve and commit everything, as an engine does when nothing goes wrong."""
        grant = self.reserve(i, path, start, window, temporary, knows_parent)
        if grant:
            g = self.model.grants[grant]
            for rank in range(g.ranks):
                self.commit_parts(grant, rank, len(g.lines) * 2)

    @rule(i=sessions, path=paths, start=st.integers(0, 5), window=st.booleans(), temporary=seldom,
          knows_parent=st.booleans())
    def begin_store(
        self, i: int, path: Path, start: int, window: bool, temporary: bool, knows_parent: bool
    ) -> None:
        self.reserve(i, path, start, window, temporary, knows_parent)

    def reserve(
        self, i: int, path: Path, start: int, window: bool, temporary: bool, knows_parent: bool
    ) -> int:
        if self.state[i][0] != "live":
            return 0
        space, keys, start = self.session_space[i], keys_of(path), min(start, len(path) - 1)
        groups = set(range(len(SPACES[space].windows))) if window else SPACES[space].full
        self.serial += 1
        parent = (keys[start - 1] if start else b"") if knows_parent else UNKNOWN
        call = (digest("store", self.serial)[:16], parent, b"".join(keys[start:]))

        def ask() -> Reservation:
            return self.table.reserve(
                self.session[i], self.member[i][0], *call, groups=sum(1 << g for g in groups), temporary=temporary,
                deadline_ms=60_000, now_ms=self.now,
            )

        got = ask()
        granted, present, busy, limited = self.model.reserve(
            self.session[i], space, keys, start, groups, temporary, knows_parent
        )
        assert [c for c, _ in got.chunks] == sorted(granted)
        assert (got.present, got.busy, got.limited) == (present, busy, limited)
        assert bool(got.grant) == bool(granted)
        if got.grant:
            assert self.model.within_quota(SPACES[space].tenant)
            self.model.grants[got.grant] = Grant(
                "reservation", self.session[i], self.member[i][0], set(range(SPACES[space].writers)), granted,
                deadline=self.now + 60_000, ranks=SPACES[space].writers,
            )
            again = ask()
            assert (again.grant, again.chunks) == (got.grant, got.chunks), "a repeated store gets the same answer"
        return got.grant

    @precondition(lambda self: self.live("reservation"))
    @rule(data=st.data(), count=st.integers(1, 12))
    def commit(self, data: st.DataObject, count: int) -> None:
        grant = data.draw(st.sampled_from(self.live("reservation")))
        self.commit_parts(grant, data.draw(st.integers(0, self.model.grants[grant].ranks - 1)), count)

    def commit_parts(self, grant: int, rank: int, count: int) -> None:
        g = self.model.grants[grant]
        parts = [(n, group, n * 7 + group + 1) for n, r in g.lines.items() for group in sorted(r.groups)][:count]
        if not g.is_open:
            with pytest.raises(TableError) as refused:
                self.table.commit(g.session, grant, rank, parts, self.now)
            assert refused.value.code == "grant_closed"
            self.model.discharge(grant, {rank})
            return
        lines = dict(g.lines)
        self.model.commit(grant, rank, parts)
        ready, left = self.table.commit(g.session, grant, rank, parts, self.now)
        assert set(left) == g.holders
        assert ready == sum(len(r.sums) == self.model.parts(r) for r in lines.values())
        assert self.table.commit(g.session, grant, rank, parts, self.now)[0] == ready, "a repeated commit is harmless"

    @precondition(lambda self: self.live("reservation"))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.live("reservation")))
        g = self.model.grants[grant]
        ranks = data.draw(st.sets(st.integers(0, g.ranks - 1), min_size=1))
        self.model.discharge(grant, ranks, close=True)
        assert set(self.table.abort(g.session, grant, sorted(ranks))) == g.holders

    # -- loads

    @rule(
        i=sessions, path=paths, skip=st.sampled_from([0, 0, 0, 4, 12, 16, 20, 32]), readers=st.integers(1, 3),
        request=st.integers(0, 3), start=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def lookup(self, i: int, path: Path, skip: int, readers: int, request: int, start: int) -> None:
        """`skip`: tokens, whole blocks of them; it may end inside a chunk. `start`: the first chunk that is asked for.
        """
        if self.state[i][0] != "live":
            return
        space, keys, session = self.session_space[i], keys_of(path)[min(start, len(path) - 1) :], self.session[i]
        self.epochs[i, request] = epoch = self.epochs.get((i, request), 0) + 1
        name = digest("request", session, request)[:16]

        def ask() -> Lookup:
            return self.table.lookup(
                session, self.member[i][0], name, epoch, b"".join(keys), readers=readers, skip_tokens=skip,
                now_ms=self.now,
            )

        try:
            hit, locked = self.model.lookup(session, space, keys, skip, (session, request))
        except Refused as refused:
            with pytest.raises(TableError) as error:
                ask()
            assert error.value.code == refused.code
            return
        got = ask()
        assert got.hit_tokens == hit
        assert bool(got.lease) == bool(locked)
        first = skip // CHUNK
        for offset, (r, parts) in enumerate(zip(locked, got.chunks, strict=True)):
            need = SPACES[space].needed(first + offset, hit // CHUNK)
            assert {(p[0], p[1]): p[5] for p in parts} == {k: v for k, v in r.sums.items() if k[0] in need}
        if got.lease:
            assert got.lease not in self.model.grants, "a higher epoch gets a new lease"
            self.model.grants[got.lease] = Grant(
                "lease", session, self.member[i][0], set(range(readers)), dict(enumerate(locked, first)), ranks=readers
            )
            if not got.limited:
                self.model.use(space, keys)
                again = ask()
                assert (again.lease, again.chunks) == (got.lease, got.chunks), "a repeated lookup renews its lease"

    @precondition(lambda self: self.live("lease"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.live("lease")))
        g = self.model.grants[grant]
        ranks = data.draw(st.sets(st.integers(0, g.ranks - 1), min_size=1))
        self.model.discharge(grant, ranks)
        assert set(self.table.release(g.session, grant, sorted(ranks))) == g.holders
        assert set(self.table.release(g.session, grant, sorted(ranks))) == g.holders
        if g.holders:
            own = self.tenant_of(self.session.index(g.session))
            for i, other in enumerate(self.session):
                if other != g.session:  # of another tenant's grant it learns no more than of none
                    says = "another session" if self.tenant_of(i) == own else "no such grant"
                    with pytest.raises(TableError, match=says):
                        self.table.release(other, grant, sorted(ranks))

    @precondition(lambda self: self.live("lease"))
    @rule(data=st.data())
    def report_mismatch(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.live("lease")))
        g = self.model.grants[grant]
        index = data.draw(st.sampled_from(sorted(g.lines)))
        was_ready = g.lines[index].state == "ready"
        space, keys = self.table.mismatch(g.session, grant, [index])
        assert keys == (g.lines[index].key if was_ready else b"")
        if was_ready:
            assert space == self.spaces[g.lines[index].space], "that of the lease, which the session may have left"
            self.model.remove(g.lines[index])

    # -- administration, time and death

    @rule(space=spaces, path=paths)
    def delete(self, space: int, path: Path) -> None:
        """Also what is being written: its commit publishes nothing of it."""
        r, begun = (self.model.find(space, keys_of(path)[-1], state) for state in ("ready", "reserved"))
        assert self.table.delete(self.spaces[space], b"") == 0  # no keys are no chunks
        assert self.table.delete(self.spaces[space], keys_of(path)[-1]) == int(r is not None)
        for gone in filter(None, (r, begun)):
            self.model.remove(gone)

    @rule(space=spaces, path=paths, ms=st.sampled_from([0, 2_000]))
    def keep(self, space: int, path: Path, ms: int) -> None:
        """An administrator's pin: not evicted until then, and nothing more."""
        until = self.now + ms if ms else 0
        r = self.model.find(space, keys_of(path)[-1], "ready")
        assert self.table.pin(self.spaces[space], keys_of(path)[-1], until) == int(r is not None)
        if r:
            r.kept_until = until

    @rule(space=st.integers(-1, 2), budget=st.integers(1, 300), really=seldom)
    def clear(self, space: int, budget: int, really: bool) -> None:
        if not really:
            return
        doomed = [r for r in self.model.records if r.state == "ready" and space in (-1, r.space)]
        taken = cursor = 0
        while cursor >= 0:
            count, cursor = self.table.clear(self.spaces[space] if space >= 0 else -1, cursor, budget)
            taken += count
        assert taken == len(doomed)
        for r in doomed:
            self.model.remove(r)

    @rule(space=spaces, least=st.integers(0, 5), really=seldom)
    def raise_generation(self, space: int, least: int, really: bool) -> None:
        """All that is there is cleared at once, before anything was taken out."""
        if not really:
            return
        was, before = self.generations[space], self.table.stats()["ready_chunks"]
        self.generations[space] = max(was + 1, least) if least == 0 or least > was else was
        assert self.table.raise_generation(self.spaces[space], least) == self.generations[space]
        assert self.table.generation(self.spaces[space]) == self.generations[space]
        assert self.table.close_cleared(0) == -1
        if self.generations[space] == was:
            return
        for g in self.model.grants.values():
            is_open = g.kind == "reservation" and g.is_open and g.holders
            if is_open and any(r.space == space for r in g.lines.values()):
                self.model.close(g)
        self.model.settle()
        doomed = [r for r in self.model.records if r.state == "ready" and r.space == space]
        assert self.table.stats()["ready_chunks"] == before, "it takes two stores, not a walk"
        for r in doomed[::2]:
            assert self.table.state_of(self.spaces[space], r.key) != "ready"  # that takes it out
        cursor, taken = 0, 0
        while cursor >= 0:
            count, cursor = self.table.clear_old(cursor, 3)
            taken += count
        assert taken == len(doomed[1::2])
        for r in doomed:
            self.model.remove(r)

    @rule(want_free=st.integers(1, SLOTS))
    def evict(self, want_free: int) -> None:
        evicted, gone = self.table.evict(want_free * SLOT, 1000), 0
        while self.model.slots - self.model.used() < want_free and (v := self.model.victim()):
            self.model.evict_one(v)
            gone += 1
        assert evicted == gone

    @rule(tenant=st.integers(0, 1), slots=st.sampled_from([None, 0, 1, 3, 6, 9]),
          chunks=st.sampled_from([None, None, 0, 1, 3, 5]))
    def set_quota(self, tenant: int, slots: int | None, chunks: int | None) -> None:
        self.table.set_quota(TENANTS[tenant], bytes=None if slots is None else slots * SLOT, chunks=chunks)
        self.model.quotas[tenant] = Quota(
            *(math.inf if amount is None else amount for amount in (slots, chunks))
        )

    @rule(at_most=st.integers(1, 12))
    def evict_over_quota(self, at_most: int) -> None:
        evicted = self.table.evict_over_quota(at_most)
        assert evicted == self.model.evict_over_quota([0, 1], at_most)

    @rule(ms=st.sampled_from([1, 1_000, 4_000, 61_000]))
    def time_passes(self, ms: int) -> None:
        self.now = self.model.now = self.now + ms
        self.table.tick(self.now)
        for g in self.model.grants.values():
            if g.kind == "reservation" and g.is_open and g.holders and self.now > g.deadline:
                self.model.close(g)
        for r in self.model.records:
            r.kept_until = r.kept_until if r.kept_until > self.now else 0
        self.model.settle()
        for (i, rank), died in list(self.died.items()):
            if self.now >= died + SETTLE_MS:
                self.gone(i, rank)

    @rule(i=sessions, rank=st.integers(0, 1), really=seldom)
    def die(self, i: int, rank: int, really: bool) -> None:
        if self.state[i][rank] != "live" or not really:
            return
        self.table.member_dead(self.member[i][rank], self.now)
        self.state[i][rank] = "dead"
        self.died[i, rank] = self.now
        for g in self.held_by(i, rank):
            if g.kind == "reservation":
                self.model.close(g)
        self.model.settle()

    @rule(i=st.integers(0, 1), space=st.sampled_from([0, 3, 4]))
    def move(self, i: int, space: int) -> None:
        """The engine runs other weights from now on."""
        self.table.move_session(self.session[i], self.spaces[space], self.now)
        self.model.move(self.session_space[i], space, i)
        self.session_space[i] = space

    @rule(i=sessions, rank=st.integers(0, 1), really=seldom)
    def leave(self, i: int, rank: int, really: bool) -> None:
        if self.state[i][rank] == "live" and really:
            self.table.leave(self.member[i][rank])
            self.gone(i, rank)

    @rule(really=seldom)
    def restart(self, really: bool) -> None:
        """The server is killed between two calls. The next one adopts its table, and the living come back."""
        if not really:
            return
        before = self.table.stats()
        self.table, found = Table.adopt(
            self.region, pool_id=1, lock_inode=0, segments=[(0, SLOT, SLOTS * SLOT)], limit_bytes=SLOTS * SLOT,
            settle_ms=SETTLE_MS, suspect_ms=SUSPECT_MS, session_cap=SESSION_CAP, total_cap=TOTAL_CAP, grace_ms=GRACE_MS,
        )
        self.table.set_eviction("lru")
        self.followed.clear()
        self.model.restart()
        for tenant, quota in self.model.quotas.items():  # quotas end with a server; the next one sets its own
            self.table.set_quota(
                TENANTS[tenant], bytes=None if quota.slots == math.inf else int(quota.slots) * SLOT,
                chunks=None if quota.chunks == math.inf else int(quota.chunks),
            )
        assert (found["dropped"], found["replaced"], found["cleared"]) == (0, 0, 0)
        assert [self.table.generation(space) for space in self.spaces] == self.generations
        assert (found["chunks"], found["aborted"]) == (before["ready_chunks"], before["reserved_chunks"])
        for g in self.model.grants.values():
            if g.kind == "reservation" and g.is_open and g.holders:
                self.model.close(g)
        self.model.settle()
        self.died = dict.fromkeys(self.died, found["clock_ms"])
        for i, states in enumerate(self.state):
            for rank, state in enumerate(states):
                if state == "live":
                    assert self.present(i, rank) == self.member[i][rank], "who comes back is who it was"

    def held_by(self, i: int, rank: int) -> list[Grant]:
        return [g for g in self.model.grants.values() if g.session == self.session[i] and self.holders_of(g, i, rank)]

    def holders_of(self, g: Grant, i: int, rank: int) -> set[int]:
        """A rank's own member speaks for it; where there is none (any more), the one that asked, rank 0."""
        spoken = {h: h if h < 2 and self.state[i][h] != "gone" else 0 for h in g.holders}
        return {h for h, speaker in spoken.items() if speaker == rank}

    def gone(self, i: int, rank: int) -> None:
        for g in self.held_by(i, rank):
            if g.kind == "reservation":
                self.model.close(g)
            g.holders -= self.holders_of(g, i, rank)
            self.model.finish(g)
        self.state[i][rank] = "gone"
        self.died.pop((i, rank), None)
        if self.state[i] == ["gone", "gone"]:
            self.model.leave(self.session_space[i], i)
            self.attach(i)

    # -- after every step

    @invariant()
    def both_agree(self) -> None:
        self.table.check_integrity()
        stats = self.table.stats()
        for state in ("reserved", "ready", "quarantined"):
            mine = [r for r in self.model.records if r.state == state]
            assert stats[f"{state}_chunks"] == len(mine)
            assert stats[f"{state}_bytes"] == SLOT * sum(map(self.model.parts, mine))
        assert stats["held_bytes"] == SLOT * self.model.held()
        for r in self.model.records:
            if r.state == "ready":
                assert self.table.state_of(self.spaces[r.space], r.key) == "ready"

    @invariant()
    def each_tenant_uses_what_the_model_says(self) -> None:
        for tenant, number in enumerate(TENANTS):
            view, mine = self.table.tenant(number), self.model.of_tenant(tenant)
            sessions_of = {self.session[i] for i, space in enumerate(self.session_space)
                           if SPACES[space].tenant == tenant}
            assert (view.bytes, view.chunks) == (SLOT * sum(map(self.model.parts, mine)), len(mine))
            assert view.namespaces == sum(space.tenant == tenant for space in SPACES)
            assert view.sessions == len(sessions_of)
            assert view.grants == sum(
                bool(g.holders) and g.session in sessions_of for g in self.model.grants.values()
            )

    @invariant()
    def the_same_namespaces_were_left(self) -> None:
        left = {view.namespace: view.left_ms for view in self.table.namespaces() if view.left_ms is not None}
        wanted = {self.spaces[space]: at_ms for space, at_ms in self.model.left().items()}
        assert left == wanted, f"{left} were left, wanted {wanted}"
        assert [view.session for view in self.table.sessions()] == sorted(self.session, key=lambda one: one & 0xfffff)
        filed = {view.session: view.namespace for view in self.table.sessions()}
        assert [filed[one] for one in self.session] == [self.spaces[space] for space in self.session_space]

    @invariant()
    def who_follows_the_changes_knows_what_is_there(self) -> None:
        for i, space in enumerate(self.spaces):
            there = {r.key for r in self.model.records if r.state == "ready" and r.space == i}
            ahead = True
            while ahead:
                changes, following, complete = self.table.changes(space, self.since[i], 3)
                assert complete == (i in self.followed) and len(changes) <= 3
                if not complete:  # the first question to a new server
                    self.followed[i] = set(there)
                for key, is_there in changes:
                    (self.followed[i].add if is_there else self.followed[i].discard)(key)
                ahead, self.since[i] = following != self.since[i], following
            assert self.followed[i] == there

    def teardown(self) -> None:
        """L1: when every engine has left, no grant remains and every record is FREE or READY."""
        for i in range(4):
            for member, state in zip(self.member[i], self.state[i], strict=True):
                if state == "live":
                    self.table.leave(member)
        self.table.tick(self.now + 10**9)
        self.table.check_integrity()
        stats = self.table.stats()
        assert stats["sessions"] == stats["leases"] == stats["reservations"] == stats["held_bytes"] == 0
        assert stats["reserved_chunks"] == stats["quarantined_chunks"] == 0
