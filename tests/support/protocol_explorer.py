"""Visits every state of a protocol model, breadth first: the first broken invariant has a shortest trace.

The invariants are those of docs/understand/lifetime_protocol.md, by their numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from protocol_model import Model, State, held_cells


class Found(NamedTuple):
    states: int
    invariant: str = ""
    trace: tuple[str, ...] = ()


def one_owner(model: Model, s: State) -> bool:
    slots = [r.slot for r in s.records if r.state != "FREE"]
    return len(slots) == len(set(slots))


def pinned_is_not_free(model: Model, s: State) -> bool:
    return all(
        s.records[g.cell].state != "FREE" and s.records[g.cell].generation == g.generation for g in s.grants if g.held
    )


def copies_touch_their_own(model: Model, s: State) -> bool:
    owner = {r.slot: r.generation for r in s.records if r.state != "FREE"}
    return s.broken != "I3" and all(owner.get(c.slot, c.generation) == c.generation for c in s.copies)


def ready_is_whole(model: Model, s: State) -> bool:
    return all(r.committed and s.written[r.slot] == r.generation for r in s.records if r.state == "READY")


def one_record_a_key(model: Model, s: State) -> bool:
    if s.stores or not s.server:
        return True  # a replacement cut short has two; the next server settles it before it answers anybody
    return max(Counter((r.key, r.state) for r in s.records if r.state in ("RESERVED", "READY")).values(), default=0) < 2


def only_evidence_discharges(model: Model, s: State) -> bool:
    return s.broken != "I6"


def caps_hold(model: Model, s: State) -> bool:
    return len(held_cells(s)) <= model.cap


def children_went_first(model: Model, s: State) -> bool:
    return s.broken != "I8"


def _rests(model: Model, s: State) -> bool:
    return s.server and not s.stores and next(model.progress(s), None) is None


def nothing_is_left_of_the_gone(model: Model, s: State) -> bool:
    if s.scheduler or s.rank != "GONE" or not _rests(model, s):
        return True
    return not any(g.held for g in s.grants) and all(r.state in ("FREE", "READY") for r in s.records)


def closed_grants_are_discharged(model: Model, s: State) -> bool:
    if s.rank != "LIVE" or not any(g.held and not g.open for g in s.grants):
        return True
    return not _rests(model, s)


INVARIANTS: dict[str, Callable[[Model, State], bool]] = {
    "I1": one_owner,
    "I2": pinned_is_not_free,
    "I3": copies_touch_their_own,
    "I4": ready_is_whole,
    "I5": one_record_a_key,
    "I6": only_evidence_discharges,
    "I7": caps_hold,
    "I8": children_went_first,
    "L1": nothing_is_left_of_the_gone,
    "L2": closed_grants_are_discharged,
}


def explore(model: Model, invariants: tuple[str, ...] = tuple(INVARIANTS), limit: int = 3_000_000) -> Found:
    """All states within the model's bounds, or those before the first that breaks one of `invariants`."""
    first = model.start()
    came: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        for name in invariants:
            if not INVARIANTS[name](model, state):
                return Found(len(came), name, _trace(came, state))
        for what, after in model.steps(state):
            if after not in came:
                came[after] = (state, what)
                queue.append(after)
        if len(came) > limit:
            raise AssertionError(f"more than {limit} states: the bounds are too wide")
    return Found(len(came))


def _trace(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came[state]) is not None:
        state, what = before
        steps.append(what)
    return tuple(reversed(steps))
