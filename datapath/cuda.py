"""Copies on a GPU: the copier of copy.py, with the engine's streams ordered around it.

    copier.scatter(parts, after=stream) ─► handle     only enqueues; `after`'s work so far comes first
    handle.order(stream)                              `stream`'s later work comes after the copy
    handle.order(stream, band)                        … or after its first layers: scatter(…, bands=…)
    handle.verified(timeout_s)                        its results before it has ended: scatter(…, verified_after=…)
    handle.done() | wait() | copier.fileno()          for the host, which need not ask

The native core opens the CUDA driver by itself, in the primary context, so tensors of any torch version can be
described by a PagedLayout. Slots lie in memory that the driver knows: registered segments (registration.py), or
CudaSlotMemory on the device.

Invariants: those of copy.py; a call never waits for the GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvdock import _core
from kvdock.datapath.copy import PartCopy, PartResult, packed_for_gather, packed_for_scatter, results_of
from kvdock.datapath.errors import CopierClosed, NoCuda
from kvdock.datapath.layout import PagedLayout


@dataclass(frozen=True)
class CopyTuning:
    """How copies go best; tuning.py measures it. These values are good on an H200."""

    piece_bytes: int = 16 << 20
    """Of one staging buffer."""
    buffers: int = 2
    load_ctas: int = 16
    """CTAs (thread blocks) of a kernel that copies from staging to paged blocks; `store_ctas`: of one that copies back.
    Each keeps a multiprocessor from the engine, whose kernels often expect all of them: four fill PCIe, more end
    sooner."""
    store_ctas: int = 4
    direct_ctas: int = 8
    """CTAs of a kernel that reads or writes the slots themselves, in page-locked host memory."""
    direct_load_bytes: int = 4 << 20
    """A call of up to so many bytes goes direct; `direct_store_bytes` likewise."""
    direct_store_bytes: int = 4 << 20
    hash_threads: int = 4
    """CPU threads that verify a load before it has ended. Not measured: the caller knows how many cores it may use."""
    background_store_ctas: int = 2
    """CTAs of a connector's stores in the background (for_stores): the fewest that fill PCIe."""

    def for_core(self) -> dict[str, int]:
        """What the core's copier is told."""
        values = asdict(self)
        del values["background_store_ctas"]
        return values

    def for_stores(self) -> CopyTuning:
        """For stores while the engine computes: by the kernel alone, whatever their size. A copy engine that a store
        keeps busy lets no other copy to the host in before the store has ended, and an engine copies its tokens there:
        with 1 GiB on an H200, they came 15 ms late. More CTAs than fill PCIe would hold up the engine's
        kernels (bench/LOG.md)."""
        least = 1 << 20  # of staging, which is not used
        return replace(self, piece_bytes=least, direct_ctas=self.background_store_ctas, direct_store_bytes=1 << 62)


def require_cuda(device: int) -> _core.CudaDevice:
    """The GPU of that index. NoCuda, in one sentence, when it cannot be used."""
    why = _core.cuda_unavailable()
    if why:
        raise NoCuda(why, found=why, wanted="a CUDA GPU")
    known = _core.cuda_devices()
    if not 0 <= device < len(known):
        wanted = f"one of 0..{len(known) - 1}"
        sentence = f'device "cuda:{device}" is not there: this process sees {len(known)}'
        raise NoCuda(sentence, found=device, wanted=wanted)
    return known[device]


class CudaHandle:
    """A copy under way on the GPU (a CopyHandle)."""

    def __init__(self, copied: _core.CudaCopy, parts: Sequence[PartCopy]) -> None:
        self._copy, self._parts = copied, parts

    def done(self) -> bool:
        return self._copy.done()

    def wait(self, timeout_s: float | None) -> bool:
        """True once the copy has ended, False on timeout. Sleeps without the GIL."""
        return self._copy.wait(timeout_s)

    def order(self, stream: int, band: int | None = None) -> None:
        """What is put on `stream` (a CUstream as an integer) from now on runs after the copy, or after its bands up to
        `band`. CopyError for a band that it does not have."""
        self._copy.order(stream, band)

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        """Waits until the copy is verified. Like result(), for the bytes already copied, and for the others as the CPU
        found them in the slots. None on timeout."""
        return results_of(self._copy.verified_checksums(), self._parts) if self._copy.wait_verified(timeout_s) else None

    def result(self) -> list[PartResult]:
        """Waits, then one result a part in order. CudaError when the copy failed: nothing is known of its bytes."""
        return results_of(self._copy.checksums(), self._parts)


class CudaCopier:
    """A Copier for blocks in the memory of GPU `device`. Those of several layouts share staging, and take turns, when
    the later ones are opened with beside().

    Raises NoCuda; CopyError for a tuning that cannot be; CudaError when the layout's memory is not that GPU's, or
    when there is no memory for staging (`tuning.buffers * tuning.piece_bytes` bytes of the GPU, and 8 MiB page-locked).
    """

    def __init__(self, layout: PagedLayout, *, device: int, tuning: CopyTuning | None = None) -> None:
        require_cuda(device)
        self.device = device
        self.tuning = tuning if tuning is not None else CopyTuning()
        self._core = _core.CudaCopier(device=device, **self.tuning.for_core())
        self._add(layout)

    def beside(self, layout: PagedLayout) -> CudaCopier:
        """A Copier for another layout on the same GPU. Closing one closes all."""
        other = copy.copy(self)
        other._add(layout)
        return other

    def _add(self, layout: PagedLayout) -> None:
        self._layout, self._number = layout, self._core.add_layout(layout.core)

    @property
    def staging_bytes(self) -> int:
        """Device memory that copies pass through."""
        return self._core.staging_bytes

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CudaHandle:
        """Paged blocks → slots. `after`: a stream (CUstream as an integer, 0 the legacy default stream) whose work
        so far comes first. CopyError: ids, skips or slots that cannot be; CopierClosed; CudaError."""
        packed = packed_for_gather(self._layout, parts)
        self._require_open()
        copied = self._core.gather(self._number, packed.slots, packed.block_ids, packed.starts, after=after)
        return CudaHandle(copied, tuple(parts))

    def scatter(
        self, parts: Sequence[PartCopy], *, after: int | None = None, bands: Sequence[int] = (), verified_after: int = 0
    ) -> CudaHandle:
        """Slots → paged blocks.

        `bands` cuts the copy by planes of the layout, so that a reader of the first layers need not wait for the last
        (handle.order): ascending plane indices at which each band ends; the last equals the number of planes. The copy
        is verified once the first `verified_after` bands have been copied and the CPU has hashed the others in the
        slots, which must be in host memory; 0: when it has ended. Otherwise like gather().
        """
        packed = packed_for_scatter(self._layout, parts)
        self._require_open()
        copied = self._core.scatter(self._number, *packed, after=after, bands=bands, verified_after=verified_after)
        return CudaHandle(copied, tuple(parts))

    def fileno(self) -> int:
        """An eventfd, readable when copies have ended since it was last read; it counts them."""
        return self._core.fileno()

    def _require_open(self) -> None:
        if self._core.closed:
            raise CopierClosed("copier", found="closed", wanted="open")

    def close(self) -> None:
        """Waits for what was submitted, here and by the copiers beside; later calls raise CopierClosed."""
        self._core.close()
