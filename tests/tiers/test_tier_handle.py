"""When a tier is taken as off, and when it is used again: over a tier in memory that does what the test says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from tier_helpers import Part, Parts, eventually
from tier_notes import BareTier

from kvdock.tiers.mover.tier_handle import (
    ENOUGH_BYTES,
    FIRST_RATE,
    FIRST_REST_S,
    LATE_S,
    LONGEST_REST_S,
    MEASURE_S,
    MEASURED_BYTES,
    MOST_FAILURES,
    PROBE_S,
    QUICK_S,
    SURE_S,
    UNRETURNED,
    Speed,
    TierHandle,
)
from kvdock.tiers.notes import Change, Note, raises
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import Deadline, Loaded, Outcome, TierError, ToLoad, ToStore

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(60)]


class Clock:
    """It stands still until the test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class MemoryTier(BareTier):
    """A load takes a second. `outcome`: of all that it is asked for. `hangs`: the verbs that do not return before
    `goes_on` is set."""

    name = "memory"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.outcome, self.hangs, self.goes_on = Outcome.DONE, set[str](), threading.Event()

    def _stands(self, verb: str) -> None:
        if verb in self.hangs:
            assert self.goes_on.wait(30.0)

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        self._stands("exists")
        return [True] * len(names)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        self._stands("load")
        self._clock.now_s += 1.0
        return [Loaded(self.outcome)] * len(parts)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        self._stands("store")
        return [self.outcome] * len(parts)

    def close(self, deadline: Deadline) -> None:
        self.goes_on.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(clock: Clock) -> MemoryTier:
    return MemoryTier(clock)


@pytest.fixture
def handle(tier: MemoryTier, clock: Clock) -> Iterator[TierHandle]:
    made = TierHandle(tier, clock=clock, lost=lambda error: None)
    yield made
    made.close(Deadline(1.0))


@pytest.fixture
def part(parts: Parts) -> Part:
    return parts.make(4096)


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.FAILED])
def test_answers_that_come_too_late_or_fail_take_a_tier_off(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part, outcome: Outcome
) -> None:
    tier.outcome = outcome
    for _ in range(MOST_FAILURES):
        handle.load([part.to_load()], Deadline(1.0)).result(30.0)
    assert handle.breaker.is_open and handle.counters["failures"] == MOST_FAILURES
    tier.outcome = Outcome.DONE
    tried(handle, clock)
    handle.load([part.to_load()], Deadline(1.0)).result(30.0)  # raises TierOff if it is not used again


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.FAILED])
def test_a_tier_whose_stores_fail_is_read_and_tried_with_one_store_now_and_then(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part, outcome: Outcome
) -> None:
    tier.outcome = outcome
    for number in range(MOST_FAILURES):
        assert (handle.stores.state, handle.stores.are_due) == ("open", True), number
        handle.store([part.to_store()], Deadline(1.0))
    assert (handle.stores.state, handle.stores.are_due) == ("read_only", False)
    clock.now_s += FIRST_REST_S
    assert handle.stores.are_due
    handle.store([part.to_store()], Deadline(1.0))
    clock.now_s += FIRST_REST_S
    assert (handle.stores.state, handle.stores.are_due) == ("read_only", False), "the rest doubles"
    assert not handle.breaker.is_open and handle.counters["failures"] == MOST_FAILURES + 1
    tier.outcome = Outcome.DONE
    handle.load([part.to_load()], Deadline(1.0)).result(30.0)
    clock.now_s += FIRST_REST_S
    handle.store([part.to_store()], Deadline(1.0))
    assert (handle.stores.state, handle.stores.are_due) == ("open", True)


class FixedTier(MemoryTier):
    """What it has can be read, and not be changed."""

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        return [Outcome.FAILED] * len(names)

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        raise TierError(self.name, "notes cannot be written: EIO")

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        raise TierError(self.name, "objects cannot be deleted: 500")


@pytest.mark.parametrize("verb", ["delete", "change", "sweep"])
def test_a_tier_in_which_nothing_can_be_changed_is_read(clock: Clock, part: Part, verb: str) -> None:
    handle = TierHandle(FixedTier(clock), clock=clock, lost=lambda error: None)
    calls: dict[str, Callable[[], object]] = {
        "delete": lambda: handle.delete_damaged([part.name]),
        "change": lambda: handle.change(bytes(32), raises(1), Deadline(1.0)),
        "sweep": lambda: handle.sweep(bytes(32), Note.new(1), Deadline(1.0)),
    }
    for _ in range(2 * MOST_FAILURES):
        with suppress(TierError):
            calls[verb]()
    assert not handle.breaker.is_open and handle.counters["failures"] == 2 * MOST_FAILURES
    assert handle.stores.state == "read_only" and handle.stores.error
    assert handle.exists([part.name], Deadline(1.0)) == [True]
    handle.close(Deadline(1.0))


