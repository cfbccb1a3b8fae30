"""Bundles: records with the parts that all writers have of one chunk and group.

A store at some distance takes a round trip for each request, so tiers that gather memory (Gathers) keep bundles where
a namespace has several writers. A bundle is a record whose writer is ALL_WRITERS. It begins with a table, which has
the length and the checksum of each writer's part; the parts follow, in the order of the writers. The checksum of the
record is that of the table.

Where the parts have different lengths, because some could not be packed, or are together longer than a record of the
tier may be, each is a record of its own, and the bundle has nothing but the table. It is stored after them.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kvdock.shm.checksum import checksum
from kvdock.tiers.record import ALL_WRITERS, PartName, Record
from kvdock.tiers.tier import Bounds, Deadline, Gathers, Loaded, Outcome, Tier, ToLoad, ToStore

_ENTRY: Final = struct.Struct("<QQ")  # length and checksum of a writer's part


class _Bundle(NamedTuple):
    """A bundle to load. `wanted`: by writer, the part's index in the batch; `table`: memory for the table."""

    name: PartName
    writers: int
    wanted: dict[int, int]
    table: memoryview


class Bundles:
    """The verbs of a tier on parts. `writers`: returns how many writers a namespace has; 0: that is not known, as where
    no engine is there. Then nothing is stored or loaded."""

    def __init__(self, tier: Tier, writers: Callable[[bytes], int]) -> None:
        self._tier, self._writers = tier, writers
        self._longest = tier.longest_part if isinstance(tier, Bounds) else math.inf

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        """Where several parts of a bundle are named, those that are records of their own are asked for, too: a tier
        counts that as a use, and may have evicted some of them."""
        records = [self._records_of(name) for name in names]
        parts: dict[PartName, list[PartName]] = {}
        for name, (record, *others) in zip(names, records, strict=True):
            if record != name and not others:
                parts.setdefault(record, []).append(name)
        several = {bundle: some for bundle, some in parts.items() if len(some) > 1}
        firsts = [some[0] for some in several.values()]
        has = self._ask([*itertools.chain.from_iterable(records), *firsts], deadline)
        apart = {bundle: some for bundle, some in several.items() if has[some[0]]}
        has |= self._ask([name for some in apart.values() for name in some[1:]], deadline)
        return [
            any(has[record] for record in some) and (some[0] not in apart or has[name])
            for name, some in zip(names, records, strict=True)
        ]

    def _ask(self, records: Iterable[PartName], deadline: Deadline) -> dict[PartName, bool]:
        asked = list(dict.fromkeys(records))
        return dict(zip(asked, self._tier.exists(asked, deadline) if asked else [], strict=True))

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        found = [Loaded(Outcome.LATE)] * len(parts)
        bundles, single = self._sorted([part.name for part in parts])
        apart = [bundle for bundle in bundles if self._is_too_long(bundle, parts)]
        bundles = [bundle for bundle in bundles if bundle not in apart]
        asked = [self._whole(bundle, parts) for bundle in bundles]
        answers = self._tier.load([*asked, *(parts[at] for at in single)], deadline)
        for at, answer in zip(single, answers[len(asked) :], strict=True):
            found[at] = answer
        for bundle, answer in zip(bundles, answers, strict=False):
            for writer, at in bundle.wanted.items():
                found[at] = _of_table(answer, bundle, writer, parts[at].length)
        apart += [
            bundle for bundle, answer in zip(bundles, answers, strict=False) if answer.outcome is Outcome.DAMAGED
        ]
        if apart:
            self._load_apart(apart, parts, found, deadline)
        return found

    def _is_too_long(self, bundle: _Bundle, parts: Sequence[ToLoad]) -> bool:
        length = parts[next(iter(bundle.wanted.values()))].length
        return len(bundle.table) + length * bundle.writers > self._longest

    def _whole(self, bundle: _Bundle, parts: Sequence[ToLoad]) -> ToLoad:
        """The load of a bundle whose parts are all as long as those that are wanted. Parts that are not wanted go to
        memory that is dropped."""
        length = parts[next(iter(bundle.wanted.values()))].length
        others = [
            parts[bundle.wanted[writer]].pages[:length] if writer in bundle.wanted else memoryview(bytearray(length))
            for writer in range(bundle.writers)
        ]
        return ToLoad(bundle.name, len(bundle.table) + length * bundle.writers, bundle.table, others)

    def _load_apart(
        self, bundles: Sequence[_Bundle], parts: Sequence[ToLoad], found: list[Loaded], deadline: Deadline
    ) -> None:
        """Loads the parts of bundles that have nothing but a table. The others are damaged."""
        tables = [ToLoad(bundle.name, len(bundle.table), bundle.table) for bundle in bundles]
        wanted = []
        for bundle, answer in zip(bundles, self._tier.load(tables, deadline), strict=True):
            for writer, at in bundle.wanted.items():
                found[at] = _of_table(answer, bundle, writer, parts[at].length)
                if found[at].outcome is Outcome.DONE:
                    wanted.append(at)
        for at, answer in zip(wanted, self._tier.load([parts[at] for at in wanted], deadline), strict=True):
            found[at] = answer

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        """The parts of all writers of a chunk and group are to be stored together. Raises ValueError if some are
        missing."""
        bundles, single = self._sorted([part.record.name for part in parts])
        first, tables, stores = list(single), list[_Bundle](), list[ToStore]()
        for bundle in bundles:
            some = [parts[bundle.wanted[writer]] for writer in range(bundle.writers) if writer in bundle.wanted]
            if len(some) != bundle.writers:
                raise ValueError(f"found the parts of {len(some)} writers, wanted those of {bundle.writers}")
            entries = b"".join(_ENTRY.pack(part.record.length, part.record.checksum) for part in some)
            bundle.table[:] = entries
            views = [part.pages[: part.record.length] for part in some]
            if len(set(map(len, views))) > 1 or len(entries) + sum(map(len, views)) > self._longest:
                first += bundle.wanted.values()
                tables.append(bundle)
                continue
            record = Record(bundle.name, len(entries) + sum(map(len, views)), checksum(entries))
            stores.append(ToStore(record, bundle.table, views))
        bundled = [bundle for bundle in bundles if bundle not in tables]
        found = [Outcome.LATE] * len(parts)
        answers = self._tier.store([*(parts[at] for at in first), *stores], deadline)
        for at, outcome in zip(first, answers, strict=False):
            found[at] = outcome
        whole = [
            bundle for bundle in tables if all(found[at] is Outcome.DONE for at in bundle.wanted.values())
        ]
        told = self._tier.store(
            [ToStore(Record(bundle.name, len(bundle.table), checksum(bundle.table)), bundle.table) for bundle in whole],
            deadline,
        ) if whole else []
        for bundle, outcome in zip((*bundled, *whole), (*answers[len(first) :], *told), strict=True):
            for at in bundle.wanted.values():
                found[at] = outcome
        return found

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        """Deletes bundles whole, and the parts that are records of their own."""
        records = [self._records_of(name) for name in names]
        asked = list(dict.fromkeys((*itertools.chain.from_iterable(records), *names)))
        outcomes = dict(zip(asked, self._tier.delete(asked, deadline), strict=True))
        return [
            next((outcomes[one] for one in some if outcomes[one] is Outcome.DONE), outcomes[some[0]])
            for some in records
        ]

    def _records_of(self, name: PartName) -> list[PartName]:
        """The names of the records that show whether the part is there: the bundle's, or the part's own; both where it
        is not known which."""
        writers = self._writers(name.namespace)
        bundle = replace(name, writer=ALL_WRITERS)
        return [bundle, name] if not writers else [bundle] if writers > 1 else [name]

    def _sorted(self, names: Sequence[PartName]) -> tuple[list[_Bundle], list[int]]:
        """The bundles of these parts, and the indices of the parts that are in none."""
        bundles: dict[PartName, _Bundle] = {}
        single = []
        for at, name in enumerate(names):
            record, *others = self._records_of(name)
            if record == name or others:
                single.append(at)
                continue
            if record not in bundles:
                writers = self._writers(name.namespace)
                table = memoryview(bytearray(writers * _ENTRY.size))
                bundles[record] = _Bundle(record, writers, {}, table)
            bundles[record].wanted[name.writer] = at
        return list(bundles.values()), single


def _of_table(answer: Loaded, bundle: _Bundle, writer: int, length: int) -> Loaded:
    """What the answer for a bundle says of one writer's part, which is as long as `length`."""
    if answer.outcome is not Outcome.DONE:
        return answer
    if checksum(bundle.table) != answer.checksum:
        return Loaded(Outcome.DAMAGED)
    found, digest = _ENTRY.unpack_from(bundle.table, writer * _ENTRY.size)
    if found != length:
        return Loaded(Outcome.DAMAGED)
    return Loaded(Outcome.DONE, digest, answer.hashed[writer + 1 : writer + 2])


def part_verbs(tier: Tier, writers: Callable[[bytes], int]) -> Tier | Bundles:
    """What stores and loads the parts of chunks in this tier."""
    return Bundles(tier, writers) if isinstance(tier, Gathers) and tier.gathers else tier
