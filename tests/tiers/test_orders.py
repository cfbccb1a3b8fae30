"""Orders that a tier does not carry out at once: they are tried again, ever more seldom, and hold nothing else up."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from api_helpers import PATIENCE_S, eventually
from tier_notes import BareTier

from kvdock.protocol.mover_schemas import Generation, Order, OrderDone
from kvdock.tiers.mover.agreement import LONGEST_RETRY_S, RETRY_S, Agreement, AgreementObserver
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import (
    Deadline,
    Loaded,
    NotAll,
    NotEverywhere,
    Outcome,
    ReadOnly,
    TierError,
    ToLoad,
    ToStore,
)

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(60)]

AWAY, OTHER = b"\1" * 32, b"\2" * 32


class Reluctant(BareTier):
    """It has nothing, and changes no note of AWAY while `error` is set."""

    name, poll_s = "memory", 0.05

    def __init__(self) -> None:
        super().__init__()
        self.error: TierError | None = TierError(self.name, "a node is away")
        self.tried_s: list[float] = []
        self.read = 0
        self.may_end, self.has_begun = threading.Event(), threading.Event()
        """A change of AWAY waits for the first, and sets the second."""
        self.may_end.set()

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        self.read += len(namespaces) > 1
        return super().notes(namespaces, deadline)

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        if namespace == AWAY and self.notes_kept.get(AWAY) is not None:
            self.tried_s.append(time.monotonic())
            if not self.may_end.is_set():
                self.has_begun.set()
                self.may_end.wait(10.0)
            if self.error is not None:
                raise self.error
        return super().change(namespace, change, deadline)

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        return [False] * len(names)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        return [Loaded(Outcome.MISSING)] * len(parts)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        return [Outcome.FULL] * len(parts)


class Rig:
    def __init__(self, tier: Reluctant) -> None:
        self.tier, self.done = tier, list[OrderDone]()
        self.handle = TierHandle(self.tier, clock=lambda: 0.0, lost=lambda _: None)
        self.agreement = Agreement(
            lambda: [AWAY, OTHER], AgreementObserver(lambda _: None, self.done.append, lambda _: None)
        )
        self.agreement.follow([Generation(one.hex(), 1, 0) for one in (AWAY, OTHER)])
        self.agreement.use(self.handle)

    def agrees(self, *namespaces: bytes) -> None:
        eventually(lambda: all(self.agreement.of(self.handle, one) is not None for one in namespaces))

    def close(self) -> None:
        self.agreement.close()
        self.handle.close(Deadline(1.0))

    def order(self, number: int, namespace: bytes = AWAY) -> None:
        self.agreement.order(Order(
            number=number, namespace=namespace.hex(), tiers=["memory"], least=1, keys=bytes([number]) * 32, groups=1,
            writers=1,
        ))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(Reluctant())
    made.agrees(AWAY, OTHER)
    yield made
    made.close()


def test_an_order_is_tried_again_ever_more_seldom_and_others_go_on(rig: Rig) -> None:
    rig.order(1)
    eventually(lambda: len(rig.tier.tried_s) == 4)
    pauses = [after - before for before, after in itertools.pairwise(rig.tier.tried_s)]
    assert all(pause_s >= RETRY_S * 2**at for at, pause_s in enumerate(pauses))
    assert rig.agreement.why_pending("memory") == "a node is away"
    assert rig.agreement.of(rig.handle, AWAY) is None, "the tier is not used for the namespace"
    read = rig.tier.read
    eventually(lambda: rig.tier.read > read + 3)  # while the order waits for its next try
    assert len(rig.tier.tried_s) == 4
    rig.order(2, OTHER)
    eventually(lambda: [one.number for one in rig.done] == [2])
    rig.tier.error = None
    eventually(lambda: [one.number for one in rig.done] == [2, 1], LONGEST_RETRY_S + 5.0)
    assert rig.agreement.why_pending("memory") == ""


def test_a_tier_is_used_once_a_deletion_holds_there_though_not_everywhere(rig: Rig) -> None:
    rig.tier.error = NotEverywhere("memory", "a deletion is not known yet at b")
    for number in (1, 2):
        rig.order(number)
        eventually(lambda: rig.agreement.why_pending("memory") == "a deletion is not known yet at b")
        eventually(lambda: rig.agreement.of(rig.handle, AWAY) is not None)
    eventually(lambda: len(rig.tier.tried_s) >= 8)
    assert rig.done == [] and rig.handle.counters["failures"] == 0, "a node that is away is no failure of the others"
    rig.tier.error = None
    eventually(lambda: sorted(one.number for one in rig.done) == [1, 2], LONGEST_RETRY_S + PATIENCE_S)


def test_while_a_deletion_waits_for_a_node_notes_are_read_before_it_is_tried_again(rig: Rig) -> None:
    rig.tier.error, rig.tier.poll_s = NotEverywhere("memory", "a deletion is not known yet at b"), 60.0
    rig.order(1)
    eventually(lambda: len(rig.tier.tried_s) == 4)
    read = rig.tier.read
    rig.tier.may_end.clear()
    rig.order(2)
    assert rig.tier.has_begun.wait(5.0) and rig.tier.read > read
    rig.tier.may_end.set()


class Refusing(Reluctant):
    """Nothing in it can be changed, and AWAY has no note."""

    def __init__(self) -> None:
        super().__init__()
        self.notes_kept[OTHER] = Note.new(1)

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        raise ReadOnly(self.name, "the disk is full")


def test_a_namespace_without_a_note_holds_no_other_up_where_nothing_can_be_changed() -> None:
    rig = Rig(Refusing())
    rig.agrees(OTHER)
    assert rig.agreement.of(rig.handle, AWAY) is None and rig.handle.stores.state == "read_only"
    rig.close()


class Partial(Reluctant):
    """It does not know the note of AWAY, or cannot make it."""

    def __init__(self, *, tells: bool) -> None:
        super().__init__()
        self._tells = tells

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        found = super().notes(namespaces, deadline)
        if AWAY in namespaces and not self._tells:
            known = dict(zip(namespaces, found, strict=True))
            del known[AWAY]
            raise NotAll(self.name, "lost", known)
        return found

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        if namespace == AWAY:
            self.tried_s.append(time.monotonic())
            raise TierError(self.name, "it cannot be written: EIO")
        return super().change(namespace, change, deadline)


@pytest.mark.parametrize("tells", [False, True])
def test_a_note_that_is_not_known_or_cannot_be_made_holds_no_other_up(tells: bool) -> None:
    rig = Rig(Partial(tells=tells))
    rig.agrees(OTHER)
    eventually(lambda: not tells or len(rig.tier.tried_s) > 4)
    assert rig.agreement.of(rig.handle, AWAY) is None and not rig.handle.breaker.is_open
    rig.close()
