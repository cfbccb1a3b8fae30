"""Leases of chunks that other nodes read in this node's pool, by the engine of the tier `peers`.

The mover holds each of them as it holds what it writes to a tier, so nothing of it is evicted. The other node releases
its lease when it has read; if it does not, because it is dead or cut off, the lease ends after LEASE_S. A read that
goes on for longer may find other bytes: whoever reads compares the checksum.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.mover_schemas import PeerAnswer, PeerQuestion
from kvdock.protocol.peer_schemas import PeerPart, PeerRead, PeerReadAnswer
from kvdock.protocol.schemas import Hold, Part
from kvdock.shm.errors import ShmError
from kvdock.tiers.mover.agreement import Agreement
from kvdock.tiers.mover.namespaces import NamespaceSession, NamespaceSessions
from kvdock.tiers.tier import SharesPool

log = logging.getLogger("kvdock.tiers")

LEASE_S = 10.0
THREADS = 2


@dataclass(frozen=True)
class _Lease:
    space: NamespaceSession
    attachment: Attachment
    grant: str
    until_s: float


class PeerLeases:
    """`answered`: called from a thread of its own with each answer. `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, sessions: NamespaceSessions, client: Client, agreement: Agreement,
        answered: Callable[[PeerAnswer], None], clock: Callable[[], float],
    ) -> None:
        self._sessions, self._client, self._agreement = sessions, client, agreement
        self._answered, self._clock = answered, clock
        self.tier: SharesPool | None = None
        """None: it is not open yet."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._threads = ThreadPoolExecutor(THREADS, "kvdock-for-peers")

    def ask(self, question: PeerQuestion) -> None:
        self._threads.submit(self._answer, question)

    def is_busy(self, space: NamespaceSession) -> bool:
        with self._lock:
            return any(lease.space is space for lease in self._leases.values())

    def end_late(self) -> None:
        """Ends the leases whose time is over."""
        with self._lock:
            late = [number for number, lease in self._leases.items() if lease.until_s <= self._clock()]
        if late:
            log.info("%d leases of peers were not released, and have ended", len(late))
            self._threads.submit(self._release, late)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            left = list(self._leases)
        self._release(left)

    def _answer(self, question: PeerQuestion) -> None:
        answer = PeerReadAnswer()
        try:
            self._release(question.read.releases)
            answer = self._read(question.read)
        except (ServerUnavailable, ApiError, ShmError) as error:
            log.info("a peer is not answered: %s", error)
        except Exception:  # whatever it was, the peer waits for an answer
            log.exception("a peer is not answered")
        self._answered(PeerAnswer(question.number, answer))

    def _read(self, read: PeerRead) -> PeerReadAnswer:
        """Raises ServerUnavailable, ApiError, ShmError; ValueError: the address is none."""
        assert isinstance(read.keys, bytes), "the server has joined them"
        digest = bytes.fromhex(read.namespace)
        space, tier = self._sessions.of(digest), self.tier
        if space is None or tier is None or not read.keys or self._agreement.generation(digest) != read.generation:
            return PeerReadAnswer()
        attachment = space.session.attachment
        if attachment is None or not attachment.acquire():
            return PeerReadAnswer()
        number = next(self._numbers)
        try:
            held = self._client.hold(Hold(
                session=attachment.session, member=attachment.member, keys=read.keys, request=f"peer-{number}",
            ))
        except BaseException:
            attachment.release()
            raise
        if held.lease is None or not attachment.grants.start(held.lease):
            attachment.release()
            return PeerReadAnswer()
        with self._lock:
            self._leases[number] = _Lease(space, attachment, held.lease, self._clock() + LEASE_S)
        try:
            parts = _parts(space, attachment, held.chunks)
            if not read.address:
                return PeerReadAnswer(chunks=parts)
            answer = PeerReadAnswer(engine=tier.admit(read.address), lease=number, lease_s=LEASE_S, chunks=parts)
            number = 0
            return answer
        finally:
            if number:
                self._release([number])

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._lock:
                lease = self._leases.pop(number, None)
            if lease is None:
                continue
            self._client.release_later(lease.grant, lease.attachment.session, [0])
            lease.attachment.grants.stop(lease.grant)
            lease.attachment.release()
            try:
                self._client.flush(lease.attachment.session)
            except (ServerUnavailable, ApiError) as error:
                lease.space.session.lost(lease.attachment, error)


def _parts(space: NamespaceSession, attachment: Attachment, chunks: Sequence[Sequence[Part]]) -> list[list[PeerPart]]:
    """Raises AttachError, ServerUnavailable, ApiError."""
    return [
        [
            PeerPart(
                part.group, part.writer, space.address(attachment, part.segment, part.offset, part.length), part.length,
                f"{part.checksum_value:016x}",
            )
            for part in parts
        ]
        for parts in chunks
    ]
