"""Reads of notes that several threads share, and loads of a tier that wants many at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_helpers import eventually
from tier_helpers import Parts
from tier_notes import BareTier

from kvdock.tiers.mover.note_reads import NoteReads
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.notes import Note, raises
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, Loaded, Outcome, TierError, ToLoad, ToStore

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(60)]

SPACE = bytes(32)
AT_ONCE = 7


class HeldTier(BareTier):
    """`began`: how many reads have begun; each goes on once `goes_on` is set, with the note as it was when it began.
    `fails`: the numbers of those that fail."""

    name = "held"
    loads_at_once = AT_ONCE

    def __init__(self) -> None:
        super().__init__()
        self.began, self.fails, self.goes_on = 0, set[int](), threading.Event()
        self.all_load, self._lock = threading.Barrier(AT_ONCE, timeout=30.0), threading.Lock()

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        found = super().notes(namespaces, deadline)
        with self._lock:
            self.began += 1
            number = self.began
        assert self.goes_on.wait(30.0)
        if number in self.fails:
            raise TierError(self.name, "it fails")
        return found

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        self.all_load.wait()
        return [Loaded(Outcome.DONE)] * len(parts)

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        return [True] * len(names)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        return [Outcome.DONE] * len(parts)

    def close(self, deadline: Deadline) -> None:
        self.goes_on.set()


class Asked:
    """A clock that knows how often it was asked: once for a Deadline, and again by each who waits until then."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> float:
        self.times += 1
        return 0.0


@pytest.fixture
def tier() -> HeldTier:
    return HeldTier()


@pytest.fixture
def handle(tier: HeldTier) -> Iterator[TierHandle]:
    made = TierHandle(tier, clock=lambda: 0.0, lost=lambda error: None)
    yield made
    made.close(Deadline(1.0))


def read_all(tier: HeldTier, handle: TierHandle) -> tuple[list[Note | None], list[Note | None], Note]:
    """What two readers find that have begun before the note changes, what five find that ask after it, while no other
    read can begin, and the note then."""
    reads = NoteReads(handle)
    with ThreadPoolExecutor(7) as threads:
        first = [threads.submit(reads.read, SPACE, Deadline(30.0))]
        eventually(lambda: tier.began == 1)
        first.append(threads.submit(reads.read, SPACE, Deadline(30.0)))
        eventually(lambda: tier.began == 2)
        changed = tier.change(SPACE, raises(3), Deadline(1.0))
        clocks = [Asked() for _ in range(5)]
        later = [threads.submit(reads.read, SPACE, Deadline(30.0, clock)) for clock in clocks]
        eventually(lambda: all(clock.times > 1 for clock in clocks))
        tier.goes_on.set()
        return [one.result(30.0) for one in first], [one.result(30.0) for one in later], changed


def test_readers_that_wait_share_one_read_which_is_not_older_than_their_question(
    tier: HeldTier, handle: TierHandle
) -> None:
    first, later, changed = read_all(tier, handle)
    assert first == [None] * 2 and later == [changed] * 5
    assert tier.began == 3


def test_a_shared_read_that_fails_fails_for_the_one_who_began_it(tier: HeldTier, handle: TierHandle) -> None:
    tier.fails = {3}
    with pytest.raises(TierError, match="it fails"):
        read_all(tier, handle)
    assert tier.began == 3 + 4


def test_as_many_loads_are_in_progress_as_the_tier_wants(tier: HeldTier, handle: TierHandle, parts: Parts) -> None:
    loads = [handle.load([parts.make(100).to_load()], Deadline(30.0)) for _ in range(2 * AT_ONCE)]
    assert [[one.outcome for one in load.result(30.0)] for load in loads] == [[Outcome.DONE]] * 2 * AT_ONCE
