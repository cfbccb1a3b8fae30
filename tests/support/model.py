"""The chunk table as a few dicts: what `kvdock._core.Table` must do, for one size of slot.

It is slow and obvious on purpose. `tests/table/test_model.py` drives both with the same calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

ROOT = b""
UNKNOWN = b"\xff" * 32


@dataclass
class Space:
    """A namespace: chunk length, writers, per group the window in tokens (None: full attention), whose it is. `base`:
    the namespace of the same manifest without weights; None: it is one."""

    chunk_tokens: int
    writers: int
    windows: list[int | None]
    tenant: int = 0
    base: int | None = None

    @property
    def full(self) -> set[int]:
        return {g for g, w in enumerate(self.windows) if w is None}

    def needed(self, index: int, end: int) -> set[int]:
        """Groups a hit of `end` chunks needs of chunk `index`: a window needs what its last tokens touch."""
        first_token = (index + 1) * self.chunk_tokens
        out = set(self.full)
        for g, w in enumerate(self.windows):
            if w is not None and first_token > end * self.chunk_tokens - w:
                out.add(g)
        return out


@dataclass
class Quota:
    slots: float = math.inf
    chunks: float = math.inf


@dataclass(eq=False)
class Record:
    space: int
    key: bytes
    parent: bytes
    groups: set[int]
    last_used: int
    temporary: bool
    state: str = "reserved"
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    readers: set[object] = field(default_factory=set)
    kept_until: int = 0


@dataclass
class Grant:
    kind: str
    session: int
    asker: int
    holders: set[int]
    lines: dict[int, Record] = field(default_factory=dict)
    extra: list[Record] = field(default_factory=list)
    is_open: bool = True
    deadline: int = 0
    epoch: int = 0
    ranks: int = 1


class Refused(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Model:
    """`is_gone`: whether the table, which is asked first, has evicted a record. It chooses among leaves that were used
    last at the same time, and among those of a namespace that was left, for no rule does."""

    def __init__(
        self, spaces: list[Space], slots: int, session_cap: float, total_cap: float, is_gone: Callable[[Record], bool],
        grace_ms: int,
    ) -> None:
        self.spaces, self.slots, self.is_gone = spaces, slots, is_gone
        self.session_room, self.total_room = int(slots * session_cap), int(slots * total_cap)
        self.records: list[Record] = []
        self.grants: dict[int, Grant] = {}
        self.quotas: defaultdict[int, Quota] = defaultdict(Quota)
        self.tick = self.now = 0
        self.grace_ms = grace_ms
        self.members: list[set[int]] = [set() for _ in spaces]
        """By namespace: the engines that are in it."""
        self.left_ms = [0] * len(spaces)
        """When an engine left it last, if that counts; 0: it does not."""

    # -- who runs which weights

    def enter(self, space: int, engine: int) -> None:
        self.members[space].add(engine)
        self.left_ms[space] = 0

    def leave(self, space: int, engine: int, *, moves: bool = False) -> None:
        self.members[space].discard(engine)
        if moves or self.spaces[space].base is not None or self.left_ms[space]:
            self.left_ms[space] = max(1, self.now)

    def move(self, before: int, after: int, engine: int) -> None:
        if before != after:
            self.enter(after, engine)
            self.leave(before, engine, moves=True)

    def restart(self) -> None:
        """The next server says of weights that no engine runs that they were left, if the one before did not."""
        for i, space in enumerate(self.spaces):
            if space.base is not None and not self.members[i]:
                self.left_ms[i] = self.left_ms[i] or max(1, self.now)

    def left(self) -> dict[int, int]:
        """When the namespaces were left in which no engine is."""
        return {i: ms for i, ms in enumerate(self.left_ms) if ms and not self.members[i]}

    # -- questions

    def find(self, space: int, key: bytes, state: str) -> Record | None:
        return next((r for r in self.records if (r.space, r.key, r.state) == (space, key, state)), None)

    def parts(self, r: Record) -> int:
        return len(r.groups) * self.spaces[r.space].writers

    def used(self) -> int:
        return sum(self.parts(r) for r in self.records)

    def pinners(self, r: Record) -> list[Grant]:
        return [g for g in self.grants.values() if g.holders and (r in g.lines.values() or r in g.extra)]

    def held(self, session: int | None = None) -> int:
        return sum(
            self.parts(r) for r in self.records
            if any(session is None or g.session == session for g in self.pinners(r))
        )

    def is_leaf(self, r: Record) -> bool:
        return not any(
            c.parent == r.key and c.space == r.space and c.state in ("reserved", "ready") for c in self.records
        )

    def victim(
        self, spare: bytes | None = None, space: int = -1, tenant: int | None = None, kept: bool = False
    ) -> Record | None:
        free = [
            r for r in self.records
            if r.state == "ready" and not self.pinners(r) and self.is_leaf(r) and bool(r.kept_until) == kept
            and (r.space, r.key) != (space, spare) and tenant in (None, self.spaces[r.space].tenant)
        ]
        dead = {i: ms for i, ms in self.left().items() if ms + self.grace_ms <= self.now and not kept}

        def order(r: Record) -> tuple[object, ...]:
            if r.space in dead:
                return 0, dead[r.space], r.space, not self.is_gone(r)
            return 1, r.last_used, not self.is_gone(r)

        return min(free, key=order, default=None)

    def of_tenant(self, tenant: int) -> list[Record]:
        return [r for r in self.records if self.spaces[r.space].tenant == tenant]

    def within_quota(self, tenant: int, slots: int = 0, chunks: int = 0) -> bool:
        """With so much more than the tenant has."""
        quota, mine = self.quotas[tenant], self.of_tenant(tenant)
        return sum(map(self.parts, mine)) + slots <= quota.slots and len(mine) + chunks <= quota.chunks

    def hit(self, space: int, keys: list[bytes], limit: int | None = None) -> int:
        s = self.spaces[space]
        ready = [self.find(space, k, "ready") for k in keys]

        def whole(n: int) -> bool:
            return all((r := ready[i]) is not None and s.needed(i, n) <= r.groups for i in range(n))

        return next((n for n in range(len(keys) if limit is None else limit, 0, -1) if whole(n)), 0)

    # -- transitions

    def settle(self) -> None:
        """What records without pins become; repeated until nothing changes."""
        for r in list(self.records):
            if self.pinners(r):
                continue
            if r.state == "quarantined" or (r.state == "ready" and r.temporary and len(r.readers) == 1):
                self.records.remove(r)

    def close(self, g: Grant) -> None:
        g.is_open = False
        for r in g.lines.values():
            if r.state == "reserved":
                r.state = "quarantined"

    def finish(self, g: Grant) -> None:
        if not g.holders:
            if g.kind == "reservation" and g.is_open:
                self.close(g)
            g.is_open = False
        self.settle()

    def evict_one(self, r: Record) -> None:
        self.records.remove(r)

    def evict_of(self, tenant: int, spare: bytes | None = None, space: int = -1) -> bool:
        """A kept chunk goes only if there is no other."""
        gone = self.victim(spare, space, tenant) or self.victim(spare, space, tenant, kept=True)
        if gone:
            self.evict_one(gone)
        return gone is not None

    def make_room_in_quota(self, space: int, parent: bytes, slots: int) -> bool:
        tenant = self.spaces[space].tenant
        quota = self.quotas[tenant]
        if not self.within_quota(tenant) or slots > quota.slots or quota.chunks < 1:
            return False
        while not self.within_quota(tenant, slots, 1):
            if not self.evict_of(tenant, parent, space):
                return False
        return True

    def evict_over_quota(self, tenants: list[int], at_most: int) -> int:
        gone = 0
        for tenant in tenants:
            while gone < at_most and not self.within_quota(tenant) and self.evict_of(tenant):
                gone += 1
        return gone

    # -- calls

    def lookup(self, session: int, space: int, keys: list[bytes], skip: int, who: object) -> tuple[int, list[Record]]:
        """Returns (tokens hit, records to lock); the caller files the grant under the id that the table gave it.

        `skip`: tokens that the caller has already. The chunk in which they end is locked: its other blocks are read."""
        n, chunk = self.hit(space, keys), self.spaces[space].chunk_tokens
        if skip > n * chunk:
            raise Refused("skip_exceeds_hit")
        first = skip // chunk
        mine, total, room = self.held(session), self.held(), n
        for i in range(first, n):
            r = self.find(space, keys[i], "ready")
            assert r is not None
            pinners = self.pinners(r)
            total += 0 if pinners else self.parts(r)
            mine += 0 if any(g.session == session for g in pinners) else self.parts(r)
            if mine > self.session_room or total > self.total_room:
                room = i
                break
        n = max(self.hit(space, keys, room), 0)
        self.use(space, keys)
        locked = self.found(space, keys)[first:n]
        for r in locked:
            r.readers.add(who)
        return max(n * chunk, skip), locked

    def found(self, space: int, keys: list[bytes]) -> list[Record]:
        """What is there of a prefix, whether a window or a limit lets it be hit or not."""
        out = []
        for key in keys:
            r = self.find(space, key, "ready")
            if r is None or not self.spaces[space].full <= r.groups:
                break
            out.append(r)
        return out

    def use(self, space: int, keys: list[bytes]) -> None:
        """A lookup uses all that it finds, and what comes before its first key."""
        self.tick += 1
        found = self.found(space, keys)
        for r in found:
            r.last_used = self.tick
        if found:
            self.use_path(space, found[0].parent)

    def use_path(self, space: int, key: bytes) -> None:
        """As far up as parents are known."""
        while key not in (ROOT, UNKNOWN):
            r = self.find(space, key, "ready") or self.find(space, key, "reserved")
            if r is None:
                return
            r.last_used = self.tick
            key = r.parent

    def reserve(
        self, session: int, space: int, path: list[bytes], start: int, groups: set[int], temporary: bool,
        knows_parent: bool = True,
    ) -> tuple[dict[int, Record], list[int], list[int], str]:
        s = self.spaces[space]
        self.tick += 1
        first = (path[start - 1] if start else ROOT) if knows_parent else UNKNOWN
        self.use_path(space, first)
        granted: dict[int, Record] = {}
        present, busy = [], []
        need = len(groups) * s.writers
        mine = Grant("reservation", session, 0, {0})
        self.grants[-1] = mine
        limited = ""
        for i, key in enumerate(path[start:]):
            ready = self.find(space, key, "ready")
            if self.find(space, key, "reserved"):
                busy.append(i)
                continue
            if ready and (groups <= ready.groups or ready.groups - groups):
                ready.last_used = self.tick
                present.append(i)
                continue
            if self.held(session) + need > self.session_room or self.held() + need > self.total_room:
                limited = "held_bytes"
                break
            parent = path[start + i - 1] if i else first
            if not self.make_room_in_quota(space, parent, need):
                limited = "quota"
                break
            while self.slots - self.used() < need and (v := self.victim(parent, space)):
                self.evict_one(v)
            if self.slots - self.used() < need:
                limited = "no_space"
                break
            r = Record(space, key, parent, groups, self.tick, temporary)
            self.records.append(r)
            granted[i] = mine.lines[i] = r
        del self.grants[-1]
        return granted, present, busy, limited

    def commit(self, grant: int, rank: int, parts: list[tuple[int, int, int]]) -> None:
        g = self.grants[grant]
        for index, group, checksum in parts:
            g.lines[index].sums[group, rank] = checksum
        for r in g.lines.values():
            if len(r.sums) == self.parts(r) and r.state == "reserved":
                if old := self.find(r.space, r.key, "ready"):
                    old.state = "quarantined"
                    r.kept_until = old.kept_until
                r.state = "ready"
        if all((group, rank) in r.sums for r in g.lines.values() for group in r.groups):
            g.holders.discard(rank)
        self.finish(g)

    def discharge(self, grant: int, ranks: set[int], close: bool = False) -> None:
        g = self.grants[grant]
        if close and g.is_open and g.holders:
            self.close(g)
        g.holders -= ranks
        self.finish(g)

    def remove(self, r: Record) -> None:
        r.state = "quarantined"
        self.settle()
