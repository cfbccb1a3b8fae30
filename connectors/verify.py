"""Verification of what a lookup found, before the engine is promised it.

A worker verifies each load while it copies it, and an engine that can compute the failed tokens again needs nothing
more. Other engines can only be promised chunks whose bytes were verified beforehand, while the lease keeps them.
"""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

from kvdock import _core
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.datapath.checksum import ensure_keys
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import LookupAnswer, Part
from kvdock.shm.errors import AttachError

log = logging.getLogger("kvdock.connector")


class Verifier:
    """Promises everything: the workers verify it while they load it."""

    def verify(self, request_id: str, attachment: Attachment, answer: LookupAnswer) -> bool:
        """Whether all that `answer` leases may be promised. Runs in a background thread; it may take long, or raise."""
        return True


class ChecksumVerifier(Verifier):
    """Hashes all parts in shared memory, in `threads` threads. A chunk that does not match is reported, and the server
    takes it out of use; a chunk that cannot be hashed is also a miss, but stays on the server."""

    def __init__(self, session: EngineSession, *, threads: int = 1) -> None:
        self._session, self._threads = session, threads

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

    def _damaged(self, attachment: Attachment, answer: LookupAnswer) -> list[int]:
        parts = [(chunk, part) for chunk, of in enumerate(answer.chunks, answer.first_chunk) for part in of]
        for segment in {part.segment for _, part in parts}:  # by one thread, for it may have to be mapped
            self._session.ensure_segment(attachment, segment)
            attachment.segments.require_whole(segment)
        with ThreadPoolExecutor(min(self._threads, max(1, len(parts))), "kvdock-hash") as threads:
            found = list(threads.map(lambda one: self._matches(attachment, one[1]), parts))
        return sorted({chunk for (chunk, _), matches in zip(parts, found, strict=True) if not matches})

    def _matches(self, attachment: Attachment, part: Part) -> bool:
        address = attachment.segments.address(part.segment, part.offset, part.length)
        ensure_keys(part.length)
        found = _core.checksum((ctypes.c_char * part.length).from_address(address))
        return bool(found == part.checksum_value)
