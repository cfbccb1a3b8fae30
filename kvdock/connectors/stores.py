"""Stores: which chunks of a request are offered, for which of them the server has capacity, and when they are copied.

    engine thread      begin_store ─► offer ─► store
    "kvdock-store"                              └► for each batch: reserve ─► carry out, with a plan or without one

Chunks are offered once they are complete, in order. Chunks for which the server had no capacity are offered again when
the request has more, or when it ends; until then nothing behind them is stored, because no lookup could find it behind
a gap.

Invariant: each batch of an offer is carried out exactly once, with a plan or without one, whatever fails.

Thread safety: every method may be called from any thread; methods that call the server (marked "Background") do not
hold the lock of the requests during the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

from msgspec import UNSET, UnsetType

from kvdock.connectors.background import Background
from kvdock.connectors.interface import BlocksRead, GroupBlocks
from kvdock.connectors.plans import StorePiece, StorePlan
from kvdock.connectors.requests import Requests, RequestState
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import Manifest, Reserve
from kvdock.protocol.wire_types import MAX_KEYS, MAX_STORE_KEYS

NAMED_STORE_KEYS = 64
"""The most chunks of a batch whose names are sent: the server limits how many numbers a body has."""
LAST_STORE_KEYS = 32
"""The most chunks of a batch when a request ends: if the engine gives one of its blocks to another request, the whole
batch is lost."""


@dataclass(frozen=True)
class StoreBatch:
    """Consecutive chunks for one reservation: the engine has the blocks of the same groups for each of them."""

    store_id: str
    groups: tuple[int, ...]
    first: int
    """The number of its first chunk in the request."""
    parent: bytes | None
    keys: tuple[bytes, ...]
    block_ids: tuple[tuple[tuple[int, ...], ...], ...] = field(repr=False)
    """For each key and group, the ids of its blocks."""


@dataclass(frozen=True)
class StoreOffer:
    """Chunks to reserve and store. `reads`: all blocks that are read for them, by group of the manifest. `traceparent`:
    see Reserve."""

    request_id: str
    request: RequestState
    batches: tuple[StoreBatch, ...]
    reads: BlocksRead
    traceparent: str = ""
    names: Sequence[BlockNames | None] = ()
    """The names by which routers know these chunks, from the first one of the first batch on."""

    def names_of(self, batch: StoreBatch) -> list[BlockNames] | UnsetType:
        """The names of all chunks of the batch; UNSET unless all are known."""
        start = batch.first - self.batches[0].first
        known = [name for name in self.names[start : start + len(batch.keys)] if name is not None]
        return known if len(known) == len(batch.keys) else UNSET

    @property
    def attachment(self) -> Attachment:
        return self.request.attachment


CarryOut = Callable[[StoreBatch, StorePlan | None], None]
"""Copies a batch by its plan. None: the server has all of it or no capacity, or the batch is not wanted any more."""


class Stores:
    def __init__(self, requests: Requests) -> None:
        self._requests, self._lock = requests, requests.lock
        self._session = session = requests.session
        self._chunk_tokens = session.manifest.chunk_tokens
        self._batches = _Batches(session.manifest, session.identity.member)
        self._storing = Background("kvdock-store")

    # ------------------------------------------------------------------ what is offered

    def begin_store(
        self, request_id: str, tokens: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> StoreOffer | None:
        """Offers the complete chunks of [0, computed_tokens) that were not offered before, at most MAX_KEYS. None:
        there are none, or the server is lost."""
        ready = computed_tokens // self._chunk_tokens
        with self._lock:
            known = self._requests.get(request_id)
            if known is not None and ready <= max(known.store.offered, known.store.fell_short_at):
                return None
            request = self._requests.known(request_id, tokens) if ready else None
            if request is None:
                return None
            progress, chain = request.store, request.chain
            first, end = progress.offered, min(ready, len(chain.keys), progress.offered + MAX_KEYS)
            if end <= first:
                return None
            progress.offered, progress.fell_short_at = end, 0
            at_most = NAMED_STORE_KEYS if request.attachment.wants_blocks else MAX_STORE_KEYS
            batches = self._batches.of(chain.keys, block_ids, first, end, at_most=at_most, parent=chain.parent)
        return self._offer(request_id, request, batches)

    def begin_last_store(self, request_id: str, block_ids: GroupBlocks, computed_tokens: int) -> StoreOffer | None:
        """To be called when the request ends or is preempted, before it is forgotten: offers again the chunks of [0,
        computed_tokens) that could not be stored; None: there are none. The offer ends before the first chunk that
        lacks a block of full attention in `block_ids`."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or not request.store.fell_short_at:
                return None
            progress, chain = request.store, request.chain
            first, end = progress.offered, min(progress.fell_short_at, computed_tokens // self._chunk_tokens)
            progress.fell_short_at = 0
            batches = self._batches.of(
                chain.keys, block_ids, first, end, at_most=LAST_STORE_KEYS, parent=chain.parent
            )
        return self._offer(request_id, request, batches)

    def _offer(self, request_id: str, request: RequestState, batches: tuple[StoreBatch, ...]) -> StoreOffer | None:
        if not batches or not request.attachment.acquire():
            return None
        observer, first = self._requests.callbacks.observer, batches[0].first
        end = batches[-1].first + len(batches[-1].keys)
        observer.known(request_id, request.chain.keys[:end])
        names = observer.names(request_id, first, end) if request.attachment.wants_blocks else ()
        traceparent = self._requests.callbacks.traceparent_of(request_id)
        return StoreOffer(request_id, request, batches, self._batches.blocks_read(batches), traceparent, names)

    def offer_again(self, request_ids: Iterable[str]) -> None:
        """Chunks that these requests have offered were not computed, or are damaged: all their chunks are offered
        again."""
        with self._lock:
            for request_id in request_ids:
                if request_id in self._requests:
                    self._requests[request_id].store.restart()

    # ------------------------------------------------------------------ what is stored

    def store(
        self, offer: StoreOffer, carry_out: CarryOut, is_wanted: Callable[[StoreBatch], bool] = lambda batch: True
    ) -> Future[None]:
        """In the background, reserves each batch and calls `carry_out` with its plan; without one if `is_wanted` is
        false by then. The future is done after the last batch."""
        for batch in offer.batches:
            self._storing.run(self._store, offer, batch, carry_out, is_wanted)
        return self._storing.run(offer.attachment.release)

    def _store(
        self, offer: StoreOffer, batch: StoreBatch, carry_out: CarryOut, is_wanted: Callable[[StoreBatch], bool]
    ) -> None:
        plan = None
        try:
            if is_wanted(batch):
                plan = self.reserve(offer, batch)
            else:
                self._requests.withdraw_promise(offer.attachment, offer.request_id, offer.request)
        finally:
            carry_out(batch, plan)

    def reserve(self, offer: StoreOffer, batch: StoreBatch) -> StorePlan | None:
        """Background: asks the server for slots. None when there is nothing to write: others have stored or are writing
        all of the batch, the server has no capacity, refuses or is lost, or a chunk before the batch is missing."""
        body = Reserve(
            session=offer.attachment.session,
            member=offer.attachment.member,
            store=batch.store_id,
            parent=batch.parent.hex() if batch.parent is not None else None,
            keys=b"".join(batch.keys),
            groups=list(batch.groups),
            traceparent=offer.traceparent or UNSET,
            beginnings=offer.request.beginnings or UNSET,
            chunks_before=batch.first,
            blocks=offer.names_of(batch),
        )
        is_there = self._session.attachment is offer.attachment  # else blocks would wait for a timeout
        progress = offer.request.store
        with self._lock:
            if not is_there or batch.first > progress.reserved:
                progress.falls_short(min(batch.first, progress.reserved))
                return None
        found = self._requests.callbacks.observer.asking(offer.attachment)
        try:
            answer = self._session.client.reserve(body)
        except (ServerUnavailable, ApiError) as error:
            self._session.lost(offer.attachment, error)
            self._fell_short(offer, batch.first)
            return None
        end = batch.first + len(answer.present) + len(answer.busy) + len(answer.chunks)
        with self._lock:
            progress.reserved = max(progress.reserved, end)
        if answer.limited_by is not None:
            self._fell_short(offer, end)
        found([batch.keys[index] for index in answer.present])
        if answer.reservation is None:
            return None
        pieces = tuple(
            StorePiece(chunk.index, group, tuple(part for part in chunk.parts if part.group == group), blocks)
            for chunk in answer.chunks
            for group, blocks in zip(batch.groups, batch.block_ids[chunk.index], strict=True)
        )
        return StorePlan(offer.request_id, answer.reservation, len(answer.chunks) * self._chunk_tokens, pieces)

    def _fell_short(self, offer: StoreOffer, chunk: int) -> None:
        """The chunks from `chunk` on were not reserved: withdraws the promise to store them."""
        with self._lock:
            offer.request.store.falls_short(chunk)
        self._requests.withdraw_promise(offer.attachment, offer.request_id, offer.request)

    def abort(self, attachment: Attachment, plan: StorePlan) -> None:
        """Gives back, in the background, a plan that no worker has got. Background calls run in order, so this happens
        before the same chunks are reserved again."""
        self._storing.run(self._session.abort, attachment, plan.reservation)

    # ------------------------------------------------------------------ ends

    def run(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Runs a call to the server in the background, after the stores that were started before."""
        return self._storing.run(call, *args)

    def forget(self, request_id: str) -> None:
        """The request ends: withdraws its promise of the chunks that it has not offered."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is not None and request.store.has_pending_promise:  # after the reservations of its chunks
            self._storing.run(self._requests.withdraw_promise, request.attachment, request_id, request)

    def close(self) -> None:
        """Waits for the background calls."""
        self._storing.close()


class _Batches:
    """Cuts the chunks that a request stores into batches, one for each reservation. `member`: this process's member id,
    with which the ids of its stores begin."""

    def __init__(self, manifest: Manifest, member: str) -> None:
        self._per_chunk = [manifest.chunk_tokens // size for size in manifest.block_sizes]
        self._full = {at for at, group in enumerate(manifest.groups) if group.kind == "full"}
        self._member = member
        self._made = 0

    def of(
        self, keys: Sequence[bytes], block_ids: GroupBlocks, first: int, end: int, *, at_most: int = MAX_STORE_KEYS,
        parent: bytes | None = None,
    ) -> tuple[StoreBatch, ...]:
        """Chunks [first, end) of a chain whose first key has `parent`. A batch ends after `at_most` chunks, and where
        the set of groups changes for which the engine still has all blocks. The last batch ends before the first chunk
        that lacks a block of full attention."""
        return tuple(self._cut(keys, block_ids, first, end, at_most, parent))

    def _cut(
        self, keys: Sequence[bytes], block_ids: GroupBlocks, first: int, end: int, at_most: int, parent: bytes | None
    ) -> Iterator[StoreBatch]:
        chunks: list[dict[int, tuple[int, ...]]] = []
        for chunk in range(first, end):
            whole: dict[int, tuple[int, ...]] = {}
            for group, (column, count) in enumerate(zip(block_ids, self._per_chunk, strict=True)):
                blocks = tuple(block for block in column[chunk * count : (chunk + 1) * count] if block is not None)
                if len(blocks) == count:
                    whole[group] = blocks
            chunks.append(whole)
        kinds = groupby(enumerate(chunks, first), key=lambda one: ((one[0] - first) // at_most, tuple(one[1])))
        for (_, groups), run in kinds:
            if not self._full <= set(groups):
                return  # no lookup finds a chunk that lacks full attention, nor a chunk behind it
            members = list(run)
            start, stop = members[0][0], members[-1][0] + 1
            self._made += 1
            yield StoreBatch(
                f"{self._member}-{self._made}", groups, start, keys[start - 1] if start else parent,
                tuple(keys[start:stop]), tuple(tuple(blocks.values()) for _, blocks in members),
            )

    def blocks_read(self, batches: Sequence[StoreBatch]) -> BlocksRead:
        """All blocks that the batches read, by group."""
        reads: list[list[int]] = [[] for _ in self._per_chunk]
        for batch in batches:
            for of_chunk in batch.block_ids:
                for group, blocks in zip(batch.groups, of_chunk, strict=True):
                    reads[group] += blocks
        return tuple(tuple(blocks) for blocks in reads)
