"""Which of the requests that wait for an engine are asked about before the engine comes to them.

What is found for a waiting request is leased, so it cannot be evicted. Few leases are enough, because an engine takes
few requests in one step, and many would keep the pool full of what is needed much later: the first MOST_EARLY that
arrived are asked about, and the next when one of these has been admitted or has ended.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_EARLY = 4


class EarlyQuestions:
    """`ask`: sends the question of a request. Every request leaves, whatever becomes of it."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._waiting: dict[str, None] = {}
        """In the order in which they arrived; not asked about."""
        self._open: set[str] = set()
        """Asked about, by us or by the engine's own lookup."""

    def arrived(self, request_id: str) -> None:
        """The engine may say it more than once."""
        if request_id not in self._open:
            self._waiting.setdefault(request_id)
            self._ask_next()

    def asked(self, request_id: str) -> None:
        """The engine has looked the request up, in whatever order it takes them."""
        self._waiting.pop(request_id, None)
        self._open.add(request_id)

    def left(self, request_id: str) -> None:
        """It was admitted, or has ended."""
        self._waiting.pop(request_id, None)
        self._open.discard(request_id)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._waiting and len(self._open) < MOST_EARLY:
            request_id = next(iter(self._waiting))
            self.asked(request_id)
            self._ask(request_id)
