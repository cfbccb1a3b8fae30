"""reset_cache: what the server holds for engines like this one is taken out of use, and none of it is found again.

The server clears what is published, in lower tiers too, and closes what is reserved: stores that workers have begun
publish nothing any more. Until a server that did not answer has cleared, nothing is looked up. It is asked again after
a pause that doubles; a lost one when it is back.

Threads: the scheduler's thread calls everything but again() and tell_of_others(); `_lock` guards what they share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvdock.connectors.session import EngineSession
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import listed_id

log = logging.getLogger("kvdock.vllm")

BACKGROUND_TIMEOUT_S = 10.0
"""A large table takes the server seconds to walk."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""From one try in the background that failed to the next."""


class Clearing:
    """`clock`: seconds that never go back."""

    def __init__(self, session: EngineSession, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._lock = threading.Lock()
        self._asked = self._cleared = 0  # how often: lookups wait until the second has reached the first
        self._running = False
        self._pause_s, self._next_try_s = FIRST_PAUSE_S, 0.0  # the latter by `clock`; 0: at once
        self._is_failing = False  # and has been logged

    def ask(self) -> bool:
        """Clears now. False: the server did not clear."""
        with self._lock:
            self._asked += 1
            self._pause_s, self._next_try_s, self._is_failing = FIRST_PAUSE_S, 0.0, False
        cleared = self._clear(None)
        if not cleared:
            log.warning(
                "reset_cache: the kvdock server has not cleared what it holds; nothing is loaded until it has. "
                "`kvdock clear --namespace` does it by hand; `kvdock sessions` shows which"
            )
        return cleared

    @property
    def is_over(self) -> bool:
        """Nothing old can be found any more."""
        return self._cleared == self._asked

    def starts_again(self) -> bool:
        """Whether it is time to call again(), in the background. True once for each time that it ends."""
        with self._lock:
            starts = (
                not self.is_over and not self._running
                and self._session.attachment is not None and self._clock() >= self._next_try_s
            )
            self._running |= starts
            return starts

    def again(self) -> None:
        """Background."""
        cleared = False
        try:
            cleared = self._clear(BACKGROUND_TIMEOUT_S)
        finally:
            with self._lock:
                self._running = False
                if cleared:
                    self._pause_s = FIRST_PAUSE_S
                else:
                    self._next_try_s = self._clock() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _clear(self, timeout_s: float | None) -> bool:
        asked, attachment = self._asked, self._session.attachment
        if attachment is None:
            return False
        namespace = attachment.filed_in.hex()
        try:
            self._session.tell_weights(attachment)  # what is to be found from now on is cleared
            namespace = attachment.filed_in.hex()
            answer = self._session.client.clear(ClearCache(namespace=namespace), timeout_s=timeout_s)
        except (ServerUnavailable, ApiError) as error:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "cannot clear namespace %s: %s", namespace[:12], error)
            self._is_failing = True
            self._session.lost(attachment, error)
            return False
        self._is_failing = False
        log.info("reset_cache: %d chunks of namespace %s are out of use", answer.chunks, namespace[:12])
        if answer.untold:
            log.info("reset_cache: the lower tiers %s are not used until they were told", ", ".join(answer.untold))
        with self._lock:
            self._cleared = max(self._cleared, asked)
        return True

    def tell_of_others(self) -> None:
        """Background: warns when other instances share what was cleared, for they go on storing."""
        attachment = self._session.attachment
        if attachment is None:
            return
        try:
            known = self._session.client.sessions().sessions
        except (ServerUnavailable, ApiError) as error:
            self._session.lost(attachment, error)
            return
        namespace = attachment.filed_in.hex()
        own = listed_id(attachment.session)
        others = [one.instance for one in known if one.namespace == namespace and one.session != own]
        if others:
            log.warning(
                "reset_cache: cleared for %d other instances too, which go on storing in the same namespace: %s. If "
                "the weights have changed, reset them as well, or give each version a weights_digest of its own",
                len(others), ", ".join(others[:5]),
            )
