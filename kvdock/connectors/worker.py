"""The worker connector: carries out plans with the copier, and reports the end of copies to the server.

Each rank has one. It decides nothing: a plan names slots, blocks and checksums. It releases leases and commits stores
only after it has observed the end of the copies (W1, W2 in docs/understand/lifetime_protocol.md). A chunk whose bytes
do not have the checksum in the lease is reported and never counted as loaded (W3).

    load()    submit_load() enqueues the copies, finish_load() waits for their end, end_load() reports to the server
    store()   submit_store() enqueues the copies, finish_store() waits for their end and commits

On a GPU a load may be verified before its copies have ended: all of its bytes have been hashed, while the last ones are
still being copied. Work that reads the blocks is ordered after the copies on the GPU.

Thread safety: loads may be submitted and finished by one thread while others submit and finish stores and call
end_load(); a copier of its own for each group and direction keeps a load from waiting behind stores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvdock import _core
from kvdock.connectors.errors import LayoutMismatchError
from kvdock.connectors.packing import FirstParts, shape_of
from kvdock.connectors.plans import LoadPlan, StorePiece, StorePlan
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.datapath.ceiling import ceiling_bytes_per_s
from kvdock.datapath.copy import Copier, CopyHandle, DescribedParts, PartCopy, PartResult, StreamHandle
from kvdock.datapath.cuda import CopyTuning, CudaCopier
from kvdock.datapath.cuda_packed import PackedCudaCopier
from kvdock.datapath.devices import CPU, Device
from kvdock.datapath.errors import CopyError, CudaError, DatapathError, copy_error
from kvdock.datapath.joint import shares_of, whole_of
from kvdock.datapath.layout import PagedLayout
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Commit, MakeRaw, Manifest, Part, PartDone, RawPart, WritePart
from kvdock.protocol.wire_types import MAX_ENTRIES
from kvdock.shm.errors import ShmError

log = logging.getLogger("kvdock.connector")

CallFailed = (ServerUnavailable, ApiError)
CopyFailed = (DatapathError, ShmError, CopyError, CudaError, OSError, MemoryError)

FIRST_PARTS = 16
"""How many parts the first copy of a load without bands has. It is small, so that copying starts while the rest is
submitted."""

Piece = TypeVar("Piece", int, StorePiece)


class Bands(NamedTuple):
    """The bands of a load; see CudaCopier.scatter."""

    ends: Sequence[int]
    verified_after: int


class Own(NamedTuple):
    """What a copier copies: the part of a rank of this worker in a KV group."""

    rank: int
    group: int


def seconds_of(copies: Iterable[tuple[Own, object, CopyHandle]]) -> float | None:
    """The seconds that copies took, if those of a copier run one after another, and copiers side by side. None: there
    are no copies, or the time of one is not known."""
    by_copier: dict[Own, float] = {}
    for own, _, handle in copies:
        seconds = handle.took_s()
        if seconds is None:
            return None
        by_copier[own] = by_copier.get(own, 0.0) + seconds
    return max(by_copier.values(), default=None)


class _Copying(Generic[Piece]):
    """The copies of a load or a store. `copies`: what is copied, the pieces (of a load: their chunks) and the handle of
    each copy."""

    def __init__(self, attachment: Attachment, started_s: float) -> None:
        self.attachment, self.started_s = attachment, started_s
        self.copies: list[tuple[Own, Sequence[Piece], CopyHandle]] = []

    def done(self) -> bool:
        return all(handle.done() for _, _, handle in self.copies)

    def wait(self, timeout_s: float | None) -> bool:
        """True once the copies have ended."""
        return all(handle.wait(timeout_s) for _, _, handle in self.copies)

    def took_s(self) -> float | None:
        """See seconds_of()."""
        return seconds_of(self.copies)

    def order(self, stream: int) -> None:
        """Work that is put on `stream` (a CUstream) from now on runs after the copies. GPUs only."""
        for _, _, handle in self.copies:
            assert isinstance(handle, StreamHandle), "streams are a GPU's"
            handle.order(stream)


class Storing(_Copying[StorePiece]):
    """A store in progress."""

    def __init__(self, attachment: Attachment, plan: StorePlan, started_s: float) -> None:
        super().__init__(attachment, started_s)
        self.plan, self.holds_reservation = plan, False
        self.error: Exception | None = None
        """The reason if a copy could not be submitted."""
        self.committed: list[Part] = []
        """The parts that this worker has committed, as lookups find them."""


class Loading(_Copying[int]):
    """A load in progress, and its outcome."""

    def __init__(self, attachment: Attachment, plan: LoadPlan, started_s: float) -> None:
        super().__init__(attachment, started_s)
        self.plan, self.holds_lease = plan, False
        self.counts: Sequence[int] = ()
        """By KV group, how many pieces it has."""
        self.lost = False
        """The load could not be submitted, or its copies failed: no byte can be trusted."""
        self.damaged: list[int] = []
        """Chunks whose bytes do not match their checksums."""

    def verified(self, timeout_s: float) -> bool:
        """True once all bytes are verified: work that is ordered after the load reads correct KV."""
        if self.lost:
            return False
        for _, _, handle in self.copies:
            try:
                found = handle.verified(timeout_s) if isinstance(handle, StreamHandle) else None
            except CopyFailed:
                return False  # finish_load() reports the failure
            if found is None or not all(result.ok for result in found):
                return False
        return True

    def is_whole(self) -> bool:
        """Whether all bytes have come and match their checksums. Waits for the copies."""
        try:
            return not self.lost and all(result.ok for _, _, handle in self.copies for result in handle.result())
        except CopyFailed:
            return False


class WorkerConnector:
    """`session`: its identity has this worker's ranks: one, or several if the worker has the heads of several parts.
    Ranks below the manifest's `writers` store, and rank r loads part r mod writers. `layouts`: for each rank in turn,
    where each KV group has the rank's part of its blocks, which are on `device`. `threads`: how many threads copy when
    the blocks are in host memory. `tuning`: for copies on a GPU (None: the measured default); stores use its
    for_stores().

    `stream`: the stream on which the engine reads and writes its blocks (a CUstream as an integer). Unless a call says
    otherwise, a copy runs after the work that is on this stream when the copy is submitted. None on the CPU, and if
    every step has ended before its blocks are passed to the connector.
    """

    def __init__(
        self,
        session: EngineSession,
        layouts: Sequence[PagedLayout],
        *,
        device: Device = CPU,
        stream: int | None = None,
        threads: int = 2,
        tuning: CopyTuning | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        manifest, ranks = session.manifest, session.identity.ranks
        self._owns = [Own(rank, group) for rank in ranks for group in range(len(manifest.groups))]
        if len(layouts) != len(self._owns):
            raise LayoutMismatchError(
                f"layouts: found {len(layouts)}, wanted one for each of {len(manifest.groups)} groups"
                f"{f' on each of {len(ranks)} ranks' if len(ranks) > 1 else ''}"
            )
        shapes = [_checked(manifest, own.group, layout) for own, layout in zip(self._owns, layouts, strict=True)]
        self.session, self.ranks, self._stream = session, ranks, stream
        self._clock, self._first_parts = clock, FirstParts(manifest)
        session.outcomes.ceiling_bytes_per_s = partial(ceiling_bytes_per_s, device, threads)

        if tuning is None:
            tuning = device.tuning(layouts, chunk_tokens=manifest.chunk_tokens)
        storing = tuning.for_stores(packs=any(shapes)) if tuning is not None else None
        loading = tuning.for_packed() if tuning is not None and any(shapes) else tuning
        self._loaders: list[Copier]
        self._storers: list[Copier]
        self._loaders, self._storers = (
            device.open_copiers(
                layouts, chunk_tokens=manifest.chunk_tokens, threads=threads, tuning=one, packing=shapes
            )
            for one in (loading, storing)
        )

    @property
    def rank(self) -> int:
        """The first of this worker's ranks."""
        return self.ranks[0]

    @property
    def writes(self) -> bool:
        """Whether this worker stores. False: another one has the same bytes and stores them (MLA)."""
        return self.rank < self.session.manifest.writers

    def close(self) -> None:
        for copier in (*self._loaders, *self._storers):
            copier.close()

    # ------------------------------------------------------------------ load

    def load(self, attachment: Attachment, plan: LoadPlan) -> int:
        """Fills the plan's blocks. Returns how many tokens are valid, counted from token 0: fewer if a chunk failed.

        Does not raise if the server is lost or a slot is not mapped: the engine computes the tokens that were not
        loaded.
        """
        loading = self.submit_load(attachment, plan)
        try:
            return self.finish_load(loading)
        finally:
            self.end_load(loading)

    def submit_load(
        self, attachment: Attachment, plan: LoadPlan, bands: Sequence[Bands] | None = None, *, waits: bool = True,
        after: int | None = None,
    ) -> Loading:
        """Enqueues the copies and returns. `bands`: one for each group; GPUs only. `waits` False: no work on the
        engine's stream uses the blocks, so the copies wait only for the work on the stream `after`, if there is one."""
        loading = self._begun(attachment, plan)
        with self._failing(loading):
            for own, loader in () if loading.lost else zip(self._owns, self._loaders, strict=True):
                # A few parts are submitted first: they are copied while the rest is prepared. With bands they would
                # delay the first layers of all others.
                end = loading.counts[own.group]
                first = 0 if bands is not None else min(FIRST_PARTS, end)
                for some in (range(first), range(first, end)):
                    if some:
                        banded = bands[own.group] if bands is not None else None
                        self._submit(loading, own, loader, some, banded, self._stream if waits else after)
        return loading

    def submit_together(
        self, loads: Sequence[tuple[Attachment, LoadPlan]], bands: Sequence[Bands] | None = None
    ) -> list[Loading]:
        """submit_load() for loads for which one forward pass waits. Each copier copies the parts of all of them in one
        copy, so the first band has the first layers of all: one load after the other, all layers of the others would
        come before the first layer of the last one. Where some parts are packed and others raw, these are two copies.
        """
        if len(loads) == 1:
            return [self.submit_load(*loads[0], bands)]
        loadings = [self._begun(attachment, plan) for attachment, plan in loads]
        for own, loader in zip(self._owns, self._loaders, strict=True):
            described: list[tuple[Loading, DescribedParts, Sequence[int]]] = []
            for loading in loadings:
                with self._failing(loading):
                    if not loading.lost and (count := loading.counts[own.group]):
                        described.append((loading, *self._described(loading, own, range(count))))
            with self._failing(*(loading for loading, _, _ in described)):
                if described:
                    self._submit_joint(own, loader, described, bands[own.group] if bands is not None else None)
        return loadings

    def _submit_joint(
        self, own: Own, loader: Copier, described: Sequence[tuple[Loading, DescribedParts, Sequence[int]]],
        bands: Bands | None,
    ) -> None:
        parts = [parts for _, parts, _ in described]
        handle = self._scatter(loader, DescribedParts.joined(parts), bands, self._stream)
        try:
            for (loading, _, chunks), share in zip(described, shares_of(handle, [*map(len, parts)]), strict=True):
                loading.copies.append((own, chunks, share))
        except BaseException:
            handle.wait(None)  # a load without its share would not wait for it
            raise

    def _begun(self, attachment: Attachment, plan: LoadPlan) -> Loading:
        """Makes a load. None of its copies is submitted yet. The load is lost if this worker may not use its lease."""
        loading = Loading(attachment, plan, self._clock())
        loading.holds_lease = attachment.grants.start(plan.lease)
        loading.lost = not loading.holds_lease
        with self._failing(loading):
            loading.counts = plan.arrays.counts(len(self.session.manifest.groups))
        return loading

    @contextmanager
    def _failing(self, *loadings: Loading) -> Iterator[None]:
        """The loads are lost if anything fails."""
        try:
            yield
        except CopyFailed as error:
            self._load_lost(error, *loadings)
        except CallFailed as error:
            for loading in loadings:
                loading.lost = True
                self.session.lost(loading.attachment, error)
        except Exception:  # whatever it was, somebody must wait for the copies that were submitted before it
            log.exception("load request=%s failed", _requests(loadings))
            for loading in loadings:
                loading.lost = True

    def maps(self, attachment: Attachment, plan: LoadPlan) -> bool:
        """Whether all segments that a load needs are mapped, so that submit_load() does not ask the server for them."""
        known = {one.id for one in attachment.hold.segments.segments}
        writers = self.session.manifest.writers
        return all(known.issuperset(plan.arrays.segments(own.group, own.rank % writers)) for own in self._owns)

    def _submit(
        self, loading: Loading, own: Own, loader: Copier, some: range, bands: Bands | None, after: int | None
    ) -> None:
        """`some`: which of the group's pieces."""
        parts, chunks = self._described(loading, own, some)
        loading.copies.append((own, chunks, self._scatter(loader, parts, bands, after)))

    def _described(self, loading: Loading, own: Own, some: range) -> tuple[DescribedParts, Sequence[int]]:
        """The parts of some of the group's pieces, and their chunks."""
        pieces, writer = loading.plan.arrays, own.rank % self.session.manifest.writers
        blocks, lengths = self._shape_of(own.group)
        segments = self._mapped(loading.attachment, pieces.segments(own.group, writer))
        *described, chunks = pieces.described(own.group, writer, some.start, some.stop, blocks, lengths, segments)
        return DescribedParts.of(*described), memoryview(chunks).cast("q")

    def _scatter(self, loader: Copier, parts: DescribedParts, bands: Bands | None, after: int | None) -> CopyHandle:
        if bands is not None and isinstance(loader, (CudaCopier, PackedCudaCopier)):
            return loader.scatter(parts, after=after, bands=bands.ends, verified_after=bands.verified_after)
        return loader.scatter(parts, after=after)

    def finish_load(self, loading: Loading) -> int:
        """Waits for the copies. Returns how many tokens are valid, counted from token 0."""
        loading.wait(None)
        plan = loading.plan
        try:
            for _, chunks, handle in loading.copies:
                loading.damaged += [chunks[at] for at in handle.wrong()]
        except CopyFailed as error:
            self._load_lost(error, loading)
        failed = [piece.chunk for piece in plan.pieces] if loading.lost else []
        if not loading.holds_lease:
            return plan.local_tokens
        valid = min([index * plan.chunk_tokens for index in (*failed, *loading.damaged)], default=plan.hit_tokens)
        valid = max(plan.local_tokens, min(valid, plan.hit_tokens))
        self._log("load", plan.request_id, valid - plan.local_tokens, self._bytes_of(plan), loading.started_s)
        if not failed and (took_s := loading.took_s()) is not None:
            self.session.outcomes.loaded(self._bytes_of(plan), took_s)
        return valid

    def _load_lost(self, error: Exception, *loadings: Loading) -> None:
        log.warning("load request=%s failed: %s", _requests(loadings), error)
        for loading in loadings:
            loading.lost = True

    def end_load(self, loading: Loading) -> None:
        """Reports damaged chunks, and queues the release of the lease; settle() sends it."""
        if not loading.holds_lease:
            return
        attachment, plan = loading.attachment, loading.plan
        loading.wait(None)  # the release follows the copy's end, whatever the outcome of the load (W1)
        try:
            if loading.damaged:
                chunks = sorted(set(loading.damaged))
                log.error("load request=%s: checksum mismatch in chunks %s: they are a miss", plan.request_id, chunks)
                self.session.report(attachment, plan.lease, chunks)
        except CallFailed as error:
            self.session.lost(attachment, error)
        finally:
            self.session.client.release_later(plan.lease, attachment.session, self.ranks)
            attachment.grants.stop(plan.lease)

    def settle(self, attachment: Attachment) -> None:
        """Sends the releases that end_load() queued. Call it once the engine has its blocks, so that no load waits for
        it."""
        if self.session.attachment is not attachment:
            return  # that server is lost. If it returns, it asks about the lease, and the answer is "done".
        try:
            self.session.client.flush(attachment.session)
        except CallFailed as error:
            log.info("releases not delivered: %s", error)
            self.session.lost(attachment, error)

    # ------------------------------------------------------------------ store

    def store(self, attachment: Attachment, plan: StorePlan) -> int:
        """Copies the plan's blocks into their slots and commits. Returns how many chunks are ready by then."""
        return self.finish_store(self.submit_store(attachment, plan))

    def submit_store(self, attachment: Attachment, plan: StorePlan, *, after: int | None = None) -> Storing:
        """Enqueues the copies of all groups and returns. `after`: the stream whose work so far comes before them; None:
        the stream on which the engine computes."""
        storing = Storing(attachment, plan, self._clock())
        storing.holds_reservation = attachment.grants.start(plan.reservation)
        if not storing.holds_reservation:
            return storing
        after = self._stream if after is None else after
        try:
            for own, storer, members in self._by_copier(plan.pieces, self._storers):
                mine = [self._own_part(piece, own.rank) for piece in members]
                slots = self._addresses(attachment, mine)
                parts = [
                    PartCopy(slot, piece.block_ids, length=part.length)
                    for piece, part, slot in zip(members, mine, slots, strict=True)
                ]
                storing.copies.append((own, members, storer.gather(parts, after=after)))
        except (*CopyFailed, *CallFailed) as error:
            storing.error = error
        return storing

    def finish_store(self, storing: Storing, *, is_sound: bool = True) -> int:
        """Waits for the copies and commits. `is_sound` False: the copied bytes must not be published. Returns how many
        chunks are ready by then."""
        storing.wait(None)
        if not storing.holds_reservation:
            return 0
        attachment, plan, ready = storing.attachment, storing.plan, 0
        try:
            if storing.error is not None:
                raise storing.error
            results = [
                (own.rank, piece, result) for own, members, handle in storing.copies
                for piece, result in zip(members, handle.result(), strict=True)
            ]
            if not is_sound:
                self.session.abort(attachment, plan.reservation, self.ranks)
                return 0
            unfit = sum(not result.fits for _, _, result in results)
            self._first_parts.count((piece.group for _, piece, _ in results), unfit)
            for rank in self.ranks:
                ready = self._commit_rank(storing, rank, [(piece, one) for of, piece, one in results if of == rank])
            self._log("store", plan.request_id, plan.tokens, self._bytes(plan.pieces), storing.started_s)
            if (took_s := storing.took_s()) is not None:
                self.session.outcomes.stored(self._bytes(plan.pieces), took_s)
        except CopyFailed as error:
            log.warning("store request=%s failed: %s", plan.request_id, error)
            self.session.abort(attachment, plan.reservation, self.ranks)
        except CallFailed as error:
            log.warning("store request=%s not committed: %s", plan.request_id, error)
            self.session.lost(attachment, error)
        finally:
            attachment.grants.stop(plan.reservation)
        return ready

    def _commit_rank(self, storing: Storing, rank: int, results: Sequence[tuple[StorePiece, PartResult]]) -> int:
        """Commits the parts of a rank. Returns how many chunks are ready then. An empty commit is sent, too: the server
        waits for each rank's commit."""
        attachment, ready = storing.attachment, 0
        done = [(_part_of(piece, rank), piece, result.checksum) for piece, result in results if result.fits]
        done += self._make_raw(storing, rank, [(piece, result) for piece, result in results if not result.fits])
        parts = [PartDone(piece.chunk, piece.group, f"{checksum:016x}") for _, piece, checksum in done]
        for start in range(0, max(1, len(parts)), MAX_ENTRIES):
            body = Commit(session=attachment.session, rank=rank, parts=parts[start : start + MAX_ENTRIES])
            ready = self.session.client.commit(storing.plan.reservation, body).ready
        storing.committed += [
            Part(part.group, part.writer, part.segment, part.offset, part.length, f"{checksum:016x}")
            for part, _, checksum in done
        ]
        if len(done) < len(results):  # parts that could not be packed have no slot
            self.session.abort(attachment, storing.plan.reservation, [rank])
        return ready

    def _make_raw(
        self, storing: Storing, rank: int, unfit: Sequence[tuple[StorePiece, PartResult]]
    ) -> list[tuple[WritePart, StorePiece, int]]:
        """Puts the raw bytes of parts that could not be packed into slots of their own. Returns these slots with their
        pieces and checksums; fewer than `unfit` if the server has too little memory."""
        made: list[tuple[WritePart, StorePiece, int]] = []
        whole = [(piece, result, result.raw) for piece, result in unfit if result.raw is not None]
        for start in range(0, len(whole), MAX_ENTRIES):
            some = whole[start : start + MAX_ENTRIES]
            body = MakeRaw(
                session=storing.attachment.session, rank=rank,
                parts=[RawPart(piece.chunk, piece.group) for piece, _, _ in some],
            )
            answer = self.session.client.make_raw(storing.plan.reservation, body)
            for slot, (piece, result, raw) in zip(answer.parts, some, strict=False):
                part = WritePart(slot.group, rank, slot.segment, slot.offset, slot.length)
                if (slot.index, slot.group, slot.length) != (piece.chunk, piece.group, len(raw)):
                    raise copy_error(f"raw slot of chunk {piece.chunk}", found=slot, wanted=f"{len(raw)} bytes")
                (address,) = self._addresses(storing.attachment, [part])
                ctypes.memmove(address, (ctypes.c_char * len(raw)).from_buffer(raw), len(raw))
                made.append((part, piece, result.checksum))
        if unfit:
            log.info("store request=%s: %d of %d parts that could not be packed are stored raw",
                     storing.plan.request_id, len(made), len(unfit))
        return made

    # ------------------------------------------------------------------ both

    def _shape_of(self, group: int) -> tuple[int, list[int]]:
        """(blocks, possible lengths in bytes) of a part of a group."""
        manifest = self.session.manifest
        about = manifest.groups[group]
        return manifest.chunk_tokens // manifest.block_sizes[group], sorted({about.slot_bytes, about.part_bytes})

    def _own_part(self, piece: StorePiece, writer: int) -> WritePart:
        """The piece's part by `writer`. Raises CopyError when it is missing, or its length or the number of the piece's
        blocks is wrong."""
        blocks, lengths = self._shape_of(piece.group)
        part = next((part for part in piece.parts if part.writer == writer), None)
        if part is None or part.length not in lengths:
            found = "none" if part is None else f"{part.length} bytes"
            wanted = " or ".join(map(str, lengths))
            raise copy_error(f"part of group {piece.group} by writer {writer}", found=found, wanted=f"{wanted} bytes")
        if len(piece.block_ids) != blocks:
            raise copy_error(f"blocks for a part of group {piece.group}", found=len(piece.block_ids), wanted=blocks)
        return part

    def _by_copier(
        self, pieces: Iterable[StorePiece], copiers: Sequence[Copier]
    ) -> Iterator[tuple[Own, Copier, list[StorePiece]]]:
        """The pieces that each copier copies, if there are any."""
        groups: dict[int, list[StorePiece]] = {}
        for piece in pieces:
            groups.setdefault(piece.group, []).append(piece)
        for own, copier in zip(self._owns, copiers, strict=True):
            if own.group in groups:
                yield own, copier, groups[own.group]

    def _mapped(self, attachment: Attachment, segments: Iterable[int]) -> list[tuple[int, int, int]]:
        """(id, address, bytes) of each segment. Raises AttachError when one is not there, or not whole."""
        found = []
        for segment in segments:
            self.session.ensure_segment(attachment, segment)
            attachment.segments.require_whole(segment)
            mapping = attachment.segments.mapping(segment)
            found.append((segment, mapping.address, mapping.bytes))
        return found

    def _addresses(self, attachment: Attachment, parts: Sequence[WritePart]) -> list[int]:
        """The addresses of the parts' slots. Raises AttachError when a segment is not there, or not whole."""
        self._mapped(attachment, {part.segment for part in parts})
        return [attachment.segments.address(part.segment, part.offset, part.length) for part in parts]

    def _bytes_of(self, plan: LoadPlan) -> int:
        """How many bytes of KV this worker copies."""
        groups = self.session.manifest.groups
        counts = plan.arrays.counts(len(groups))
        return len(self.ranks) * sum(count * group.part_bytes for count, group in zip(counts, groups, strict=True))

    def _bytes(self, pieces: Iterable[StorePiece]) -> int:
        """As _bytes_of()."""
        groups = self.session.manifest.groups
        return len(self.ranks) * sum(groups[piece.group].part_bytes for piece in pieces)

    def _log(self, verb: str, request_id: str, tokens: int, size_bytes: int, started_s: float) -> None:
        took_s = self._clock() - started_s
        log.debug(
            "%s request=%s tokens=%d bytes=%d ms=%.2f gb_s=%.2f",
            verb, request_id, tokens, size_bytes, took_s * 1e3, size_bytes / max(took_s, 1e-9) / 1e9,
        )


