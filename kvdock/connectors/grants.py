"""Which of the server's grants this member uses, and which it has promised never to touch.

Invariant: "done" is a promise. A grant in `refused` is never begun; a grant that is active is never
answered for. Checking and beginning happen under one lock, so no question can slip in between.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvdock.protocol.schemas import GrantRanks


class GrantBook:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()  # plans handed out or copies in flight, by grant
        self._refused: set[str] = set()

    def begin(self, grant: str) -> bool:
        """False when this member has answered "done" for the grant: the load fails or the store is dropped."""
        with self._lock:
            if grant in self._refused:
                return False
            self._active[grant] += 1
            return True

    def end(self, grant: str) -> None:
        """After the copy was seen to end and its release or commit is on the way."""
        with self._lock:
            self._active[grant] -= 1
            if self._active[grant] <= 0:
                del self._active[grant]

    def ask(self, grant: str) -> bool:
        """A question of the server: True means done, and the grant is refused from now on."""
        with self._lock:
            if self._active[grant] > 0:
                return False
            self._refused.add(grant)
            return True

    def answers(
        self, questions: Sequence[GrantRanks], keeps_lease: Callable[[str], bool]
    ) -> tuple[list[GrantRanks], list[str]]:
        """A heartbeat's `done` and `keep`. `keeps_lease`: whether this member's lookup still needs a lease."""
        done, keep = [], []
        for question in questions:
            if not question.ranks and keeps_lease(question.grant):
                keep.append(question.grant)
            elif self.ask(question.grant):
                done.append(question)
        return done, keep
