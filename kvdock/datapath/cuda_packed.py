"""Copies on a GPU for a layout whose parts may be packed (docs/understand/packing.md): a call may have parts of both
kinds, and what a store could not pack is copied raw into memory of its own.

A call is one copy of the raw parts and one of the packed parts. A part is packed if its length is that of the shape.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from kvdock import _core
from kvdock.datapath.copy import MOST_RAW_BYTES, DescribedParts, PartCopy, PartResult, ScatterParts
from kvdock.datapath.cuda import CudaCopier, CudaHandle
from kvdock.datapath.errors import CudaError, DatapathError
from kvdock.datapath.layout import PagedLayout


class PackedCudaCopier:
    """A Copier. `raw`, `packed`: copiers of the same layout, which share their staging; `packed` is for parts that are
    `packed_bytes` long."""

    def __init__(self, layout: PagedLayout, raw: CudaCopier, packed: CudaCopier, packed_bytes: int) -> None:
        self._layout, self._raw, self._packed, self._packed_bytes = layout, raw, packed, packed_bytes

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> TwoKinds:
        """Like CudaCopier.gather(). Blocks of parts that do not fit are read once more until the copy is done."""
        divided = self._divide(parts)
        raw, packed = self._submit(divided, lambda copier, some: copier.gather(some, after=after))
        return TwoKinds(
            divided.is_packed, raw, packed,
            lambda results: _RawAgain(self._layout, self._raw, divided.packed, results),
        )

    def scatter(
        self, parts: ScatterParts, *, after: int | None = None, bands: Sequence[int] = (), verified_after: int = 0
    ) -> TwoKinds:
        """Like CudaCopier.scatter()."""
        divided = self._described(parts) if isinstance(parts, DescribedParts) else _Divided[ScatterParts](
            *self._divide(parts)
        )
        raw, packed = self._submit(divided, lambda copier, some: copier.scatter(
            some, after=after, bands=bands, verified_after=verified_after
        ))
        return TwoKinds(divided.is_packed, raw, packed)

    def close(self) -> None:
        """Waits for all copies; closes the copiers beside it, too."""
        self._raw.close()

    def _submit(
        self, divided: _Divided[Parts], copy: Callable[[CudaCopier, Parts], CudaHandle]
    ) -> tuple[CudaHandle | None, CudaHandle | None]:
        """The copies of raw and of packed parts."""
        raw = copy(self._raw, divided.raw) if divided.raw else None
        try:
            return raw, copy(self._packed, divided.packed) if divided.packed else None
        except BaseException:
            if raw is not None:
                raw.wait(None)  # the caller gets no handle to wait for, and may give slots and blocks away
            raise

    def _described(self, parts: DescribedParts) -> _Divided[ScatterParts]:
        """Nearly always all parts are of one kind: then no object for each part is made."""
        is_packed = [length == self._packed_bytes for length in parts.lengths]
        if all(is_packed):
            return _Divided(is_packed, [], parts)
        if not any(is_packed):
            return _Divided(is_packed, parts, [])
        raw, packed = self._divide(parts.copies())[1:]
        return _Divided(is_packed, raw, packed)

    def _divide(self, parts: Sequence[PartCopy]) -> _Divided[Sequence[PartCopy]]:
        is_packed = [part.length == self._packed_bytes for part in parts]
        return _Divided(
            is_packed,
            [part for part, kind in zip(parts, is_packed, strict=True) if not kind],
            [part for part, kind in zip(parts, is_packed, strict=True) if kind],
        )


Parts = TypeVar("Parts", ScatterParts, Sequence[PartCopy])


class _Divided(NamedTuple, Generic[Parts]):
    is_packed: list[bool]
    raw: Parts
    packed: Parts


class TwoKinds:
    """A copy of raw and of packed parts (a StreamHandle). `again`: called with the results of packed parts once they
    have been copied; it copies those that did not fit."""

    def __init__(
        self, is_packed: Sequence[bool], raw: CudaHandle | None, packed: CudaHandle | None,
        again: Callable[[Sequence[PartResult]], _RawAgain] | None = None,
    ) -> None:
        self._is_packed, self._raw, self._packed, self._again = is_packed, raw, packed, again
        self._rest: _RawAgain | None = None

    @property
    def _handles(self) -> list[CudaHandle]:
        return [handle for handle in (self._raw, self._packed) if handle is not None]

    def done(self) -> bool:
        if not all(handle.done() for handle in self._handles):
            return False
        rest = self._begin_rest()
        return rest is None or rest.done()

    def wait(self, timeout_s: float | None) -> bool:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if until_s is None else max(0.0, until_s - time.monotonic())

        if not all(handle.wait(left_s()) for handle in self._handles):
            return False
        rest = self._begin_rest()
        return rest is None or rest.wait(left_s())

    def order(self, stream: int, band: int | None = None) -> int:
        """As CudaHandle.order(). Work that is ordered after a store may overwrite its blocks, so parts that do not fit
        are not copied raw from then on."""
        self._again = None if self._rest is None else self._again
        return min([handle.order(stream, band) for handle in self._handles], default=band or 0)

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        found = [None if handle is None else handle.verified(timeout_s) for handle in (self._raw, self._packed)]
        if any(one is None for one, handle in zip(found, (self._raw, self._packed), strict=True) if handle is not None):
            return None
        return self._merged(found[0] or [], self._with_fits(found[1] or []))

    def result(self) -> list[PartResult]:
        """As CudaHandle.result()."""
        self.wait(None)
        packed = self._packed_results() if self._rest is None else self._rest.results()
        return self._merged([] if self._raw is None else self._raw.result(), packed)

    def wrong(self) -> list[int]:
        """As CudaHandle.wrong()."""
        fits = self._packed is None or all(self._packed.fit())
        if fits and not any(handle.wrong() for handle in self._handles):
            return []
        return [at for at, result in enumerate(self.result()) if not result.ok]

    def took_s(self) -> float | None:
        if not self.done():
            return None
        took = [handle.took_s() for handle in self._handles]
        # Both count from the end of the same work, and the copies take turns: the later end is that of the call.
        return None if None in took else max((one for one in took if one is not None), default=None)

    def _begin_rest(self) -> _RawAgain | None:
        """Both copies have ended. The error of a failed copy is left to result(): waiting raises none. Parts for which
        there is no memory stay without raw bytes."""
        again, self._again = self._again, None
        if again is not None and self._packed is not None:
            with suppress(CudaError, DatapathError):
                if not all(self._packed.fit()):
                    self._rest = again(self._packed_results())
        return self._rest

    def _packed_results(self) -> list[PartResult]:
        return [] if self._packed is None else self._with_fits(self._packed.result())

    def _with_fits(self, results: Sequence[PartResult]) -> list[PartResult]:
        return [] if self._packed is None else [
            result if fits else PartResult(result.checksum, False, fits=False)
            for result, fits in zip(results, self._packed.fit(), strict=True)
        ]

    def _merged(self, raw: Sequence[PartResult], packed: Sequence[PartResult]) -> list[PartResult]:
        of_kind = {False: iter(raw), True: iter(packed)}
        return [next(of_kind[kind]) for kind in self._is_packed]


class _RawAgain:
    """The parts of a store that did not fit, copied into page-locked memory of their own, up to MOST_RAW_BYTES."""

    def __init__(
        self, layout: PagedLayout, copier: CudaCopier, parts: Sequence[PartCopy], results: Sequence[PartResult]
    ) -> None:
        self._results = list(results)
        self._memory: dict[int, _core.CudaBuffer] = {}
        """By the index of the part."""
        copies, left_bytes = [], MOST_RAW_BYTES
        for at, part in enumerate(parts):
            size = layout.part_bytes(len(part.block_ids))
            if results[at].fits or size > left_bytes:
                continue
            left_bytes -= size
            self._memory[at] = _core.CudaBuffer(device=copier.device, bytes=size, host=True)
            copies.append(replace(part, slot=self._memory[at].address, length=None))
        self._copied = copier.gather(copies) if copies else None

    def done(self) -> bool:
        return self._copied is None or self._copied.done()

    def wait(self, timeout_s: float | None) -> bool:
        return self._copied is None or self._copied.wait(timeout_s)

    def results(self) -> list[PartResult]:
        """Those of all packed parts. Waits for the end."""
        if self._copied is not None:
            for (at, memory), found in zip(self._memory.items(), self._copied.result(), strict=True):
                raw = memoryview(bytearray(ctypes.string_at(memory.address, memory.bytes)))
                self._results[at] = PartResult(found.checksum, True, fits=False, raw=raw)
            self._copied = None
            self._memory.clear()
        return self._results
