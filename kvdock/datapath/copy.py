"""Copies between an engine's paged KV and slots: the interface of copiers, and the copier that uses the CPU.

    Copier.gather(parts)    paged KV → slots; the results hold each part's checksum
    Copier.scatter(parts)   slots → paged KV; the results say whether each part has the expected checksum

Both return at once with a CopyHandle. Handles of one copier end in the order of submission. The slot and
the blocks of a part belong to the copy until its handle is done.

Invariants: all arguments of a call are checked before any byte is copied; a block that is skipped is hashed
but never written; a result is ok only when the bytes that were copied have the expected checksum. CudaCopier
is in cuda.py; devices.py chooses between the two.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvdock import _core
from kvdock.datapath.errors import CopierClosed, copy_error
from kvdock.datapath.layout import PagedLayout
from kvdock.datapath.threads import Pool
from kvdock.shm.checksum import ensure_keys


@runtime_checkable
class IntegerArray(Protocol):
    """A one-dimensional numpy array or torch tensor of integers."""

    def tolist(self) -> list[int]:
        """The integers as a list."""
    def __len__(self) -> int: ...


BlockIds: TypeAlias = Sequence[int] | IntegerArray


@dataclass(frozen=True)
class PartCopy:
    """One part: `block_ids[i]` is the engine's block that holds the part's i-th block of tokens."""

    slot: int
    """The address of the slot in this process, a multiple of 16."""
    block_ids: BlockIds
    skip_blocks: int = 0
    """Scatter only: the number of leading blocks that are hashed but never written."""
    checksum: int | None = None
    """The expected checksum. A scatter requires it; a gather compares its own with it, if it is given."""
    length: int | None = None
    """The bytes of the slot: those of a raw part (None) or of a packed one."""


@dataclass(frozen=True)
class DescribedParts:
    """Parts of a scatter as the native core describes them, which have equally many blocks: the fields of PackedParts,
    and for each part `checksums` (uint64 [n]) and `lengths` (int64 [n]), as in PartCopy."""

    slots: memoryview[int]
    block_ids: memoryview[int]
    starts: memoryview[int]
    skips: memoryview[int]
    checksums: memoryview[int]
    lengths: memoryview[int]

    @classmethod
    def of(
        cls, slots: bytes, block_ids: bytes, starts: bytes, skips: bytes, checksums: bytes, lengths: bytes
    ) -> DescribedParts:
        """From bytes of 8-byte integers."""
        ids, first, skipped, bytes_of = (memoryview(one).cast("q") for one in (block_ids, starts, skips, lengths))
        return cls(memoryview(slots).cast("Q"), ids, first, skipped, memoryview(checksums).cast("Q"), bytes_of)

    @classmethod
    def joined(cls, some: Sequence[DescribedParts]) -> DescribedParts:
        """The parts of each, one after the other. Those of all have equally many blocks."""
        slots, ids, skips, checksums, lengths = map(b"".join, zip(
            *((one.slots, one.block_ids, one.skips, one.checksums, one.lengths) for one in some), strict=True
        ))
        each = some[0].starts[1]
        starts = array("q", range(0, each * sum(map(len, some)) + 1, each))
        return cls.of(slots, ids, starts.tobytes(), skips, checksums, lengths)

    def __len__(self) -> int:
        return len(self.slots)

    def copies(self) -> list[PartCopy]:
        """The same parts one by one."""
        ends = zip(self.starts, self.starts[1:], strict=False)
        return [
            PartCopy(slot, self.block_ids[start:end].tolist(), skip, checksum, length)
            for slot, (start, end), skip, checksum, length in zip(
                self.slots, ends, self.skips, self.checksums, self.lengths, strict=True
            )
        ]


ScatterParts: TypeAlias = Sequence[PartCopy] | DescribedParts


@dataclass(frozen=True)
class PartResult:
    """What became of one part. `ok`: its bytes have the expected checksum, or none was expected."""

    checksum: int
    """The checksum of the slot's bytes."""
    ok: bool
    fits: bool = True
    """False: a gather could not pack the part into its slot, whose bytes are of no use."""
    raw: memoryview | None = None
    """The raw bytes of a part that does not fit, as its blocks had them during the gather: they may change once it has
    ended. `checksum` is theirs. None: it fits, or the call has more than MOST_RAW_BYTES of these."""


MOST_RAW_BYTES = 256 << 20
"""The most that parts of one call that do not fit may have."""