def _checked(manifest: Manifest, group: int, layout: PagedLayout) -> _core.PackedShape | None:
    """The shape of packed parts; None: the group is not packed. Raises LayoutMismatchError for a layout that is not as
    the manifest says."""
    if layout.block_tokens != manifest.block_sizes[group]:
        raise LayoutMismatchError(
            f"block tokens of group {group}: found {layout.block_tokens}, wanted {manifest.block_sizes[group]} "
            "as the manifest says"
        )
    blocks, rest = divmod(manifest.chunk_tokens, layout.block_tokens)
    found, wanted = layout.part_bytes(blocks), manifest.groups[group].part_bytes
    if rest or found != wanted:
        raise LayoutMismatchError(
            f"part bytes of group {group}: found {found} ({blocks} blocks of {layout.block_bytes} bytes), "
            f"wanted {wanted} as the manifest says"
        )
    if layout.token_order not in (manifest.token_order, "ND"):
        raise LayoutMismatchError(f"token order: found {layout.token_order}, wanted {manifest.token_order}")
    return shape_of(manifest.groups[group], layout, blocks)


def _requests(loadings: Iterable[Loading]) -> str:
    return ", ".join(loading.plan.request_id for loading in loadings)


def _part_of(piece: StorePiece, rank: int) -> WritePart:
    return next(part for part in piece.parts if part.writer == rank)


