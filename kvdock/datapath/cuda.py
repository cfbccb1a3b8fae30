"""Copies on a GPU: the Copier of copy.py for blocks in a GPU's memory, ordered with the engine's streams.

    copier.scatter(parts, after=stream) ─► handle     enqueues; runs after the present work on `after`
    handle.order(stream)                              later work on `stream` runs after the copy
    handle.order(stream, band)                        … or after its first layers: scatter(…, bands=…)
    handle.verified(timeout_s)                        results before the end of the copy: scatter(…, verified_after=…)
    handle.done() | wait() | copier.fileno()          for the CPU

The native core opens the CUDA driver itself and works in the primary context, so a PagedLayout can describe tensors of
any torch version. Slots lie in memory that the driver knows: registered segments (segments.py), or CudaSlotMemory
on the device.

Invariants: those of copy.py; gather(), scatter() and order() do not wait for the GPU, with two exceptions: when the
driver refuses a submission, that call waits for the work that is on the copier's streams already; and order() waits for
earlier copies when their descriptors fill the ring (csrc/cuda/copier.h). Opening and closing a copier wait for the GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from kvdock import _core
from kvdock.datapath.copy import (
    DescribedParts,
    PartCopy,
    PartResult,
    ScatterParts,
    packed_for_gather,
    packed_for_scatter,
    results_of,
    wrong_of,
)
from kvdock.datapath.errors import CopierClosed, NoCuda, copy_error
from kvdock.datapath.layout import PagedLayout
from kvdock.shm.checksum import ensure_keys

UNPACK_CTAS: Final = 16
PACK_CTAS: Final = 16
DIRECT_PACK_CTAS: Final = 4
PACKED_STORE_BYTES: Final = 4 << 20
"""The staging buffer of a packed store beside the engine's steps; smaller stores are direct copies."""


@dataclass(frozen=True)
class CopyTuning:
    """How copies use the GPU; tuning.py measures the fastest values. The defaults are good on an H200."""

    piece_bytes: int = 16 << 20
    """Bytes of one staging buffer."""
    buffers: int = 2
    load_ctas: int = 16
    """CTAs (thread blocks) of a kernel that copies from staging to paged blocks; `store_ctas`: of a kernel that copies
    back. Each CTA takes a multiprocessor from the engine, whose kernels often need all of them. Four are enough to
    saturate PCIe; with more, a piece's kernel ends sooner."""
    store_ctas: int = 4
    direct_ctas: int = 8
    """CTAs of a kernel that reads or writes the slots themselves, in page-locked host memory."""
    direct_load_bytes: int = 4 << 20
    """Loads of up to this many bytes in a call are direct copies; `direct_store_bytes`: the same for stores."""
    direct_store_bytes: int = 4 << 20
    hash_threads: int = 4
    """CPU threads that verify a load before it has ended. Not measured: the caller knows how many cores it may use."""
    least_band_bytes: int = 64 << 20
    """Smaller bands of a load are joined; PCIe carries so many bytes in 1.3 ms. With 8 MiB, a load of 2,048 tokens of
    Llama 3 8B had 32 batches, whose calls of the driver delayed SGLang's launches (bench/LOG.md, 2026-11-29)."""
    background_store_ctas: int = 2
    """CTAs of a connector's stores in the background (for_stores): the fewest that saturate PCIe."""

    def for_core(self) -> dict[str, int]:
        """The arguments of the native core's copier."""
        values = asdict(self)
        del values["background_store_ctas"]
        return values

    def for_packed(self) -> CopyTuning:
        """The tuning for loads of packed parts: unpacking needs UNPACK_CTAS to keep up with PCIe (bench/LOG.md)."""
        return replace(self, load_ctas=max(self.load_ctas, UNPACK_CTAS))

    def for_stores(self, *, packs: bool = False) -> CopyTuning:
        """The tuning for stores while the engine computes. A copy to the host, such as that of the engine's sampled
        tokens, waits while a staged store keeps the copy engine busy: beside a store of 1 GiB on an H200, tokens came
        15 ms late. So raw stores are direct copies, by few CTAs, since more would delay the engine's kernels.

        Larger packed stores (`packs`) pass through one staging buffer: the copy engine is idle while a kernel fills it,
        so a token waits for one piece at most. A matrix product beside such a store took 1.09 times as long as alone,
        beside a direct one 1.4 times (bench/LOG.md). With fewer than DIRECT_PACK_CTAS, small packed stores would take
        twice as long as raw ones."""
        if not packs:
            least = 1 << 20  # the smallest staging buffer; none is used
            return replace(
                self, piece_bytes=least, direct_ctas=self.background_store_ctas, direct_store_bytes=1 << 62
            )
        return replace(
            self, buffers=1, piece_bytes=PACKED_STORE_BYTES, store_ctas=PACK_CTAS,
            direct_store_bytes=PACKED_STORE_BYTES, direct_ctas=max(self.background_store_ctas, DIRECT_PACK_CTAS),
        )