class CopyHandle(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether the copy has ended."""

    def wait(self, timeout_s: float | None) -> bool:
        """True once the copy has ended, False on timeout. `timeout_s` None: no timeout."""

    def result(self) -> list[PartResult]:
        """Waits for the end of the copy. Returns one result for each part, in order. Raises the copy's error."""

    def wrong(self) -> list[int]:
        """Like result(), but returns only the indices of the parts that are not ok: no object for each part."""

    def took_s(self) -> float | None:
        """Seconds from the call to the end of the copy; if it had to wait for work on the stream `after`, from the end
        of that work. None: not known, or the copy has not ended."""


@runtime_checkable
class StreamHandle(CopyHandle, Protocol):
    """A copy that streams can wait for, and that may be verified before it ends: CudaHandle."""

    def order(self, stream: int, band: int | None = None) -> int:
        """Work put on `stream` (a CUstream as an integer) from now on starts after the copy, or after its bands
        up to `band`. Returns the last band that it starts after, because a copier may join small bands."""

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        """Waits until the bytes of all parts have been hashed, in the slots while they are still being copied. One
        result for each part, in order; None on timeout."""


class Copier(Protocol):
    """Copies parts between slots and the blocks of one layout.

    `after`: a stream of the blocks' device: the copy starts after the work that is on it now. None: it waits for no
    stream.
    """

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        """Paged blocks to slots: a store. Raises CopyError for arguments that are wrong, CopierClosed after close()."""

    def scatter(self, parts: ScatterParts, *, after: int | None = None) -> CopyHandle:
        """Slots to paged blocks: a load. Raises CopyError for arguments that are wrong, CopierClosed after close()."""

    def close(self) -> None:
        """Waits for the copies that were submitted; later submissions raise CopierClosed."""


class PackedParts(NamedTuple):
    """Parts as the native core takes them. Part i has blocks block_ids[starts[i]:starts[i + 1]]."""

    slots: array[int] | memoryview[int]
    """uint64 [n], addresses."""
    block_ids: array[int] | memoryview[int]
    """int64, the ids of all parts one after the other; `starts`: int64 [n + 1]; `skips`: int64 [n]."""
    starts: array[int] | memoryview[int]
    skips: array[int] | memoryview[int]


def packed_for_gather(layout: PagedLayout, parts: Sequence[PartCopy]) -> PackedParts:
    """The parts for a gather. Raises CopyError for a part with skip_blocks, or for values that do not fit 64-bit
    integers."""
    packed = _packed(layout, parts)
    if any(packed.skips):
        index = next(index for index, skip in enumerate(packed.skips) if skip)
        raise copy_error(f"part {index}: skip_blocks of a gather", found=packed.skips[index], wanted=0)
    return packed


def packed_for_scatter(layout: PagedLayout, parts: ScatterParts) -> PackedParts:
    """The parts for a scatter. Raises CopyError for one without an expected checksum, or for values that exceed 64
    bits."""
    if isinstance(parts, DescribedParts):
        ensure_keys(layout.part_bytes(parts.starts[1] if len(parts) else 0))
        return PackedParts(parts.slots, parts.block_ids, parts.starts, parts.skips)
    if None in (part.checksum for part in parts):
        index = next(index for index, part in enumerate(parts) if part.checksum is None)
        raise copy_error(f"part {index}: checksum", found=None, wanted="the expected value")
    return _packed(layout, parts)


def _packed(layout: PagedLayout, parts: Sequence[PartCopy]) -> PackedParts:
    """Also makes checksum keys for the longest part. The engine's thread waits for this: about a microsecond for each
    part."""
    slots, ids, starts, skips = array("Q"), array("q"), array("q", [0]), array("q")
    longest = end = 0
    try:
        for part in parts:
            blocks = part.block_ids
            ids.extend(blocks if type(blocks) is list or type(blocks) is tuple else _listed(blocks))
            slots.append(part.slot)
            skips.append(part.skip_blocks)
            start, end = end, len(ids)
            longest = max(longest, end - start)
            starts.append(end)
    except (OverflowError, TypeError) as error:
        raise copy_error(f"part {len(starts) - 1}", found=str(error), wanted="64-bit integers") from error
    ensure_keys(layout.part_bytes(longest))
    return PackedParts(slots, ids, starts, skips)


def _listed(blocks: BlockIds) -> Sequence[int]:
    return blocks.tolist() if isinstance(blocks, IntegerArray) else blocks


def results_of(found: Sequence[int | None], parts: ScatterParts) -> list[PartResult]:
    """One result for each part, from the checksums that its copy found. None: the slot holds no packed part."""
    expected = parts.checksums if isinstance(parts, DescribedParts) else [part.checksum for part in parts]
    return [
        PartResult(0, False, fits=False) if sum_ is None else PartResult(sum_, wanted is None or sum_ == wanted)
        for sum_, wanted in zip(found, expected, strict=True)
    ]


def wrong_of(found: Sequence[int | None], parts: ScatterParts) -> list[int]:
    """The indices of the parts that are not ok; see results_of."""
    if isinstance(parts, DescribedParts) and parts.checksums.tolist() == found:
        return []
    return [at for at, result in enumerate(results_of(found, parts)) if not result.ok]


class _CpuHandle:
    def __init__(self, submit: Callable[[Callable[[], list[PartResult]]], Future[list[PartResult]]],
                 copy: Callable[[], list[PartResult]]) -> None:
        self._began_s, self._ended_s = time.perf_counter(), 0.0

        def timed() -> list[PartResult]:
            try:
                return copy()
            finally:
                self._ended_s = time.perf_counter()

        self._copied = submit(timed)

    def done(self) -> bool:
        return self._copied.done()

    def wait(self, timeout_s: float | None) -> bool:
        try:
            self._copied.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def result(self) -> list[PartResult]:
        return self._copied.result()

    def wrong(self) -> list[int]:
        return [at for at, result in enumerate(self.result()) if not result.ok]

    def took_s(self) -> float | None:
        return self._ended_s - self._began_s if self.done() else None


def _refuse_stream(after: int | None) -> None:
    if after is not None:
        raise copy_error("after", found=after, wanted="None: copies with the CPU have no streams")


class CpuCopier:
    """Copies with the CPU: one background thread makes the copies one after another, each with up to `threads`
    threads. `packing`: the shape of packed parts; None: all parts are raw."""

    def __init__(self, layout: PagedLayout, *, threads: int, packing: _core.PackedShape | None = None) -> None:
        if threads < 1:
            raise copy_error("threads", found=threads, wanted="at least 1")
        self._layout, self._threads, self._packing = layout, threads, packing
        if packing is not None:
            ensure_keys(packing.packed_bytes)
        self._thread = Pool(1, "kvdock-copier")

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        """Raises CopyError for a part with skip_blocks (a gather has nothing to skip), and for a stream."""
        _refuse_stream(after)
        core, threads, shape = self._layout.core, self._threads, self._packing

        def plain(some: Sequence[PartCopy]) -> Callable[[], Sequence[int | None]]:
            slots, ids, starts, _ = packed_for_gather(self._layout, some)
            return lambda: _core.gather(core, slots, ids, starts, threads=threads)

        def pack(some: Sequence[PartCopy]) -> Callable[[], Sequence[int | None]]:
            slots, ids, starts, _ = packed_for_gather(self._layout, some)
            assert shape is not None
            return lambda: _core.gather_packed(core, shape, slots, ids, starts, threads=threads)

        return self._submit(parts, plain, pack)

    def scatter(self, parts: ScatterParts, *, after: int | None = None) -> CopyHandle:
        """Raises CopyError for a part without its expected checksum, and for a stream."""
        _refuse_stream(after)
        core, threads, shape = self._layout.core, self._threads, self._packing

        def plain(some: ScatterParts) -> Callable[[], Sequence[int | None]]:
            described = packed_for_scatter(self._layout, some)
            return lambda: _core.scatter(core, *described, threads=threads)

        def unpack(some: Sequence[PartCopy]) -> Callable[[], Sequence[int | None]]:
            described = packed_for_scatter(self._layout, some)
            expected = array("Q", [part.checksum or 0 for part in some])
            assert shape is not None
            return lambda: _core.scatter_packed(core, shape, *described, expected, threads=threads)

        if not isinstance(parts, DescribedParts):
            return self._submit(parts, plain, unpack)
        if shape is not None:
            return self._submit(parts.copies(), plain, unpack)
        work = plain(parts)
        return self._begin(lambda: results_of(work(), parts))

    def close(self) -> None:
        """Waits for the copies that were submitted."""
        self._thread.shutdown(wait=True)

    def _submit(self, parts: Sequence[PartCopy], of_raw: _Prepare, of_packed: _Prepare) -> CopyHandle:
        """Prepares the copies of raw and of packed parts, and makes them one after the other."""
        packed_bytes = self._packing.packed_bytes if self._packing is not None else 0
        is_packed = [part.length == packed_bytes for part in parts]
        raw = [part for part, kind in zip(parts, is_packed, strict=True) if not kind]
        packed = [part for part, kind in zip(parts, is_packed, strict=True) if kind]
        work_raw = of_raw(raw)
        work_packed = of_packed(packed) if packed else None

        def copy() -> list[PartResult]:
            results = {False: iter(results_of(work_raw(), raw))}
            if work_packed is not None:
                results[True] = iter(self._with_raw(results_of(work_packed(), packed), packed))
            return [next(results[kind]) for kind in is_packed]

        return self._begin(copy)

    def _begin(self, copy: Callable[[], list[PartResult]]) -> CopyHandle:
        try:
            return _CpuHandle(self._thread.submit, copy)
        except RuntimeError as error:
            raise CopierClosed("copier", found="closed", wanted="open") from error


    def _with_raw(self, results: list[PartResult], parts: Sequence[PartCopy]) -> list[PartResult]:
        """Copies the parts of a gather that do not fit into memory of their own."""
        left_bytes = MOST_RAW_BYTES
        for at, part in enumerate(parts):
            size = self._layout.part_bytes(len(part.block_ids))
            if results[at].fits or part.checksum is not None or size > left_bytes:
                continue
            left_bytes -= size
            own = mmap.mmap(-1, size)
            raw = replace(part, slot=ctypes.addressof(ctypes.c_char.from_buffer(own)), length=None)
            slots, ids, starts, _ = packed_for_gather(self._layout, [raw])
            (found,) = _core.gather(self._layout.core, slots, ids, starts, threads=self._threads)
            results[at] = PartResult(found, True, fits=False, raw=memoryview(own))
        return results


_Prepare: TypeAlias = Callable[[Sequence[PartCopy]], Callable[[], Sequence[int | None]]]
"""Checks parts, and returns what copies them: it returns what results_of() takes."""
