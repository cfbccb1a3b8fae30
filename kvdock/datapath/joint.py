"""One copy of the parts of several loads, whose bands have the same layers of all of them.

    handle = copier.scatter(DescribedParts.joined(parts of each load), bands=…)
    shares_of(handle, numbers of parts) ─► for each load, a CopyHandle of its own parts

A share ends when the whole copy ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvdock.datapath.copy import CopyHandle, PartResult


class Joint:
    """The whole copy. All shares find out at once which of its parts are wrong."""

    def __init__(self, handle: CopyHandle, count: int) -> None:
        self.handle, self.count = handle, count

    @cached_property
    def wrong(self) -> list[int]:
        return self.handle.wrong()


class Share:
    """A load's share of a copy (a CopyHandle): `count` of its parts, from `first` on."""

    def __init__(self, joint: Joint, first: int, count: int) -> None:
        self._joint, self._own = joint, slice(first, first + count)
        self.whole = joint.handle

    def done(self) -> bool:
        return self.whole.done()

    def wait(self, timeout_s: float | None) -> bool:
        return self.whole.wait(timeout_s)

    def result(self) -> list[PartResult]:
        return self.whole.result()[self._own]

    def wrong(self) -> list[int]:
        """Counted from the load's first part."""
        first, end = self._own.start, self._own.stop
        return [at - first for at in self._joint.wrong if first <= at < end]

    def took_s(self) -> float | None:
        """Its share of the copy's seconds, by the number of its parts."""
        took_s, own = self.whole.took_s(), self._own.stop - self._own.start
        return None if took_s is None else took_s * own / self._joint.count


def shares_of(handle: CopyHandle, counts: Sequence[int]) -> list[Share]:
    """One share for each load. `counts`: how many parts each load has; the copy has the parts in the same order."""
    joint, first, shares = Joint(handle, sum(counts)), 0, []
    for count in counts:
        shares.append(Share(joint, first, count))
        first += count
    return shares


def whole_of(handle: CopyHandle) -> CopyHandle:
    """The whole copy, if the handle is a share."""
    return handle.whole if isinstance(handle, Share) else handle
