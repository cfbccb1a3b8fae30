"""A scheduler half that promises, where vLLM has no way back, only what it has seen to be whole.

With several KV groups a load that fails leaves some vLLM versions nothing to go back to. With one, a load that fails in
the step that runs its request is computed again, but vLLM may have scheduled the next step already, whose token it
keeps, and leaves the failed blocks in its prefix cache. So before either is promised, its parts are hashed in the
background, in the scheduler's process, while the lease holds them: what does not match is a miss, and the server takes
the chunk out of use. So is what cannot be hashed, whatever the reason, but that it stays in use.
"""

from __future__ import annotations

import ctypes
import logging

from kvdock import _core
from kvdock.connectors.scheduler import MISS, Fetch, SchedulerHalf
from kvdock.connectors.session import Attachment, EngineSession
from kvdock.datapath.checksum import ensure_keys
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import LookupAnswer, Part, ReportMismatch
from kvdock.shm.errors import AttachError

log = logging.getLogger("kvdock.vllm")


class CheckedScheduler(SchedulerHalf):
    """`always`: also what is loaded in the background is hashed before it is promised."""

    def __init__(self, session: EngineSession, *, readers: int = 1, always: bool) -> None:
        super().__init__(session, readers=readers)
        self._always = always
        self._seen_whole: dict[str, str] = {}
        """Leases by request."""

    def is_whole(self, request_id: str) -> bool:
        """False: check() has not seen what the request was promised."""
        with self._lock:
            request = self._requests.get(request_id)
            lease = request.answer.lease if request is not None and request.answer is not None else None
            return lease is None or self._seen_whole.get(request_id) == lease

    def check(self, request_id: str) -> None:
        """Background: hashes what the request's lookup found. What is damaged is a miss from then on."""
        with self._lock:
            request = self._requests.get(request_id)
            answer = request.answer if request is not None else None
        if request is None or answer is None or answer.lease is None:
            return
        whole = False
        try:
            whole = self._sees_whole(request_id, request.attachment, answer, answer.lease)
        finally:  # also when it raised: a request without an answer would be asked for at every step
            if not whole:
                self._give_up(request_id, answer, answer.lease)

    def _give_up(self, request_id: str, answer: LookupAnswer, lease: str) -> None:
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.answer is not answer:
                return  # forgotten while we looked, and its lease with it
            request.answer, request.epoch = MISS, 0  # a cancelled lease ends its epoch
        self.cancel(request.attachment, lease)

    def finished(self, request_id: str) -> tuple[Attachment, str] | None:
        self._seen_whole.pop(request_id, None)
        return super().finished(request_id)

    def _file(self, fetch: Fetch, answer: LookupAnswer) -> None:
        """Background, as in SchedulerHalf."""
        lease = answer.lease
        if not self._always or lease is None:
            super()._file(fetch, answer)
            return
        whole = False
        try:
            whole = self._sees_whole(fetch.request_id, fetch.attachment, answer, lease)
        finally:
            if whole:
                super()._file(fetch, answer)
            else:
                with self._lock:
                    request = self._waiting(fetch)
                    if request is not None:
                        request.answer, request.epoch = MISS, 0
                self.cancel(fetch.attachment, lease)

    def _sees_whole(self, request_id: str, attachment: Attachment, answer: LookupAnswer, lease: str) -> bool:
        if not attachment.acquire():
            return False
        try:
            damaged = [
                chunk for chunk, parts in enumerate(answer.chunks, answer.first_chunk)
                if not all(self._matches(attachment, part) for part in parts)
            ]
            if damaged:
                log.error("lookup request=%s: checksum mismatch in chunks %s", request_id, damaged)
                self.client.mismatch(ReportMismatch(session=attachment.session, lease=lease, chunks=damaged))
                return False
        except (ServerUnavailable, ApiError, AttachError, OSError) as error:
            self.session.lost(attachment, error)
            return False
        finally:
            attachment.release()
        with self._lock:
            if request_id in self._requests:  # else it was forgotten while we looked
                self._seen_whole[request_id] = lease
        return True

    def _matches(self, attachment: Attachment, part: Part) -> bool:
        self.session.ensure_segment(attachment, part.segment)
        address = attachment.segments.address(part.segment, part.offset, part.length)
        ensure_keys(part.length)
        found = _core.checksum((ctypes.c_char * part.length).from_address(address))
        return bool(found == part.checksum_value)
