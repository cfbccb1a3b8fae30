"""Verification of the chunks that a lookup found, before they are promised to the engine.

A worker verifies each load while it copies it, and an engine that can compute the failed tokens again needs nothing
more. Other engines can only be promised chunks whose bytes were verified beforehand, while the lease keeps them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, groupby
from operator import attrgetter

from kvdock import _core
from kvdock.connectors.background import Background
from kvdock.connectors.plans import Chunks, LoadPlan, row_of
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import LookupAnswer, Part
from kvdock.shm.checksum import ensure_keys
from kvdock.shm.errors import AttachError, ShmError

log = logging.getLogger("kvdock.connector")

MOST_TRUSTED_BYTES, MOST_TRUSTED_PARTS = 1 << 40, 1 << 20
"""The bytes and the parts that Trust remembers at most. A part costs about 120 bytes of memory."""
MOST_AHEAD_BYTES = 4 << 30
"""The most bytes that wait to be hashed ahead: about a second of one thread's work."""
AHEAD_SLICE_BYTES = 64 << 20
"""The bytes that are hashed ahead before they are trusted: some 15 ms of one thread's work."""


class Verifier:
    """Accepts every answer: the workers verify its chunks while they load them."""

    def verify(self, request_id: str, attachment: Attachment, answer: LookupAnswer) -> bool:
        """Whether all chunks that `answer` leases may be promised. Runs in a background thread; it may take long, or
        raise."""
        return True

    def trusts(self, attachment: Attachment, answer: LookupAnswer) -> bool:
        """Whether all chunks that `answer` leases may be promised without more work."""
        return True


class Trust:
    """Parts whose hashes were right within the last `seconds`, by their place and their checksum. `most_bytes`: of all
    these parts. Thread-safe."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, most_bytes: int = MOST_TRUSTED_BYTES
    ) -> None:
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._epoch, self._parts = "", _core.TrustedParts(most_bytes, MOST_TRUSTED_PARTS)

    def add(self, epoch: str, parts: Iterable[Part]) -> None:
        """`epoch`: the id of the session at whose server the parts are. Parts of any other session are forgotten."""
        rows = [row_of(part) for part in parts]
        with self._lock:
            self._of(epoch).add(rows, self._clock())

    def add_loaded(self, epoch: str, plan: LoadPlan) -> None:
        """Adds the parts of all writers that a load has copied."""
        with self._lock:
            self._of(epoch).add_pieces(plan.arrays, self._clock())

    def has(self, epoch: str, part: Part) -> bool:
        with self._lock:
            return epoch == self._epoch and self._parts.has(row_of(part), self._clock() - self._seconds)

    def has_all(self, epoch: str, chunks: Sequence[Sequence[Part]]) -> bool:
        """Whether all parts of `chunks` are trusted."""
        table = Chunks.of(chunks).arrays
        with self._lock:
            return self._of(epoch).has_all(table, self._clock() - self._seconds)

    def others(self, epoch: str, chunks: Sequence[Sequence[Part]]) -> list[tuple[int, Part]]:
        """The parts among `chunks` that are not trusted, each with the index of its chunk."""
        table = Chunks.of(chunks).arrays
        with self._lock:
            found = self._of(epoch).others(table, self._clock() - self._seconds)
        return [(chunk, Part(*row)) for chunk, row in found]

    def __len__(self) -> int:
        with self._lock:
            return len(self._parts)

    def clear(self) -> None:
        """Forgets all parts: one was found to be damaged after its hash had been right."""
        with self._lock:
            self._parts.clear()

    def _of(self, epoch: str) -> _core.TrustedParts:
        """The parts of `epoch` that are remembered. The caller holds the lock."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._parts.clear()
        return self._parts



