"""The worker half: carries out plans with the copier, and says when it is done.

Each rank has one. It decides nothing: a plan names slots, blocks and checksums. Its word to the
server (release, commit) follows the copy's observed completion (W1, W2); a chunk whose bytes do not
hash to what the lease promised is reported and never counted as loaded (W3).

Thread safety: load() and store() may run at the same time, one of each; a copier of its own for each
direction keeps a load from waiting behind stores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvdock.api.client import Client
from kvdock.api.errors import ApiError, ServerUnavailable
from kvdock.api.schemas import Abort, Commit, PartDone, ReportMismatch
from kvdock.connectors.plans import LoadChunk, LoadPlan, StoreChunk, StorePlan
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.datapath.copy import Copier, CpuCopier, PartCopy
from kvdock.datapath.errors import CopyError, DatapathError
from kvdock.datapath.layout import PagedLayout

log = logging.getLogger("kvdock.connector")

CallFailed = (ServerUnavailable, ApiError)
CopyFailed = (DatapathError, CopyError, OSError, MemoryError)


class LayoutMismatch(Exception):
    """The engine's KV layout does not yield the parts that the manifest promises."""


class WorkerHalf:
    """`group` is the KV group this layout holds; `rank` this worker's tensor-parallel rank."""

    def __init__(
        self,
        session: EngineSession,
        layout: PagedLayout,
        *,
        rank: int = 0,
        group: int = 0,
        threads: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        manifest = session.manifest
        blocks, rest = divmod(manifest.chunk_tokens, layout.block_tokens)
        wanted = manifest.groups[group].part_bytes
        if rest or layout.part_bytes(blocks) != wanted:
            raise LayoutMismatch(
                f"part bytes: found {layout.part_bytes(blocks)} ({blocks} blocks of {layout.block_bytes} bytes), "
                f"wanted {wanted} as the manifest says"
            )
        if layout.token_order not in (manifest.token_order, "ND"):
            raise LayoutMismatch(f"token order: found {layout.token_order}, wanted {manifest.token_order}")
        self.session, self.layout, self.rank, self.group = session, layout, rank, group
        self._clock = clock
        self._loader: Copier = CpuCopier(layout, threads=threads)
        self._storer: Copier = CpuCopier(layout, threads=threads)

    @property
    def client(self) -> Client:
        return self.session.client

    def close(self) -> None:
        self._loader.close()
        self._storer.close()

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
            failed = [chunk.index for chunk in plan.chunks]
        except CallFailed as error:
            self.session.lost(attachment, error)
            failed = [chunk.index for chunk in plan.chunks]
        finally:
            # The copy has ended, or was never submitted: either way the word may be given.
            self.client.release_later(plan.lease, attachment.session, [self.rank])
            attachment.grants.end(plan.lease)
        valid = min([index * plan.chunk_tokens for index in failed], default=plan.hit_tokens)
        valid = max(plan.local_tokens, min(valid, plan.hit_tokens))
        self._log("load", plan.request_id, valid - plan.local_tokens, self._bytes(len(plan.chunks)), began)
        return valid

    def _scatter(self, attachment: Attachment, plan: LoadPlan) -> list[int]:
        """Indices of the chunks that failed."""
        copies = [self._load_copy(attachment, chunk) for chunk in plan.chunks]
        results = self._loader.scatter(copies).result()
        failed = [chunk.index for chunk, result in zip(plan.chunks, results, strict=True) if not result.ok]
        if failed:
            log.error("load request=%s: checksum mismatch in chunks %s, recomputing", plan.request_id, failed)
            self.client.mismatch(ReportMismatch(session=attachment.session, lease=plan.lease, chunks=failed))
        return failed

    def _load_copy(self, attachment: Attachment, chunk: LoadChunk) -> PartCopy:
        # With one writer (MLA) every rank reads its part; else each reads its own.
        writer = self.rank if self.session.manifest.writers > 1 else 0
        part = next(p for p in chunk.parts if p.group == self.group and p.writer == writer)
        return PartCopy(
            slot=self._address(attachment, part.segment, part.offset, part.length),
            block_ids=chunk.block_ids,
            skip_blocks=chunk.skip_blocks,
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
            copies = [self._store_copy(attachment, chunk) for chunk in plan.chunks]
            results = self._storer.gather(copies).result()
            done = [
                PartDone(chunk.index, self.group, f"{result.checksum:016x}")
                for chunk, result in zip(plan.chunks, results, strict=True)
            ]
            body = Commit(session=attachment.session, rank=self.rank, parts=done)
            ready = self.client.commit(plan.reservation, body).ready
            self._log("store", plan.request_id, plan.tokens, self._bytes(len(plan.chunks)), began)
        except CopyFailed as error:
            log.warning("store request=%s failed: %s", plan.request_id, error)
            self._abort(attachment, plan)
        except CallFailed as error:
            log.warning("store request=%s not committed: %s", plan.request_id, error)
            self.session.lost(attachment, error)
        finally:
            attachment.grants.end(plan.reservation)
        return ready

    def _store_copy(self, attachment: Attachment, chunk: StoreChunk) -> PartCopy:
        part = next(p for p in chunk.parts if p.group == self.group and p.writer == self.rank)
        return PartCopy(
            slot=self._address(attachment, part.segment, part.offset, part.length), block_ids=chunk.block_ids
        )

    def _abort(self, attachment: Attachment, plan: StorePlan) -> None:
        try:
            self.client.abort(plan.reservation, Abort(session=attachment.session, ranks=[self.rank]))
        except CallFailed as error:
            log.info("abort of reservation %s not delivered: %s", plan.reservation, error)
            self.session.lost(attachment, error)

    # ------------------------------------------------------------------ both

    def _address(self, attachment: Attachment, segment: int, offset: int, length: int) -> int:
        self.session.ensure_segment(attachment, segment)
        return attachment.segments.address(segment, offset, length)

    def _bytes(self, chunks: int) -> int:
        return chunks * self.session.manifest.groups[self.group].part_bytes

    def _log(self, verb: str, request_id: str, tokens: int, size_bytes: int, began: float) -> None:
        took_s = self._clock() - began
        log.info(
            "%s request=%s tokens=%d bytes=%d ms=%.2f gb_s=%.2f",
            verb, request_id, tokens, size_bytes, took_s * 1e3, size_bytes / max(took_s, 1e-9) / 1e9,
        )
