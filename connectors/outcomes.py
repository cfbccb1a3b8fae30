"""What became of requests, until a heartbeat tells it. People read it at the server; nothing else depends on it.

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
from kvdock.protocol.wire_types import MAX_NAME

log = logging.getLogger("kvdock.connector")


class Untold:
    """Outcomes of requests that have ended and that the server was not told of. Thread-safe."""

    def __init__(self) -> None:
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

    def carried(self, beat: Heartbeat, send: Callable[[Heartbeat], HeartbeatAnswer]) -> HeartbeatAnswer:
        """Sends a heartbeat with all of them. Raises what `send` raises; if nobody answered, they go with the next
        heartbeat."""
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
            if error.code == "invalid_body" and (beat.outcomes or beat.outcomes_dropped):
                log.warning("the server does not take what became of requests, so it is not told any more: %s", error)
                self._refuse()
            raise

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
