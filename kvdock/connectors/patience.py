"""How long the engine's thread waits for the server's answer to a lookup.

A lookup that is answered "ask again" costs a request the step that comes between: some 300 ms under load, while the
answer takes less than one. So it is worth waiting for an answer that is about to come, and never for one that is not.

An answer that is later than `wait_s` opens the breaker: from then on nobody waits, and what is not known is a miss,
because a server that is slow must not hold up requests that have nothing to load. The next answer in time closes it.
Whatever the server does, one step waits at most `wait_s`, or a tenth of what steps take where that is longer. An engine
that computes nothing makes such steps one after the other, for nobody else waits: there an answer may be later.

Threads: the engine's waits, the background tells of answers. The breaker is one flag; either may have the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

IDLE_WAITS = 10
"""While the engine computes nothing, an answer may take this many times longer: a miss costs more than the waiting."""
STEP_SHARE = 0.1
"""What all the waiting of a step may add to it, as a share of what steps take, where the server answers in time."""
LONGEST_STEP_S = 1.0
"""What lasted longer was no step."""
TURN_S = 0.001
"""How long a lookup waits for an answer that is late already: the thread that gets it may have had no turn yet."""
NEWEST_STEP = 0.2
"""Weight of the newest step in the mean of what steps take."""


@dataclass
class Question:
    """A lookup under way: `answered` ends with its answer, and it was asked at `asked_s` of the clock. `was_late`:
    somebody was told so. `was_seen`: whoever waits for another engine has seen its answer."""

    answered: Future[None]
    asked_s: float
    was_late: bool = False
    was_seen: bool = False


class Patience:
    """`wait_s`: how late an answer may be. `clock`: seconds, monotonic."""

    def __init__(self, wait_s: float, clock: Callable[[], float]) -> None:
        self._wait_s, self._clock = wait_s, clock
        self._left_s = wait_s
        self._answered_s = 0.0
        self._step_s = 0.0
        self._began_s: float | None = None
        self._is_idle = True
        self.is_open = False
        """The breaker: an answer was late when somebody wanted it, and none has come in time since."""

    def step(self, is_idle: bool) -> None:
        """A step has been built. `is_idle`: it computes nothing, so how long it takes says nothing."""
        now_s = self._clock()
        if self._began_s is not None:
            took_s = min(now_s - self._began_s, LONGEST_STEP_S)
            self._step_s += NEWEST_STEP * (took_s - self._step_s)
        self._began_s, self._is_idle = None if is_idle else now_s, is_idle
        self._left_s = max(self._wait_s, STEP_SHARE * self._step_s)

    def wait(self, question: Question) -> bool:
        """Whether it is answered, at once or within the time that is left."""
        has_waited = False
        while not question.answered.done():
            began_s = self._clock()
            # One question is sent at a time: this one's turn came with the answer to the one before.
            late_s = max(question.asked_s, self._answered_s) + self._late_after_s
            if began_s >= late_s and (has_waited or not self._wait_s):
                self.is_open = True
            if self.is_open or self._left_s <= 0:
                return False
            wait([question.answered], min(self._left_s, max(late_s - began_s, TURN_S)))
            self._left_s -= self._clock() - began_s
            has_waited = True
        return True

    @property
    def _late_after_s(self) -> float:
        return self._wait_s * (IDLE_WAITS if self._is_idle else 1)

    def spend(self, work: Future[None]) -> bool:
        """Whether other work has ended, at once or within what is left of the step's waiting; it opens no breaker."""
        if not work.done() and self._left_s > 0:
            began_s = self._clock()
            wait([work], min(self._left_s, self._wait_s))
            self._left_s -= self._clock() - began_s
        return work.done()

    def answered(self, took_s: float) -> None:
        """Background: the server took `took_s` over an answer."""
        self._answered_s = self._clock()
        if took_s <= self._late_after_s:
            self.is_open = False
