"""What tests of tiers share: page-aligned shared memory, parts with known bytes, loads that say what came."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import Final, NamedTuple

from kvdock.shm.checksum import checksum
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import PAGE_BYTES, Deadline, Loaded, Outcome, Tier, TierError, ToLoad, ToStore

KIB: Final = 1 << 10
MIB: Final = 1 << 20
POISON: Final = 0xA5
GUARD: Final = bytes([POISON]) * PAGE_BYTES
PATIENCE_S: Final = 60.0
"""Longer than anything takes that works, on a busy machine."""


class Arena:
    """One piece of shared memory that each test cuts into pages, as tiers find them in the pool. Safe for threads."""

    def __init__(self, size_bytes: int) -> None:
        self.memory: Final = mmap.mmap(-1, size_bytes)  # a tier may register all of it
        self._view, self._next, self._lock = memoryview(self.memory), 0, threading.Lock()
        self._guards: list[int] = []

    def pages(self, length: int, fill: int = POISON) -> memoryview:
        """Writable, page-aligned, rounded up to whole pages, every byte `fill`; a page of POISON lies behind it."""
        rounded = -(-length // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            begin, self._next = self._next, self._next + rounded + PAGE_BYTES
            assert self._next <= len(self._view), "a test wants more memory than the arena has"
            self._guards.append(begin + rounded)
        pages = self._view[begin : begin + rounded]
        pages[:] = bytes([fill]) * rounded
        self._view[begin + rounded : begin + rounded + PAGE_BYTES] = GUARD
        return pages

    def guards_are_whole(self) -> bool:
        """Whether nothing was written after the pages that were given out."""
        return all(self._view[begin : begin + PAGE_BYTES] == GUARD for begin in self._guards)

    def reset(self) -> None:
        """Gives all of it out again."""
        self._next = 0
        self._guards.clear()


ARENA: Final = Arena(512 * MIB)
"""Pages cost memory once they are touched."""


@dataclass(frozen=True)
class Part:
    """A part that a test stores: what it is and its bytes."""

    record: Record
    data: bytes

    @property
    def name(self) -> PartName:
        return self.record.name

    def to_store(self) -> ToStore:
        """Its bytes in pages of the arena."""
        pages = ARENA.pages(len(self.data))
        pages[: len(self.data)] = self.data
        return ToStore(self.record, pages)

    def to_load(self) -> ToLoad:
        return ToLoad(self.name, self.record.length, ARENA.pages(self.record.length))


class Parts:
    """Makes parts whose names no other test uses; `seed` decides on all bytes."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.namespace = self._random.randbytes(32)

    def name(self, group: int = 0, writer: int = 0) -> PartName:
        return PartName(self.namespace, self._random.randbytes(32), group, writer)

    def make(self, length: int, name: PartName | None = None) -> Part:
        data = shake_128(self._random.randbytes(16)).digest(length)
        return Part(Record(name or self.name(), length, checksum(data)), data)

    def many(self, count: int, length: int) -> list[Part]:
        return [self.make(length) for _ in range(count)]


class Got(NamedTuple):
    """What a load answered for one part, and what lay in the pages then."""

    answer: Loaded
    data: bytes

    @property
    def is_accepted(self) -> bool:
        """Whether the mover would take the bytes: it compares their checksum, which may be the tier's own."""
        found = self.answer.hashed[0] if self.answer.hashed else checksum(self.data)
        return self.answer.outcome is Outcome.DONE and found == self.answer.checksum


def patient() -> Deadline:
    return Deadline(PATIENCE_S)


def store(tier: Tier, parts: Sequence[Part], deadline: Deadline | None = None) -> list[Outcome]:
    outcomes = tier.store([part.to_store() for part in parts], deadline or patient())
    assert len(outcomes) == len(parts)
    return outcomes


def store_all(tier: Tier, parts: Sequence[Part]) -> None:
    assert store(tier, parts) == [Outcome.DONE] * len(parts)


def load(tier: Tier, parts: Sequence[Part], deadline: Deadline | None = None) -> list[Got]:
    wanted = [part.to_load() for part in parts]
    answers = tier.load(wanted, deadline or patient())
    assert len(answers) == len(parts)
    assert ARENA.guards_are_whole(), "a load has written behind its pages"
    found = [Got(answer, bytes(one.pages[: one.length])) for answer, one in zip(answers, wanted, strict=True)]
    for got in found:
        assert got.answer.hashed in ((), (checksum(got.data),)), "the tier's checksum is not that of the bytes"
    return found


def outcomes_of(tier: Tier, parts: Sequence[Part]) -> list[Outcome]:
    return [got.answer.outcome for got in load(tier, parts)]


def assert_loads(tier: Tier, parts: Sequence[Part]) -> None:
    """Bit for bit, with the checksums they were stored with."""
    for part, got in zip(parts, load(tier, parts), strict=True):
        assert got.answer[:2] == (Outcome.DONE, part.record.checksum), f"{got.answer} of {part.name.text()}"
        assert got.data == part.data


def assert_never_wrong(parts: Sequence[Part], found: Sequence[Got]) -> None:
    """What the mover would accept is what was stored."""
    for part, got in zip(parts, found, strict=True):
        assert not got.is_accepted or got.data == part.data


class LooksBeforeItEnds:
    """A clock for a Deadline of some seconds: it stands still for `looks` looks, then the deadline is over."""

    def __init__(self, looks: int) -> None:
        self._looks = looks + 1  # the first one is the Deadline's own

    def __call__(self) -> float:
        self._looks -= 1
        return 0.0 if self._looks >= 0 else 1e9


def works(call: Callable[[], object]) -> bool:
    """Whether it went without a TierError."""
    try:
        call()
    except TierError:
        return False
    return True


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.02)  # between two looks
