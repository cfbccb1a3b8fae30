"""The worker half: carries out plans with the copier, and says when it is done.

Each rank has one. It decides nothing: a plan names slots, blocks and checksums. Its word to the
server (release, commit) follows the copy's observed completion (W1, W2); a chunk whose bytes do not
hash to what the lease promised is reported and never counted as loaded (W3).

Thread safety: load() and store() may run at the same time, one of each; a copier of its own for each
group and direction keeps a load from waiting behind stores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvdock.api.client import Client
from kvdock.api.errors import ApiError, ServerUnavailable
from kvdock.api.schemas import Abort, Commit, Part, PartDone, ReportMismatch, WritePart
from kvdock.connectors.plans import LoadPiece, LoadPlan, StorePiece, StorePlan
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.datapath.copy import Copier, CopyHandle, PartCopy, PartResult
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.devices import CPU, Device
from kvdock.datapath.errors import CopyError, CudaError, DatapathError
from kvdock.datapath.layout import PagedLayout

log = logging.getLogger("kvdock.connector")

CallFailed = (ServerUnavailable, ApiError)
CopyFailed = (DatapathError, CopyError, CudaError, OSError, MemoryError)

Piece = TypeVar("Piece", LoadPiece, StorePiece)
AnyPart = TypeVar("AnyPart", Part, WritePart)


class LayoutMismatch(Exception):
    """The engine's KV layout does not yield the parts that the manifest promises."""


