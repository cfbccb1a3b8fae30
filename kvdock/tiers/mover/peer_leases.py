"""Leases of chunks that other nodes read in this node's pool, by the engine of the tier `peers`.

The mover holds each of them as it holds what it writes to a tier, so nothing of it is evicted. The other node releases
its lease when it has read; if it does not, because it is dead or cut off, the lease ends after LEASE_S. A read that
goes on for longer may find other bytes: whoever reads compares the checksum.

A node that wants what this one is loading from a store asks with a time to wait, and is answered when it has come.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.mover_schemas import PeerAnswer, PeerQuestion, split_keys
from kvdock.protocol.peer_schemas import PeerPart, PeerRead, PeerReadAnswer
from kvdock.protocol.schemas import Hold, Part
from kvdock.protocol.wire_types import KEY_BYTES
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


class _Question(NamedTuple):
    """`until_s`: when it is answered at the latest."""

    question: PeerQuestion
    until_s: float


class PeerLeases:
    """`coming`: returns how many of the first keys of a namespace come to this node, for a caller of that depth.
    `answered`: called from a thread of its own with each answer. `wake`: called when peers begin to wait. `clock`: a
    monotonic clock, in seconds."""

    def __init__(
        self, sessions: NamespaceSessions, client: Client, agreement: Agreement,
        coming: Callable[[bytes, Sequence[bytes], int], int], answered: Callable[[PeerAnswer], None],
        wake: Callable[[], None], clock: Callable[[], float],
    ) -> None:
        self._sessions, self._client, self._agreement = sessions, client, agreement
        self._coming, self._answered, self._wake, self._clock = coming, answered, wake, clock
        self.tier: SharesPool | None = None
        """None: it is not open yet."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._waiting: list[_Question] = []
        """Those whose first chunk is being loaded here."""
        self._news = 0
        """How often progressed() was called."""
        self._threads = ThreadPoolExecutor(THREADS, "kvdock-for-peers")

    def ask(self, question: PeerQuestion) -> None:
        self._threads.submit(self._answer, _Question(question, self._clock() + question.read.wait_s))

    @property
    def has_waiting(self) -> bool:
        """Whether peers wait for chunks that are being loaded: then end_late() is to be called often."""
        return bool(self._waiting)

    def progressed(self) -> None:
        """Chunks have come from a store, or do not come any more. From any thread."""
        with self._lock:
            self._news += 1
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._threads.submit(self._answer, one)

    def is_busy(self, space: NamespaceSession) -> bool:
        with self._lock:
            return any(lease.space is space for lease in self._leases.values())

    def end_late(self) -> None:
        """Ends the leases, and answers the peers, whose time is over."""
        now_s = self._clock()
        with self._lock:
            over = [one for one in self._waiting if one.until_s <= now_s]
            self._waiting = [one for one in self._waiting if one.until_s > now_s]
            late = [number for number, lease in self._leases.items() if lease.until_s <= now_s]
        for one in over:
            self._threads.submit(self._answer, one)
        if late:
            log.info("%d leases of peers were not released, and have ended", len(late))
            self._threads.submit(self._release, late)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            left = list(self._leases)
        self._release(left)

    def _answer(self, asked: _Question) -> None:
        answer, read = PeerReadAnswer(), asked.question.read
        try:
            self._release(read.releases)
            with self._lock:
                news = self._news
            assert isinstance(read.keys, bytes), "the server has joined them"
            digest = bytes.fromhex(read.namespace)
            is_current = self._agreement.generation(digest) == read.generation
            coming = self._coming(digest, split_keys(read.keys), read.depth) if is_current else 0
            if coming and asked.until_s > self._clock():  # the first chunk is not there yet
                self._put_off(asked, news)
                return
            answer = self._read(read)
            answer.coming = coming
        except (ServerUnavailable, ApiError, ShmError) as error:
            log.info("a peer is not answered: %s", error)
        except Exception:  # whatever it was, the peer waits for an answer
            log.exception("a peer is not answered")
        self._answered(PeerAnswer(asked.question.number, answer))

    def _put_off(self, asked: _Question, news: int) -> None:
        """Answers the question once something has come. `news`: what `_news` was before it was found not to be there.
        """
        with self._lock:
            is_still = self._news == news
            if is_still:
                self._waiting.append(asked)
            else:
                self._threads.submit(self._answer, asked)
        if is_still:
            self._wake()

    def _read(self, read: PeerRead) -> PeerReadAnswer:
        """Raises ServerUnavailable, ApiError, ShmError; ValueError: the address is none."""
        assert isinstance(read.keys, bytes)
        digest = bytes.fromhex(read.namespace)
        space, tier = self._sessions.of(digest), self.tier
        if tier is None:
            return PeerReadAnswer()
        nothing = PeerReadAnswer(node=tier.node)
        if read.claimer and read.keys:
            place = tier.claimed(digest, read.generation, read.keys[:KEY_BYTES], read.claimer)
            return PeerReadAnswer(node=tier.node, **place._asdict())
        if space is None or not read.keys or self._agreement.generation(digest) != read.generation:
            return nothing
        attachment = space.session.attachment
        if attachment is None or not attachment.acquire():
            return nothing
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
            return nothing
        with self._lock:
            self._leases[number] = _Lease(space, attachment, held.lease, self._clock() + LEASE_S)
        try:
            parts = _parts(space, attachment, held.chunks)
            if not read.address:
                return PeerReadAnswer(chunks=parts, node=tier.node)
            answer = PeerReadAnswer(
                engine=tier.admit(read.address), lease=number, lease_s=LEASE_S, chunks=parts, node=tier.node
            )
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