def tried(handle: TierHandle, clock: Clock, rest_s: float = 2 * LONGEST_REST_S) -> None:
    """A probe was made after that rest, and has ended."""
    clock.now_s += rest_s
    handle.probe(may_measure=True)
    probe = handle._probe
    assert probe is not None
    probe.result(30.0)


@pytest.mark.parametrize("verb", ["exists", "load", "store"])
def test_calls_that_do_not_return_take_a_tier_off(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part, verb: str
) -> None:
    tier.hangs = {verb}
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: handle.exists([part.name], Deadline(0.0)),
        "load": lambda: handle.load([part.to_load()], Deadline(0.0)).result(30.0),
        "store": lambda: handle.store([part.to_store()], Deadline(0.0)),
    }

    def call() -> None:
        try:
            calls[verb]()
        except TierError:
            assert verb == "exists"  # which waits no longer

    calling = threading.Thread(target=call)
    calling.start()
    eventually(lambda: bool(handle._late()))
    handle.probe(may_measure=True)
    seen = []
    for _ in range(MOST_FAILURES):
        clock.now_s += 2 * LATE_S
        handle.probe(may_measure=True)
        seen.append(handle.breaker.is_open)
    assert seen == [False] * (MOST_FAILURES - 1) + [True] and handle.breaker.why == UNRETURNED
    tier.goes_on.set()
    calling.join()
    eventually(lambda: not handle._late())
    tried(handle, clock)
    assert not handle.breaker.is_open