class WorkerHalf:
    """`layouts[g]` says where KV group g has its blocks, which are on `device`; `rank` is this worker's
    tensor-parallel rank; `threads` copy when the blocks are in host memory, and `tuning` is how GPUs do it (None:
    as measured).

    `stream`: where the engine reads and writes its blocks (a CUstream as an integer): copies come after what is on
    it when they begin. None on the CPU, and when every step has ended before its blocks are handed over.
    """

    def __init__(
        self,
        session: EngineSession,
        layouts: Sequence[PagedLayout],
        *,
        rank: int = 0,
        device: Device = CPU,
        stream: int | None = None,
        threads: int = 2,
        tuning: CopyTuning | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        manifest = session.manifest
        if len(layouts) != len(manifest.groups):
            raise LayoutMismatch(f"layouts: found {len(layouts)}, wanted one for each of {len(manifest.groups)} groups")
        for group, layout in enumerate(layouts):
            blocks, rest = divmod(manifest.chunk_tokens, layout.block_tokens)
            found, wanted = layout.part_bytes(blocks), manifest.groups[group].part_bytes
            if rest or found != wanted:
                raise LayoutMismatch(
                    f"part bytes of group {group}: found {found} ({blocks} blocks of {layout.block_bytes} bytes), "
                    f"wanted {wanted} as the manifest says"
                )
            if layout.token_order not in (manifest.token_order, "ND"):
                raise LayoutMismatch(f"token order: found {layout.token_order}, wanted {manifest.token_order}")
        self.session, self.rank, self._stream = session, rank, stream
        self._clock = clock

        chunk_tokens = manifest.chunk_tokens
        self._loaders: list[Copier]
        self._storers: list[Copier]
        self._loaders, self._storers = (
            device.open_copiers(layouts, chunk_tokens=chunk_tokens, threads=threads, tuning=tuning) for _ in range(2)
        )

    @property
    def client(self) -> Client:
        return self.session.client

    def close(self) -> None:
        for copier in (*self._loaders, *self._storers):
            copier.close()

    # ------------------------------------------------------------------ load

    def load(self, attachment: Attachment, plan: LoadPlan) -> int:
        """Fills the plan's blocks. Returns the tokens valid from token 0 on: short when a chunk failed.

        Never raises for a server or a slot that is not there: what could not be had is recomputed.
        """
        if not attachment.grants.begin(plan.lease):
            return plan.local_tokens
        began = self._clock()
        failed: list[int] = []
        try:
            failed = self._scatter(attachment, plan)
        except CopyFailed as error:
            log.warning("load request=%s failed: %s", plan.request_id, error)
            failed = [piece.chunk for piece in plan.pieces]
        except CallFailed as error:
            self.session.lost(attachment, error)
            failed = [piece.chunk for piece in plan.pieces]
        finally:
            # The copy has ended, or was never submitted: either way the word may be given.
            self.client.release_later(plan.lease, attachment.session, [self.rank])
            attachment.grants.end(plan.lease)
        valid = min([index * plan.chunk_tokens for index in failed], default=plan.hit_tokens)
        valid = max(plan.local_tokens, min(valid, plan.hit_tokens))
        self._log("load", plan.request_id, valid - plan.local_tokens, self._bytes(plan.pieces), began)
        return valid

    def _scatter(self, attachment: Attachment, plan: LoadPlan) -> list[int]:
        """Indices of the chunks that failed, in whatever group."""
        results = self._copy(plan.pieces, lambda group, pieces: self._loaders[group].scatter(
            [self._load_copy(attachment, piece) for piece in pieces], after=self._stream
        ))
        failed = sorted({piece.chunk for piece, result in results if not result.ok})
        if failed:
            log.error("load request=%s: checksum mismatch in chunks %s, recomputing", plan.request_id, failed)
            self.client.mismatch(ReportMismatch(session=attachment.session, lease=plan.lease, chunks=failed))
        return failed

    def _load_copy(self, attachment: Attachment, piece: LoadPiece) -> PartCopy:
        # With one writer (MLA) every rank reads its part; else each reads its own.
        part = _written_by(self.rank if self.session.manifest.writers > 1 else 0, piece.parts)
        return PartCopy(
            slot=self._address(attachment, part.segment, part.offset, part.length),
            block_ids=piece.block_ids,
            skip_blocks=piece.skip_blocks,
            checksum=part.checksum_value,
        )

    def settle(self, attachment: Attachment) -> None:
        """Sends the words that load() queued, once the engine has its blocks: no load waits for it."""
        if self.session.attachment is not attachment:
            return  # nobody listens. Should that server return, it asks about the lease, and the book says done.
        try:
            self.client.flush(attachment.session)
        except CallFailed as error:
            log.info("releases not delivered: %s", error)
            self.session.lost(attachment, error)

    # ------------------------------------------------------------------ store

    def store(self, attachment: Attachment, plan: StorePlan) -> int:
        """Copies the plan's blocks into their slots and commits. Returns how many chunks are ready by then."""
        if not attachment.grants.begin(plan.reservation):
            return 0
        began = self._clock()
        ready = 0
        try:
            results = self._copy(plan.pieces, lambda group, pieces: self._storers[group].gather(
                [self._store_copy(attachment, piece) for piece in pieces], after=self._stream
            ))
            done = [PartDone(piece.chunk, piece.group, f"{result.checksum:016x}") for piece, result in results]
            body = Commit(session=attachment.session, rank=self.rank, parts=done)
            ready = self.client.commit(plan.reservation, body).ready
            self._log("store", plan.request_id, plan.tokens, self._bytes(plan.pieces), began)
        except CopyFailed as error:
            log.warning("store request=%s failed: %s", plan.request_id, error)
            self.abort(attachment, plan, [self.rank])
        except CallFailed as error:
            log.warning("store request=%s not committed: %s", plan.request_id, error)
            self.session.lost(attachment, error)
        finally:
            attachment.grants.end(plan.reservation)
        return ready

    def _store_copy(self, attachment: Attachment, piece: StorePiece) -> PartCopy:
        part = _written_by(self.rank, piece.parts)
        return PartCopy(
            slot=self._address(attachment, part.segment, part.offset, part.length), block_ids=piece.block_ids
        )

    def abort(self, attachment: Attachment, plan: StorePlan, ranks: Sequence[int]) -> None:
        """Says that `ranks` will not store: nothing of the plan is published."""
        try:
            self.client.abort(plan.reservation, Abort(session=attachment.session, ranks=list(ranks)))
        except CallFailed as error:
            log.info("abort of reservation %s not delivered: %s", plan.reservation, error)
            self.session.lost(attachment, error)

    # ------------------------------------------------------------------ both

    def _copy(
        self, pieces: Sequence[Piece], submit: Callable[[int, list[Piece]], CopyHandle]
    ) -> list[tuple[Piece, PartResult]]:
        """Copies of all groups side by side. Returns, or raises, once every one that was submitted has ended."""
        groups: dict[int, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.group, []).append(piece)
        submitted: list[tuple[list[Piece], CopyHandle]] = []
        try:
            for group, members in groups.items():
                submitted.append((members, submit(group, members)))
        finally:
            for _, handle in submitted:
                handle.wait(None)
        return [
            done for members, handle in submitted for done in zip(members, handle.result(), strict=True)
        ]

    def _address(self, attachment: Attachment, segment: int, offset: int, length: int) -> int:
        self.session.ensure_segment(attachment, segment)
        return attachment.segments.address(segment, offset, length)

    def _bytes(self, pieces: Iterable[LoadPiece | StorePiece]) -> int:
        """That this rank copies."""
        return sum(self.session.manifest.groups[piece.group].part_bytes for piece in pieces)

    def _log(self, verb: str, request_id: str, tokens: int, size_bytes: int, began: float) -> None:
        took_s = self._clock() - began
        log.info(
            "%s request=%s tokens=%d bytes=%d ms=%.2f gb_s=%.2f",
            verb, request_id, tokens, size_bytes, took_s * 1e3, size_bytes / max(took_s, 1e-9) / 1e9,
        )


def _written_by(writer: int, parts: Iterable[AnyPart]) -> AnyPart:
    return next(part for part in parts if part.writer == writer)
