"""The lease, quarantine and adoption protocol as a state machine small enough to visit every state of it.

One server, one scheduler, one rank. A step is what a SIGKILL can separate: each 64-bit store of the server is one.
Scheduler and rank act between any two calls, stopped processes by not acting; a deadline may pass at any time, so
every clock step is covered. Messages are delayed, lost and repeated; a copy goes on after its process has died.
`Guards` names what the protocol relies on: a Model made without one of them breaks an invariant of the specification.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeVar

Slot = int
Guard = Literal[
    "memory waits for its holders after a deadline", "a release names its grant", "done is a promise",
    "adoption keeps grants", "the dead settle", "a new epoch after a plan", "pins stop eviction",
    "the grant's word before the answer", "heartbeats discharge nobody", "delete leaves held memory",
    "the checksum before READY", "a closed reservation publishes nothing", "adoption keeps the later of two",
    "a slot is freed before it is given", "children go first", "one writer a key", "caps",
    "closed grants are asked about", "the gone are discharged", "cancel only what no rank got",
]  # fmt: skip


class Record(NamedTuple):
    state: str  # FREE, RESERVED, READY, QUARANTINED
    key: int = 0
    generation: int = 0
    slot: Slot = -1
    committed: bool = False


class Grant(NamedTuple):
    number: int
    writes: bool
    cell: int
    generation: int
    epoch: int
    open: bool = True
    held: bool = True


class Copy(NamedTuple):
    grant: int
    writes: bool
    slot: Slot
    generation: int
    serial: int


class State(NamedTuple):
    records: tuple[Record, ...]
    written: tuple[int, ...]  # per slot: the generation whose bytes lie there whole; 0 none
    grants: tuple[Grant, ...] = ()
    stores: tuple[tuple[object, ...], ...] = ()  # what the server has still to do, in order
    server: bool = True
    messages: frozenset[tuple[str, int]] = frozenset()
    copies: tuple[Copy, ...] = ()
    rank: str = "LIVE"
    scheduler: bool = True
    refused: frozenset[int] = frozenset()  # by the rank
    handed: frozenset[int] = frozenset()  # the scheduler's word on these is given
    epoch: int = 1
    last: int = 0
    left: tuple[int, ...] = ()  # how often each of BUDGETS may still happen
    broken: str = ""  # an invariant about steps that the last step broke


BUDGETS = ("stores", "lookups", "crashes", "rank deaths", "scheduler deaths", "deletes", "deadlines", "network",
           "misses")  # fmt: skip
FREE = Record("FREE")
Step = tuple[str, State]


class Model(NamedTuple):
    """Bounds, and the guards that are switched off."""

    slots: int = 1
    cells: int = 2
    keys: int = 2
    cap: int = 2
    budget: tuple[int, ...] = (2, 2, 1, 1, 1, 1, 1, 1, 1)
    without: frozenset[Guard] = frozenset()

    def start(self) -> State:
        return State((FREE,) * self.cells, (0,) * self.slots, left=self.budget)

    def has(self, guard: Guard) -> bool:
        return guard not in self.without

    # ---- steps

    def steps(self, s: State) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self.progress(s)
        if not s.stores:
            yield from self._work(s)
            yield from self._faults(s)
        if s.server and (t := _spend(s, "crashes")):
            yield "server SIGKILLed", t._replace(server=False, stores=())

    def progress(self, s: State) -> Iterator[Step]:
        """What happens by itself when nothing new is asked and nothing fails."""
        if s.stores:
            yield f"server: {_say(s.stores[0])}", self._store(s)
            return
        if not s.server:
            yield "the next server adopts", s._replace(server=True, stores=self._adoption(s))
        for cell, r in enumerate(s.records):
            if s.server and r.state == "QUARANTINED" and not pinned(s, cell):
                yield f"record {cell} is free", s._replace(stores=(("record", cell, FREE),))
                return
        yield from self._deliver(s)
        yield from self._copying(s)
        yield from self._asking(s)
        yield from self._dying(s)

    def _store(self, s: State) -> State:
        kind, where, what = s.stores[0]
        t = s._replace(stores=s.stores[1:])
        if kind == "record":
            assert isinstance(where, int) and isinstance(what, Record)
            return t._replace(records=_put(s.records, where, what))
        if kind == "grant":
            assert isinstance(what, Grant)
            return t._replace(grants=(*(g for g in s.grants if g.number != what.number), what))
        assert isinstance(where, int)
        return t._replace(messages=s.messages | {("answer", where)})

    def _adoption(self, s: State) -> tuple[tuple[object, ...], ...]:
        out: list[tuple[object, ...]] = []
        for g in s.grants:
            r = s.records[g.cell]
            finished = g.writes and g.open and r.generation == g.generation and r.committed
            held = g.held and not finished and self.has("adoption keeps grants")
            if (wanted := g._replace(open=g.open and not g.writes, held=held)) != g:
                out.append(("grant", g.number, wanted))
        newest: dict[int, int] = {}
        for r in s.records:
            if r.state == "READY":
                newest[r.key] = max(newest.get(r.key, 0), r.generation)
        for cell, r in enumerate(s.records):
            older = r.state == "READY" and r.generation < newest[r.key] and self.has("adoption keeps the later of two")
            if older or r.state == "RESERVED":
                out.append(("record", cell, r._replace(state="QUARANTINED")))
        return tuple(out)

    # ---- what engines ask for

    def _work(self, s: State) -> Iterator[Step]:
        if not s.server or not s.scheduler:
            return
        for key in range(1, self.keys + 1):
            if t := _spend(s, "stores"):
                yield from self._reserve(t, key)
            if t := _spend(s, "lookups"):
                yield from self._lookup(t, key)

    def _reserve(self, s: State, key: int) -> Iterator[Step]:
        if self.has("one writer a key") and any(r.key == key and r.state == "RESERVED" for r in s.records):
            return
        if self.has("caps") and len(held_cells(s)) >= self.cap:
            return
        used = {r.slot for r in s.records if r.state != "FREE"}
        free = [slot for slot in range(self.slots) if slot not in used]
        cells = [cell for cell, r in enumerate(s.records) if r.state == "FREE"]
        number = s.last + 1
        room: list[tuple[Slot, tuple[tuple[object, ...], ...], str]] = [(slot, (), "") for slot in free[:1]]
        for cell, r in enumerate(s.records):
            if free or r.state != "READY" or r.key == key or (self.has("pins stop eviction") and pinned(s, cell)):
                continue
            family = any(o.state in ("RESERVED", "READY") and o.key == r.key + 1 for o in s.records)
            if self.has("children go first") and (family or key == r.key + 1):
                continue
            broken = "I8" if family else ""
            waits = r._replace(state="QUARANTINED")
            gone: tuple[tuple[object, ...], ...] = (("record", cell, waits), ("record", cell, FREE))
            room.append((r.slot, gone, broken))
        for slot, gone, broken in room:
            if not cells:
                continue
            made = Record("RESERVED", key, number, slot)
            stored = (("record", cells[0], made),)
            order = (*gone, *stored) if self.has("a slot is freed before it is given") else (*stored, *gone)
            t = s._replace(last=number, broken=broken)
            yield f"reserve key {key} as grant {number}", self._give(t, Grant(number, True, cells[0], number, 0), order)

    def _lookup(self, s: State, key: int) -> Iterator[Step]:
        for cell, r in enumerate(s.records):
            if r.state != "READY" or r.key != key:
                continue
            for g in s.grants:
                if not g.writes and g.held and g.epoch == s.epoch and g.generation == r.generation:
                    yield f"lookup key {key} again", s._replace(messages=s.messages | {("answer", g.number)})
                    return
            if self.has("caps") and len(held_cells(s) | {cell}) > self.cap:
                return
            number = s.last + 1
            yield (
                f"lookup key {key} as grant {number}",
                self._give(s._replace(last=number), Grant(number, False, cell, r.generation, s.epoch), ()),
            )

    def _give(self, s: State, grant: Grant, before: tuple[tuple[object, ...], ...]) -> State:
        word, answer = ("grant", grant.number, grant), ("answer", grant.number, None)
        last = (word, answer) if self.has("the grant's word before the answer") else (answer, word)
        return s._replace(stores=(*before, *last))

    # ---- messages

    def _deliver(self, s: State) -> Iterator[Step]:
        for message in sorted(s.messages):
            kind, number = message
            t = s._replace(messages=s.messages - {message})
            if kind == "answer":
                if s.scheduler:
                    yield from self._answered(t, number)
            elif kind == "plan":
                if s.rank == "LIVE":
                    yield self._planned(t, number)
            elif s.server:
                yield f"{kind} of grant {number} arrives", self._word(t, kind, number)
                if again := _spend(s, "network"):
                    yield f"{kind} of grant {number} arrives, to be repeated", self._word(again, kind, number)

    def _answered(self, s: State, number: int) -> Iterator[Step]:
        given = s._replace(handed=s.handed | {number}, messages=s.messages | {("plan", number)})
        lease = any(g.number == number and not g.writes for g in s.grants)
        if lease and self.has("a new epoch after a plan"):
            given = given._replace(epoch=s.epoch + 1)
        if number not in s.handed or not self.has("a new epoch after a plan"):
            yield f"scheduler hands grant {number} to the rank", given
        if number not in s.handed:
            plain = s if self.has("cancel only what no rank got") else given
            mine = plain._replace(handed=s.handed | {number}, epoch=s.epoch + lease)
            yield f"scheduler cancels grant {number}", mine._replace(messages=mine.messages | {("cancel", number)})
        if number in s.handed:
            yield f"scheduler has had grant {number}", s

    def _planned(self, s: State, number: int) -> Step:
        if number in s.refused:
            return f"rank refuses grant {number}", s
        # The plan is what the answer named: that slot, whatever the server knows by now.
        for g in s.grants:
            if g.number == number:
                return f"rank starts grant {number}", self._start_copy(s, g)
        return f"rank starts grant {number}, which no server knows", s._replace(broken="I3")

    def _start_copy(self, s: State, g: Grant) -> State:
        r = s.records[g.cell]
        if r.generation != g.generation:
            return s._replace(broken="I3")  # its slot was given to another grant, or to none, before it was used
        written = _put(s.written, r.slot, 0) if g.writes else s.written
        copy = Copy(g.number, g.writes, r.slot, g.generation, len(s.copies))
        return s._replace(copies=(*s.copies, copy), written=written)

    def _word(self, s: State, kind: str, number: int) -> State:
        g = next((g for g in s.grants if g.number == number), None)
        if g is None:
            return s
        stores: list[tuple[object, ...]] = []
        r = s.records[g.cell]
        mine = r.generation == g.generation
        publishes = mine and (r.state == "RESERVED" if g.open else r.state == "QUARANTINED")
        may = g.open or not self.has("a closed reservation publishes nothing")
        if kind == "commit" and publishes and may:
            stores += self._publication(s, g.cell, r)
        elif g.writes and g.open and mine and r.state == "RESERVED":
            stores.append(("record", g.cell, r._replace(state="QUARANTINED")))
        if kind == "release" and not self.has("a release names its grant"):
            leases = [o for o in s.grants if not o.writes and o.cell == g.cell and o.held]
            g = leases[-1] if leases else g
        return s._replace(stores=(*stores, ("grant", g.number, g._replace(open=False, held=False))))

    def _publication(self, s: State, cell: int, r: Record) -> list[tuple[object, ...]]:
        ready = r._replace(state="READY", committed=True)
        part = r._replace(committed=True)
        if not self.has("the checksum before READY"):
            part = r._replace(state="READY")
        replaces = self.has("a closed reservation publishes nothing")
        old = [
            ("record", c, o._replace(state="QUARANTINED"))
            for c, o in enumerate(s.records)
            if o.state == "READY" and o.key == r.key and c != cell and replaces
        ]
        return [("record", cell, part), ("record", cell, ready), *old]

    # ---- copies, questions, deaths

    def _copying(self, s: State) -> Iterator[Step]:
        for copy in s.copies:
            t = s._replace(copies=tuple(c for c in s.copies if c != copy))
            if copy.writes:
                t = t._replace(written=_put(s.written, copy.slot, copy.generation))
            if s.rank == "LIVE":
                word = ("commit" if copy.writes else "release", copy.grant)
                t = t._replace(messages=t.messages | {word}, refused=t.refused | {copy.grant})
            yield f"copy of grant {copy.grant} ends", t

    def _asking(self, s: State) -> Iterator[Step]:
        if not s.server:
            return
        for g in s.grants:
            if not g.held or not self.has("closed grants are asked about"):
                continue
            known = ("answer", g.number) in s.messages
            if s.scheduler and g.number not in s.handed and not known:
                yield f"scheduler is asked about grant {g.number}, says done", s._replace(handed=s.handed | {g.number})
            asked = not g.open or not s.scheduler or g.number in s.handed
            busy = any(c.grant == g.number for c in s.copies)
            answered = any(n == g.number and k not in ("answer", "plan") for k, n in s.messages)
            if asked and s.rank == "LIVE" and not busy and not answered:
                promise = {g.number} if self.has("done is a promise") else set()
                t = s._replace(messages=s.messages | {("done", g.number)}, refused=s.refused | promise)
                yield f"rank is asked about grant {g.number}, says done", t

    def _dying(self, s: State) -> Iterator[Step]:
        if not s.server:
            return
        if s.rank == "KILLED":
            yield "server sees the rank's lock free", self._close(s._replace(rank="DEAD"))
        settled = not s.copies or not self.has("the dead settle")
        if s.rank == "DEAD" and settled:
            yield "the dead rank has settled", self._gone(s._replace(rank="GONE"))
        if s.rank == "GONE" and any(g.held for g in s.grants) and self.has("the gone are discharged"):
            yield "what the gone rank held ends", self._gone(s)

    def _gone(self, s: State) -> State:
        if not self.has("the gone are discharged"):
            return s
        ends = tuple(("grant", g.number, g._replace(open=False, held=False)) for g in s.grants if g.held)
        return s._replace(stores=(*self._close(s).stores, *ends))

    def _close(self, s: State) -> State:
        """Reservations close; their memory waits for the holders."""
        stores: list[tuple[object, ...]] = []
        for g in s.grants:
            if not (g.writes and g.open):
                continue
            r = s.records[g.cell]
            if r.generation == g.generation and r.state == "RESERVED":
                waits = r._replace(state="QUARANTINED")
                free = FREE if not self.has("memory waits for its holders after a deadline") else waits
                stores.append(("record", g.cell, free))
            stores.append(("grant", g.number, g._replace(open=False)))
        return s._replace(stores=tuple(stores))

    def _faults(self, s: State) -> Iterator[Step]:
        if s.rank == "LIVE" and (t := _spend(s, "rank deaths")):
            plans = frozenset(m for m in s.messages if m[0] != "plan")
            yield "rank SIGKILLed", t._replace(rank="KILLED", messages=plans)
        if s.scheduler and (t := _spend(s, "scheduler deaths")):
            yield "scheduler SIGKILLed", t._replace(scheduler=False)
        for message in sorted(s.messages):
            if t := _spend(s, "network"):
                yield f"{message[0]} of grant {message[1]} is lost", t._replace(messages=s.messages - {message})
        if not s.server:
            return
        if any(g.writes and g.open for g in s.grants) and (t := _spend(s, "deadlines")):
            yield "a deadline passes", self._close(t)
        for cell, r in enumerate(s.records):
            if r.state == "READY" and (t := _spend(s, "deletes")):
                gone = r._replace(state="QUARANTINED") if self.has("delete leaves held memory") else FREE
                yield f"delete of key {r.key}", t._replace(stores=(("record", cell, gone),))
        held = [g for g in s.grants if g.held]
        if held and s.rank == "LIVE" and not self.has("heartbeats discharge nobody") and (t := _spend(s, "misses")):
            t = t._replace(broken="I6", stores=(("grant", held[0].number, held[0]._replace(held=False)),))
            yield "heartbeats are missed", t


def pinned(s: State, cell: int) -> bool:
    return any(g.held and g.cell == cell and g.generation == s.records[cell].generation for g in s.grants)


def held_cells(s: State) -> set[int]:
    return {g.cell for g in s.grants if g.held}


T = TypeVar("T")


def _put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _spend(s: State, what: str) -> State | None:
    at = BUDGETS.index(what)
    return s._replace(left=_put(s.left, at, s.left[at] - 1)) if s.left[at] else None


def _say(store: tuple[object, ...]) -> str:
    kind, where, what = store
    if isinstance(what, Record):
        return f"record {where} is {what.state}" + (f", generation {what.generation}" if what.generation else "")
    if isinstance(what, Grant):
        return f"grant {where} is {'open' if what.open else 'closed'}, {'held' if what.held else 'discharged'}"
    return f"{kind} of grant {where} goes out"