class SlowTier(MemoryTier):
    """A verb takes `takes_s` on the clock. What is not done by the deadline is late."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.takes_s = 0.0

    def _in_time(self, deadline: Deadline) -> bool:
        left_s = deadline.left_s
        self._clock.now_s += min(self.takes_s, left_s)
        return self.takes_s <= left_s

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        return [self._in_time(deadline)] * len(names)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        return [Loaded(Outcome.DONE if self._in_time(deadline) else Outcome.LATE)] * len(parts)

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        if not self._in_time(deadline):
            raise TierError(self.name, "it does not answer in time")
        return super().notes(namespaces, deadline)


@pytest.mark.parametrize("verb", ["exists", "load", "notes"])
def test_a_tier_that_is_slow_to_answer_has_not_failed_and_one_that_does_not_answer_has(
    clock: Clock, part: Part, verb: str
) -> None:
    tier = SlowTier(clock)
    handle = TierHandle(tier, clock=clock, lost=lambda error: None)
    calls: dict[str, Callable[[Deadline], object]] = {
        "exists": lambda deadline: handle.exists([part.name], deadline),
        "load": lambda deadline: handle.load([part.to_load()], deadline).result(30.0),
        "notes": lambda deadline: handle.notes([bytes(32)], deadline),
    }

    def is_off() -> bool:
        """After requests that have little time."""
        for _ in range(2 * MOST_FAILURES):
            with suppress(TierError):
                calls[verb](Deadline(SURE_S / 2, clock))
            if handle.breaker.is_open:
                break
            handle.probe(may_measure=False)
            assert handle._probe is not None, "the tier is tried with more time"
            handle._probe.result(30.0)
        return handle.breaker.is_open

    tier.takes_s = 0.8 * SURE_S
    assert not is_off() and handle.counters["failures"] == 0
    tier.takes_s = 2 * PROBE_S
    assert is_off() and handle.counters["failures"] == 1
    handle.close(Deadline(1.0))


def test_a_small_load_shows_no_rate_and_a_large_one_does() -> None:
    speed = Speed()
    for _ in range(100):
        speed.learn(64 << 10, 0.01)
    assert speed.rate == FIRST_RATE and speed.latency_s == pytest.approx(0.01, rel=0.01)
    speed.learn(ENOUGH_BYTES, 0.02)
    assert speed.rate == ENOUGH_BYTES / 0.02
    for _ in range(100):
        speed.learn(64 << 10, 0.01)
    assert speed.rate == ENOUGH_BYTES / 0.02


def test_a_tier_whose_store_does_not_return_stays_off(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part
) -> None:
    tier.hangs = {"store"}
    storing = threading.Thread(target=lambda: handle.store([part.to_store()], Deadline(0.0)))
    storing.start()
    eventually(lambda: bool(handle._late()))
    for _ in range(MOST_FAILURES + 1):
        clock.now_s += 2 * LATE_S
        handle.probe(may_measure=True)
    assert handle.breaker.is_open
    tried(handle, clock)
    was_open = handle.breaker.is_open
    tier.goes_on.set()
    storing.join()
    tried(handle, clock)
    assert (was_open, handle.breaker.is_open) == (True, False)


def test_calls_that_end_late_do_not_keep_a_tier_off(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part
) -> None:
    tier.hangs, tier.outcome = {"load"}, Outcome.LATE
    loads = [handle.load([part.to_load()], Deadline(0.0)) for _ in range(4)]
    eventually(lambda: len(handle._late()) == len(loads))
    handle.probe(may_measure=True)
    clock.now_s += 2 * LATE_S
    handle.probe(may_measure=True)  # all of them are counted
    assert handle.breaker.is_open
    tier.goes_on.set()
    for one in loads:
        one.result(30.0)
    tier.outcome = Outcome.DONE
    tried(handle, clock, FIRST_REST_S)
    assert not handle.breaker.is_open


def test_one_question_that_hangs_behind_others_does_not_take_a_tier_off(
    handle: TierHandle, tier: MemoryTier, part: Part
) -> None:
    """Both threads are busy with what is not late yet."""
    tier.hangs = {"exists"}
    busy = [threading.Thread(target=lambda: handle.exists([part.name], Deadline(30.0))) for _ in range(2)]
    for one in busy:
        one.start()
    for _ in range(MOST_FAILURES):
        with pytest.raises(TierError):
            handle.exists([part.name], Deadline(0.0))
    assert not handle.breaker.is_open and handle.counters["failures"] == 0
    tier.goes_on.set()
    for one in busy:
        one.join()


class TimedTier(MemoryTier):
    """It gives back what was stored. `load_s`: what each load takes on the clock."""

    def __init__(self, clock: Clock, load_s: float) -> None:
        super().__init__(clock)
        self.load_s, self._lock = load_s, threading.Lock()
        self.kept: dict[PartName, ToStore] = {}
        self.loaded_bytes: list[int] = []

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        self.kept |= {part.record.name: part for part in parts}
        return super().store(parts, deadline)

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        for part in parts:
            part.pages[: part.length] = self.kept[part.name].pages[: part.length]
            with self._lock:  # several threads load at a time
                self.loaded_bytes.append(part.length)
                self._clock.now_s += self.load_s
        return [Loaded(Outcome.DONE, self.kept[part.name].record.checksum) for part in parts]


def test_an_idle_tier_is_measured_ever_more_seldom_and_never_without_an_engine(
    handle: TierHandle, tier: MemoryTier, clock: Clock, part: Part
) -> None:
    handle.store([part.to_store()], Deadline(30.0))
    measured_s: list[float] = []

    def measures(*, may_measure: bool) -> bool:
        before = handle._probe
        handle.probe(may_measure=may_measure)
        if handle._probe is before:
            return False
        assert handle._probe is not None
        handle._probe.result(30.0)
        return True

    assert not any(measures(may_measure=False) for _ in range(3))
    for _ in range(5000):
        if measures(may_measure=True):
            measured_s.append(clock.now_s)
        clock.now_s += 1.0
    pauses = [after - before for before, after in itertools.pairwise(measured_s)]
    assert pauses[:6] == [MEASURE_S * 2**at for at in range(1, 7)] and len(pauses) < 10
    assert not any(measures(may_measure=False) for _ in range(3))


@pytest.mark.parametrize(("load_s", "loaded"), [(QUICK_S / 8, 4 + 16), (QUICK_S, 4)])
def test_a_quick_tier_is_measured_with_more_than_a_slow_one(
    clock: Clock, parts: Parts, load_s: float, loaded: int
) -> None:
    tier, size = TimedTier(clock, load_s), MEASURED_BYTES // 4
    handle = TierHandle(tier, clock=clock, lost=lambda error: None)
    try:
        one = parts.make(size)
        pages = [one.to_store().pages for _ in range(20)]
        records = [Record(parts.name(), size, one.record.checksum) for _ in pages]
        handle.store(list(map(ToStore, records, pages)), Deadline(30.0))
        clock.now_s += 2 * MEASURE_S
        handle.probe(may_measure=True)
        assert handle._probe is not None
        handle._probe.result(30.0)
        assert len(tier.loaded_bytes) == loaded
        assert handle.speed.rate == pytest.approx(size / load_s, rel=0.1)
    finally:
        handle.close(Deadline(1.0))