def require_cuda(device: int) -> _core.CudaDevice:
    """The GPU with index `device`. Raises NoCuda, whose message is one sentence, when it cannot be used."""
    why = _core.cuda_unavailable()
    if why:
        raise NoCuda(why, found=why, wanted="a CUDA GPU")
    known = _core.cuda_devices()
    if not 0 <= device < len(known):
        wanted = f"one of 0..{len(known) - 1}"
        sentence = f'device "cuda:{device}" does not exist: this process has {len(known)}'
        raise NoCuda(sentence, found=device, wanted=wanted)
    if not _core.cuda_kernels():
        remedy = "install kvdock's wheel, or nvcc and then kvdock from its source"
        sentence = f"this build of kvdock was made without nvcc and has no kernels that copy on GPUs; {remedy}"
        raise NoCuda(sentence, found="no kernels", wanted="a build with kernels")
    return known[device]


class CudaHandle:
    """A copy under way on the GPU (a CopyHandle)."""

    def __init__(self, copied: _core.CudaCopy, parts: ScatterParts) -> None:
        self._copy, self._parts = copied, parts

    def done(self) -> bool:
        return self._copy.done()

    def wait(self, timeout_s: float | None) -> bool:
        """True once the copy has ended, False on timeout. Waits without the GIL."""
        return self._copy.wait(timeout_s)

    def order(self, stream: int, band: int | None = None) -> int:
        """Later work on `stream` (a CUstream as an integer) runs after the copy, or after its bands up to `band`.
        Returns the last band that it runs after: `band`, or the last one that the copier has joined with it. Raises
        CopyError for a band that the copy does not have."""
        return self._copy.order(stream, band)

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        """Waits until the copy is verified. Returns the same as result(), but for bytes that were not copied yet, the
        sums cover the content that the CPU found in the slots. None on timeout."""
        return results_of(self._copy.verified_checksums(), self._parts) if self._copy.wait_verified(timeout_s) else None

    def fit(self) -> list[bool]:
        """Waits until the copy is verified. False, after a gather: the packed part needs too many pool units, and its
        slot is of no use; after a scatter: the slot holds no packed part of the shape, and the blocks may hold
        anything, of which bands that are still to be copied tell nothing."""
        return self._copy.fit()

    def result(self) -> list[PartResult]:
        """Waits for the end; one result for each part, in order. Raises CudaError when the copy failed: the blocks may
        hold anything."""
        return results_of(self._copy.checksums(), self._parts)

    def wrong(self) -> list[int]:
        """Like result(), but returns only the indices of the parts that are not ok."""
        return wrong_of(self._copy.checksums(), self._parts)

    def took_s(self) -> float | None:
        """Seconds from the end of the work on the stream `after` to the end of the copy, by the GPU's clock; without
        `after`, from the call. None: the copy has not ended, or it failed."""
        return self._copy.took_s()


