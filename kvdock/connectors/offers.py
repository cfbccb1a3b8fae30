"""What requests store: which chunks are offered, and what of it the server has room for.

Chunks are offered once they are complete, in order. What found no room is offered again when the request has more, or
when it ends; until then nothing behind it is stored, for nobody could find it behind a gap.

Thread safety: as kvdock/connectors/scheduler.py, whose requests these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET

from kvdock.connectors.interface import GroupBlocks
from kvdock.connectors.plans import LAST_STORE_KEYS, Batches, StoreBatch, StorePiece, StorePlan
from kvdock.connectors.requests import ChunkObserver, Requests, RequestState, StoreOffer
from kvdock.connectors.session import Attachment, tell
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.kv_events import BlockNames
from kvdock.protocol.schemas import Reserve
from kvdock.protocol.wire_types import MAX_KEYS


class StoreOffers:
    """`traceparent_of`: as SchedulerConnector has it. `computes`: lookups promise to store what they do not find."""

    def __init__(
        self, requests: Requests, observer: ChunkObserver, traceparent_of: Callable[[str], str], *, computes: bool
    ) -> None:
        self._traceparent_of = traceparent_of
        self._requests, self._lock, self._observer, self._computes = requests, requests.lock, observer, computes
        self.session = session = requests.session
        self._chunk_tokens = session.manifest.chunk_tokens
        self._batches = Batches(session.manifest, session.identity.member)

    def begin_store(
        self, request_id: str, tokens: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> StoreOffer | None:
        """The whole chunks of [0, computed_tokens) not offered before; None when there are none."""
        ready = computed_tokens // self._chunk_tokens
        with self._lock:
            known = self._requests.get(request_id)
            if known is not None and ready <= max(known.offered, known.fell_short_at):
                return None
            request = self._requests.known(request_id, tokens) if ready else None
            if request is None:
                return None
            first, end = request.offered, min(ready, len(request.chain.keys), request.offered + MAX_KEYS)
            if end <= first:
                return None
            request.offered, request.fell_short_at = end, 0
            chain = request.chain
            batches = self._batches.of(chain.keys, block_ids, first, end, parent=chain.parent)
        return self._offer(request_id, request, batches)

    def begin_last_store(self, request_id: str, block_ids: GroupBlocks, computed_tokens: int) -> StoreOffer | None:
        """The request ends or is preempted: what of [0, computed_tokens) found no room; None when all of it did. A
        chunk of which `block_ids` lacks a block ends it. Afterwards finished() is to be called."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or not request.fell_short_at:
                return None
            first, end = request.offered, min(request.fell_short_at, computed_tokens // self._chunk_tokens)
            request.fell_short_at = 0
            chain, most = request.chain, LAST_STORE_KEYS
            batches = self._batches.of(chain.keys, block_ids, first, end, at_most=most, parent=chain.parent)
        return self._offer(request_id, request, batches)

    def _offer(self, request_id: str, request: RequestState, batches: tuple[StoreBatch, ...]) -> StoreOffer | None:
        if not batches or not request.attachment.acquire():
            return None
        self._observer.known(request_id, request.chain.keys[: batches[-1].first + len(batches[-1].keys)])
        names: Sequence[BlockNames | None] = ()
        if request.attachment.wants_blocks:
            names = self._observer.names(request_id, batches[0].first, batches[-1].first + len(batches[-1].keys))
        return StoreOffer(
            request_id, request, batches, self._batches.blocks_read(batches), self._traceparent_of(request_id), names
        )

    def reserve(self, offer: StoreOffer, batch: StoreBatch) -> StorePlan | None:
        """Background: asks for slots. None when the server has it all, has no room, or is not there."""
        body = Reserve(
            session=offer.attachment.session,
            member=offer.attachment.member,
            store=batch.store_id,
            parent=batch.parent.hex() if batch.parent is not None else None,
            keys=b"".join(batch.keys),
            groups=list(batch.groups),
            traceparent=offer.traceparent or UNSET,
            blocks=offer.names_of(batch),
        )
        is_there = self.session.attachment is offer.attachment  # else the engine's blocks do not wait for a timeout
        with self._lock:
            if not is_there or batch.first > offer.request.reserved:
                offer.request.falls_short(min(batch.first, offer.request.reserved))
                return None
        found = self._observer.asking(offer.attachment)
        try:
            answer = self.session.client.reserve(body)
        except (ServerUnavailable, ApiError) as error:
            self.session.lost(offer.attachment, error)
            self._fell_short(offer, batch.first)
            return None
        end = batch.first + len(answer.present) + len(answer.busy) + len(answer.chunks)
        with self._lock:
            offer.request.reserved = max(offer.request.reserved, end)
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
        """From `chunk` on there was no room."""
        with self._lock:
            offer.request.falls_short(chunk)
        self.withdraw(offer.attachment, offer.request_id, offer.request)

    def offer_anew(self, request_ids: Iterable[str]) -> None:
        """What these requests have offered, and not stored yet, is not there, or is damaged: all is offered again."""
        with self._lock:
            for request_id in request_ids:
                if request_id in self._requests:
                    self._requests[request_id].offer_anew()

    def owes(self, request_id: str) -> RequestState | None:
        """The request, if it has promised chunks that it has not offered yet."""
        with self._lock:
            request = self._requests.get(request_id)
            return request if request is not None and request.offered < request.promised else None

    def withdraw(self, attachment: Attachment, request_id: str, request: RequestState | None) -> None:
        """Background: the request stores no more of what it has promised. Nothing happens if it is another one by now,
        which came back and has promised anew. None: nor if it is known at all."""
        if self._computes and self._requests.get(request_id, request) is request:
            tell(self.session, attachment, self.session.client.withdraw, attachment.session, [request_id])

