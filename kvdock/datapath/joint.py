"""One copy of the parts of several loads, so that each of its bands has the first layers of all of them.

    handle = copier.scatter(DescribedParts.joined(parts of each load), bands=…)
    shares_of(handle, numbers of parts) ─► for each load, a CopyHandle of its own parts

A share ends when the whole copy ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdock.datapath.copy import CopyHandle, PartResult, StreamHandle


class Share:
    """A load's share of a copy (a CopyHandle): `count` of the `total` parts, from `first` on."""

    def __init__(self, whole: CopyHandle, first: int, count: int, total: int) -> None:
        self.whole = whole
        self._own, self._share = slice(first, first + count), count / total

    def done(self) -> bool:
        return self.whole.done()

    def wait(self, timeout_s: float | None) -> bool:
        return self.whole.wait(timeout_s)

    def result(self) -> list[PartResult]:
        return self.whole.result()[self._own]

    def wrong(self) -> list[int]:
        """Counted from the load's first part."""
        first, end = self._own.start, self._own.stop
        return [at - first for at in self.whole.wrong() if first <= at < end]

    def took_s(self) -> float | None:
        """Its share of the copy's seconds, by the number of its parts."""
        took_s = self.whole.took_s()
        return None if took_s is None else took_s * self._share


class StreamShare(Share):
    """A share of a copy on a GPU (a StreamHandle)."""

    whole: StreamHandle

    def order(self, stream: int, band: int | None = None) -> int:
        return self.whole.order(stream, band)

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        found = self.whole.verified(timeout_s)
        return None if found is None else found[self._own]


def shares_of(whole: CopyHandle, counts: Sequence[int]) -> list[Share]:
    """The shares of loads that have so many parts each, in the order of their parts."""
    of, first, shares = StreamShare if isinstance(whole, StreamHandle) else Share, 0, []
    for count in counts:
        shares.append(of(whole, first, count, sum(counts)))
        first += count
    return shares


def whole_of(handle: CopyHandle) -> CopyHandle:
    """The copy that a handle is of."""
    return handle.whole if isinstance(handle, Share) else handle