# --------------------------------------------------------------------------------
# Layer by layer: how loads are cut into bands of layers, and which bands a step's forward pass has asked for.
#
# A load that may be reported early is copied band by band. When most of it was moved, and the CPU has hashed the rest,
# the request may run: either the step's work is ordered after the whole load, or the work of each attention layer after
# the band that has its KV, so that the first layers are computed while the last ones are still being copied. If a load
# was verified before it started, the first band has one layer, because the request may run once that band is copied.
#
# Invariant: `all_ordered` is False while the step has not asked for some band of a watched load: the step may have read
# KV before it was copied.

class Cut(Protocol):
    """How the loads of a KV group are cut into bands. `verified_after`: see CudaCopier.scatter."""

    @property
    def verified_after(self) -> int: ...

    def ends(self, layers: Sequence[int]) -> Sequence[int]:
        """The planes before the end of each band. `layers`: those before the end of each layer, in ascending order."""


class Shares(NamedTuple):
    """`first_share`: the share of the planes that is in the first band. `later`: how many bands of equal size follow;
    each costs a descriptor upload and an event."""

    first_share: float
    later: int
    verified_after: int

    def ends(self, layers: Sequence[int]) -> Sequence[int]:
        first, count = ceil(layers[-1] * self.first_share), layers[-1]
        return sorted({first + (count - first) * band // self.later for band in range(self.later + 1)})


class EachLayer(NamedTuple):
    """Each layer is a band: a copy is about as fast as the forward pass that follows it, so the later a layer can be
    read, the later all layers after it are computed. The copier joins bands that are too small."""

    verified_after: int = 0

    def ends(self, layers: Sequence[int]) -> Sequence[int]:
        return layers


VERIFIED_EARLY = Shares(0.625, 4, 1)
"""For a load that was not verified before: while the first band is copied, the CPU hashes the others."""
VERIFIED_BEFORE = EachLayer()
"""For a load that was verified before: the GPU hashes all bands again while it copies them."""


class Layers:
    """`planes[g]`: for KV group g, the last plane of each layer, by the layer's name."""

    def __init__(self, planes: Sequence[Mapping[str, int]], cut: Cut = VERIFIED_EARLY) -> None:
        self.bands: list[Bands] = []
        """The bands of each group's loads."""
        self._where: dict[str, list[tuple[int, int]]] = {}
        for group, of_layers in enumerate(planes):
            ends = cut.ends([plane + 1 for plane in sorted(set(of_layers.values()))])
            self.bands.append(Bands(ends, cut.verified_after))
            for layer, plane in of_layers.items():
                band = next(band for band, end in enumerate(ends) if plane < end)
                self._where.setdefault(layer, []).append((group, band))
        self._all = [(group, len(bands.ends) - 1) for group, bands in enumerate(self.bands)]
        self._watched: list[tuple[int, StreamHandle]] = []
        """The copies of the watched loads, with their groups."""
        self._ordered: set[tuple[int, int, int]] = set()
        self._reached: dict[tuple[int, int], int] = {}
        """By the index of a watched copy, and a stream, the last band after which the stream's work runs."""

    def watch(self, loadings: Sequence[Loading]) -> None:
        """Watches the verified loads of a step that calls order() for each layer. The loads of the step before are
        forgotten."""
        self._watched, self._ordered, self._reached = [], set(), {}
        for loading in loadings:
            for own, _, handle in loading.copies:
                whole = whole_of(handle)
                if any(known is whole for _, known in self._watched):
                    continue  # loads may share a copy
                assert isinstance(whole, StreamHandle), "watched loads are a GPU's"
                self._watched.append((own.group, whole))

    def order(self, layer: str, stream: int) -> None:
        """Work that is put on `stream` from now on runs after the copies of the layer's KV. A layer that is in no group
        shares the KV of another layer: the work then runs after all copies."""
        if not self._watched:
            return
        for group, band in self._where.get(layer, self._all):
            if (group, band, stream) not in self._ordered:
                self._ordered.add((group, band, stream))
                self._order(group, band, stream)

    def _order(self, group: int, band: int, stream: int) -> None:
        """Asks a copier once for bands that it has joined."""
        for at, (of, handle) in enumerate(self._watched):
            if of == group and self._reached.get((at, stream), -1) < band:
                self._reached[at, stream] = handle.order(stream, band)

    @property
    def any_watched(self) -> bool:
        return bool(self._watched)

    @property
    def all_ordered(self) -> bool:
        asked = {(group, band) for group, band, _ in self._ordered}
        return all(
            (group, band) in asked
            for group, _ in self._watched
            for band in range(len(self.bands[group].ends))
        )


# --------------------------------------------------------------------------------
# How many CPU threads a worker may use for hashing, so that other programs on the machine keep cores.

MOST_HASH_THREADS = 8
"""The largest number that was measured on an H200's host (bench/LOG.md)."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's CPU quota (control groups, version 2): microseconds of CPU, or "max", and of time."""


def hash_threads(cores: float) -> int:
    """Half of a worker's `cores`, at least 1 and at most MOST_HASH_THREADS."""
    return max(1, min(MOST_HASH_THREADS, int(cores / 2)))


def cores_of(workers: int, *, bound: int | None = None, installed: int | None = None, quota: Path = QUOTA) -> float:
    """CPU cores available to each of `workers` workers on this machine: its share of the machine and of the
    container's quota, but no more cores than it is `bound` to. `bound`, `installed` None: as the operating system
    reports for this process."""
    if bound is None:
        bound = len(os.sched_getaffinity(0))
    shared = min(installed or os.cpu_count() or 1, _cores_within(quota))
    return min(bound, shared / workers)


def _cores_within(quota: Path) -> float:
    try:
        used, period = quota.read_text().split()
        return int(used) / int(period)
    except (OSError, ValueError):
        return float("inf")  # no such control group, or "max"
