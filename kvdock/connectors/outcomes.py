"""What became of requests and what was copied, until a heartbeat tells it. People read it at the server; nothing else
depends on it.

Bounded: of more than fit into a heartbeat the newest are kept, and the others are counted. No outcome keeps a heartbeat
from being heard: what the server cannot read is not sent again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.outcomes import MAX_OUTCOMES, Outcome
from kvdock.protocol.schemas import Heartbeat, HeartbeatAnswer
from kvdock.protocol.usage import Copied
from kvdock.protocol.wire_types import MAX_NAME

log = logging.getLogger("kvdock.connector")


class Untold:
    """What the server does not know yet. The thread that sends heartbeats calls `ceiling_bytes_per_s` once, before it
    reports the first copies. Thread-safe."""

    def __init__(self) -> None:
        self.ceiling_bytes_per_s: Callable[[], float] = lambda: 0.0
        self._ceiling: float | None = None
        self._copied = Copied()
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)
        self._dropped = 0
        self._is_refused = False

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            if self._is_refused:
                return
            if not 0 < len(outcome.request) <= MAX_NAME:
                self._dropped += 1
                return
            self._dropped += len(self._outcomes) == MAX_OUTCOMES
            self._outcomes.append(outcome)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A load's copies have taken so long."""
        with self._lock:
            self._copied.load_bytes += size_bytes
            self._copied.load_us += round(seconds * 1e6)

    def stored(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._copied.store_bytes += size_bytes
            self._copied.store_us += round(seconds * 1e6)

    def _take_copied(self) -> Copied | None:
        with self._lock:
            copied, self._copied = self._copied, Copied()
        if not copied.load_bytes and not copied.store_bytes:
            return None
        if self._ceiling is None:
            self._ceiling = self.ceiling_bytes_per_s()
        copied.ceiling_bytes_per_s = self._ceiling
        return copied

    def carried(self, beat: Heartbeat, send: Callable[[Heartbeat], HeartbeatAnswer]) -> HeartbeatAnswer:
        """Sends a heartbeat with all of it. Raises what `send` raises; if nobody answered, outcomes go with the next
        heartbeat."""
        beat.copied = None if self._is_refused else self._take_copied()
        with self._lock:
            beat.outcomes, beat.outcomes_dropped = list(self._outcomes), self._dropped
            self._outcomes.clear()
            self._dropped = 0
        try:
            return send(beat)
        except ServerUnavailable:
            self._put_back(beat.outcomes, beat.outcomes_dropped)
            raise
        except ApiError as error:
            if error.code == "invalid_body" and (
                beat.outcomes or beat.outcomes_dropped or beat.copied
            ):
                log.warning(
                    "the server does not take what became of requests or was copied, so it is not told any more: %s",
                    error,
                )
                self._refuse()
            raise

    def tell_last(self, beat: Heartbeat, send: Callable[[Heartbeat], HeartbeatAnswer]) -> None:
        """Sends a heartbeat if there is anything left to tell. Raises what `send` raises."""
        with self._lock:
            is_any = bool(self._outcomes or self._dropped or self._copied.load_bytes or self._copied.store_bytes)
        if is_any:
            self.carried(beat, send)

    def _put_back(self, outcomes: Sequence[Outcome], dropped: int) -> None:
        with self._lock:
            every = [*outcomes, *self._outcomes]
            self._outcomes.clear()
            self._outcomes.extend(every)
            self._dropped += dropped + len(every) - len(self._outcomes)

    def _refuse(self) -> None:
        with self._lock:
            self._is_refused = True
            self._outcomes.clear()
            self._dropped = 0
