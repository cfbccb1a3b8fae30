"""A scheduler half that promises only what it has seen to be whole.

With several KV groups a load that fails leaves some vLLM versions nothing to go back to. So parts are hashed in
the background before they are promised, in the scheduler's process, while the lease holds them: what does not match
is a miss, and the server takes the chunk out of use.
"""

from __future__ import annotations

import ctypes
import logging

from kvdock import _core
from kvdock.api.errors import ApiError, ServerUnavailable
from kvdock.api.schemas import LookupAnswer, ReportMismatch
from kvdock.connectors.scheduler import MISS, Fetch, SchedulerHalf
from kvdock.datapath.checksum import ensure_keys
from kvdock.datapath.errors import AttachError

log = logging.getLogger("kvdock.vllm")


class CheckedScheduler(SchedulerHalf):
    def _file(self, fetch: Fetch, answer: LookupAnswer) -> None:
        """Background, as in SchedulerHalf."""
        if answer.lease is not None and not self._whole(fetch, answer, answer.lease):
            self.cancel(fetch.attachment, answer.lease)
            answer = MISS
        super()._file(fetch, answer)

    def _whole(self, fetch: Fetch, answer: LookupAnswer, lease: str) -> bool:
        attachment = fetch.attachment
        if not attachment.acquire():
            return False
        try:
            for at, parts in enumerate(answer.chunks):
                for part in parts:
                    self.session.ensure_segment(attachment, part.segment)
                    address = attachment.segments.address(part.segment, part.offset, part.length)
                    ensure_keys(part.length)
                    found = _core.checksum((ctypes.c_char * part.length).from_address(address))
                    if found != part.checksum_value:
                        log.error("lookup request=%s: chunk %d does not match its checksum", fetch.request_id, at)
                        body = ReportMismatch(
                            session=attachment.session, lease=lease, chunks=[answer.first_chunk + at]
                        )
                        self.client.mismatch(body)
                        return False
        except (ServerUnavailable, ApiError, AttachError, OSError) as error:
            self.session.lost(attachment, error)
            return False
        finally:
            attachment.release()
        return True