class ChecksumVerifier(Verifier):
    """Hashes all parts in shared memory, in `threads` threads, except those in `trust`. If a chunk does not match or
    cannot be hashed, the answer is refused. A chunk that does not match is reported, too, and the server takes it out
    of use."""

    def __init__(self, session: EngineSession, *, threads: int = 1, trust: Trust | None = None) -> None:
        self._session, self._threads, self._trust = session, threads, trust

    def verify(self, request_id: str, attachment: Attachment, answer: LookupAnswer) -> bool:
        assert answer.lease is not None, "only what is leased can be read"
        if not attachment.acquire():
            return False
        try:
            damaged = self._damaged(attachment, answer)
            if damaged:
                log.error("lookup request=%s: checksum mismatch in chunks %s", request_id, damaged)
                self._session.report(attachment, answer.lease, damaged)
            return not damaged
        except (ServerUnavailable, ApiError, AttachError, OSError) as error:
            self._session.lost(attachment, error)
            return False
        finally:
            attachment.release()

    def trusts(self, attachment: Attachment, answer: LookupAnswer) -> bool:
        """See Verifier."""
        return self._trust is not None and self._trust.has_all(attachment.session, answer.chunks)

    def _damaged(self, attachment: Attachment, answer: LookupAnswer) -> list[int]:
        if self._trust is not None:
            parts = self._trust.others(attachment.session, answer.chunks)
        else:
            parts = [(chunk, part) for chunk, of in enumerate(answer.chunks) for part in of]
        if not parts:
            return []
        for segment in {part.segment for _, part in parts}:  # before the threads start, because this may map it
            self._session.ensure_segment(attachment, segment)
            attachment.segments.require_whole(segment)
        found = _match(attachment, [part for _, part in parts], threads=self._threads)
        if self._trust is not None:
            right = (part for (_, part), matches in zip(parts, found, strict=True) if matches)
            self._trust.add(attachment.session, right)
        damaged = {chunk for (chunk, _), matches in zip(parts, found, strict=True) if not matches}
        return sorted(answer.first_chunk + chunk for chunk in damaged)


class HashAhead:
    """Hashes the parts that this engine has stored, in the pool and in a thread of its own, so that no lookup has to:
    parts whose hash is right are trusted. A wrong hash is not reported, because it proves nothing: no lease keeps these
    bytes, so the server may have evicted them by now.
    """

    def __init__(self, trust: Trust, most_bytes: int = MOST_AHEAD_BYTES) -> None:
        self._trust, self._most_bytes = trust, most_bytes
        self._hashing = Background("kvdock-ahead")
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def add(self, attachment: Attachment, parts: Sequence[Part]) -> None:
        """Queues the parts to be hashed. If too many bytes wait already, it leaves them to lookups. Thread-safe."""
        size_bytes = sum(part.length for part in parts)
        with self._lock:
            if self._waiting_bytes + size_bytes > self._most_bytes or not attachment.acquire():
                return
            self._waiting_bytes += size_bytes
        self._hashing.run(self._hash, attachment, parts, size_bytes)

    def _hash(self, attachment: Attachment, parts: Sequence[Part], size_bytes: int) -> None:
        try:
            for some in _slices(parts):
                segment = some[0].segment
                with attachment.segments.reading(segment) as is_there:  # the pool may remove a segment meanwhile
                    if is_there:
                        attachment.segments.require_whole(segment)
                        right = _match(attachment, some)
                        self._trust.add(attachment.session, compress(some, right))
        except (ShmError, OSError) as error:
            log.info("stored chunks are not hashed ahead: %s", error)
        finally:
            attachment.release()
            with self._lock:
                self._waiting_bytes -= size_bytes

    def close(self) -> None:
        """Waits for the parts that were added."""
        self._hashing.close()


def _slices(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """The parts in slices of about AHEAD_SLICE_BYTES, each within one segment."""
    for _, of_segment in groupby(sorted(parts, key=attrgetter("segment")), attrgetter("segment")):
        some, size_bytes = list[Part](), 0
        for part in of_segment:
            some.append(part)
            size_bytes += part.length
            if size_bytes >= AHEAD_SLICE_BYTES:
                yield some
                some, size_bytes = [], 0
        if some:
            yield some


def _match(attachment: Attachment, parts: Sequence[Part], threads: int = 1) -> list[bool]:
    """For each part whether the bytes in its slot have its checksum. The interpreter lock is free meanwhile: a hash of
    one part is so short that taking the lock between two would delay the engine's thread again and again."""
    placed = [
        (attachment.segments.address(part.segment, part.offset, part.length), part.length, part.checksum_value)
        for part in parts
    ]
    ensure_keys(max(part.length for part in parts))
    return _core.checksums_match(placed, threads=threads)