class CudaCopier:
    """A Copier for blocks in the memory of GPU `device`. Copiers of further layouts, opened with beside(), share its
    staging and take turns with it.

    `part_blocks`: how many blocks the longest part of a copy has; None: as many as the layout has. `packing`:
    the shape of parts of `part_blocks` blocks (docs/understand/packing.md): all parts have so many, and the slots hold
    them packed.

    Raises NoCuda; CopyError for an impossible tuning; CudaError when the layout's memory is not on that GPU, or when
    there is no memory for staging (`tuning.buffers * tuning.piece_bytes` bytes of the GPU, and 8 MiB page-locked).
    """

    def __init__(
        self, layout: PagedLayout, *, device: int, part_blocks: int | None = None, tuning: CopyTuning | None = None,
        packing: _core.PackedShape | None = None,
    ) -> None:
        require_cuda(device)
        self.device = device
        self.tuning = tuning if tuning is not None else CopyTuning()
        self._core = _core.CudaCopier(device=device, **self.tuning.for_core())
        self._add(layout, part_blocks, packing)

    def beside(
        self, layout: PagedLayout, *, part_blocks: int | None = None, packing: _core.PackedShape | None = None
    ) -> CudaCopier:
        """A Copier for another layout on the same GPU. Closing one closes all."""
        other = copy.copy(self)
        other._add(layout, part_blocks, packing)
        return other

    def _add(self, layout: PagedLayout, part_blocks: int | None, packing: _core.PackedShape | None) -> None:
        blocks = layout.num_blocks if part_blocks is None else part_blocks
        longest, how = layout.part_bytes(blocks), None
        if packing is not None:
            if packing.raw_bytes != longest:
                raise copy_error("bytes of a packed part before packing", found=packing.raw_bytes, wanted=longest)
            longest, how = max(longest, packing.packed_bytes), (packing.marks, packing.units)
        ensure_keys(longest)
        self._layout = layout
        self._number = self._core.add_layout(layout.core, part_blocks=blocks, packed=how)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers in device memory."""
        return self._core.staging_bytes

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CudaHandle:
        """Paged blocks → slots. `after`: a stream (a CUstream as an integer, 0: the legacy default stream) whose
        present work the copy waits for. Raises CopyError (impossible block ids, lengths or slots), CopierClosed,
        CudaError."""
        packed = packed_for_gather(self._layout, parts)
        self._require_open()
        copied = self._core.gather(self._number, packed.slots, packed.block_ids, packed.starts, after=after)
        return CudaHandle(copied, tuple(parts))

    def scatter(
        self, parts: ScatterParts, *, after: int | None = None, bands: Sequence[int] = (), verified_after: int = 0
    ) -> CudaHandle:
        """Slots → paged blocks.

        `bands` cuts the copy by planes of the layout, so that a reader of the first layers need not wait for the last
        (handle.order): ascending plane indices at which each band ends; the last equals the number of planes. All small
        bands but the first are joined (`tuning.least_band_bytes`) if the copy is not verified early. The copy is
        verified once the first `verified_after` bands have been copied and the CPU has hashed the others in the slots,
        which must be in host memory; 0: when it has ended. Otherwise like gather().
        """
        packed = packed_for_scatter(self._layout, parts)
        self._require_open()
        copied = self._core.scatter(self._number, *packed, after=after, bands=bands, verified_after=verified_after)
        return CudaHandle(copied, parts if isinstance(parts, DescribedParts) else tuple(parts))

    def fileno(self) -> int:
        """An eventfd that counts the copies that have ended since it was last read."""
        return self._core.fileno()

    def _require_open(self) -> None:
        if self._core.closed:
            raise CopierClosed("copier", found="closed", wanted="open")

    def close(self) -> None:
        """Waits for all copies of this copier and those beside it; later calls raise CopierClosed."""
        self._core.close()
