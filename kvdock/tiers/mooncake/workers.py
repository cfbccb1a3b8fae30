"""Threads that call a library whose calls block, for callers who wait no longer than their deadlines.

A call that hangs keeps its thread, not its caller. What a job does with the caller's pages it does inside touching():
nothing begins there once the caller has given up, and the caller waits until nothing is there any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from kvdock.tiers.tier import Deadline, StillRunning, TierError

_TICK_S: Final = 0.01
"""How soon a cancelled deadline is noticed."""


class GivenUp(Exception):
    """Nobody waits for this job any more."""


class Verb:
    """One call of a verb, which is over once its caller has given up."""

    def __init__(self, jobs: int) -> None:
        self.changed: Final = threading.Condition()
        self.jobs_left = jobs
        self.error: BaseException | None = None
        self._is_over, self._touching = False, 0

    def check(self) -> None:
        """Raises GivenUp."""
        if self._is_over:
            raise GivenUp

    def pause(self, seconds: float) -> None:
        """Raises GivenUp, at once when the caller gives up."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_over, seconds)
            self.check()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Around what reads or writes the caller's pages. Raises GivenUp before it. If an exception comes out, what
        touches them may go on."""
        with self.changed:
            self.check()
            self._touching += 1
        yield
        with self.changed:
            self._touching -= 1
            self.changed.notify_all()

    def give_up(self, patience_s: float) -> bool:
        """False: after `patience_s` something still touches the pages."""
        with self.changed:
            self._is_over = True
            self.changed.notify_all()
            return self.changed.wait_for(lambda: not self._touching, patience_s)

    def ended(self, error: BaseException | None) -> None:
        """One job of it has."""
        with self.changed:
            self.jobs_left -= 1
            self.error = self.error or error
            self.changed.notify_all()


class Names:
    """Which names are in use: the library cannot have two reads or writes of one name at a time."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def held(self, names: Sequence[str], verb: Verb) -> Iterator[None]:
        """Waits until all are free, and takes them at once. Raises GivenUp."""
        with self._changed:
            while not self._used.isdisjoint(names):
                verb.check()
                self._changed.wait(_TICK_S)
            self._used.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._used.difference_update(names)
                self._changed.notify_all()


Own = TypeVar("Own")
"""What each thread has for itself."""
Job = Callable[[Verb, Own], None]


class Workers(Generic[Own]):
    """`own`: makes what a thread has for itself, anew after a job that ended with `spoils`. Daemon threads: a call that
    never ends must not hold up the end of the process."""

    def __init__(self, tier: str, count: int, own: Callable[[], Own], spoils: type[Exception]) -> None:
        self._tier, self._own, self._spoils = tier, own, spoils
        self._queue: deque[tuple[Job[Own], Verb]] = deque()
        self._changed = threading.Condition()
        self._is_closed, self._running = False, count
        self._spoilt: list[Own] = []  # a call may still write there
        for number, first in enumerate([own() for _ in range(count)]):
            threading.Thread(target=self._work, args=(first,), name=f"{tier}-{number}", daemon=True).start()

    def run(self, jobs: Sequence[Job[Own]], deadline: Deadline, patience_s: float) -> None:
        """Until all are done, one raises, or the deadline is over. Raises what a job raised, and StillRunning if after
        `patience_s` more something still touches the caller's pages."""
        verb = Verb(len(jobs))
        with self._changed:
            self._queue.extend((job, verb) for job in jobs)
            self._changed.notify_all()
        with verb.changed:
            while verb.jobs_left and verb.error is None and not deadline.is_over:
                verb.changed.wait(min(deadline.left_s, _TICK_S))
        with self._changed:
            self._queue = deque(entry for entry in self._queue if entry[1] is not verb)
        if not verb.give_up(patience_s):
            raise StillRunning(self._tier, "a copy from or to the pages did not end")
        if verb.error is not None:
            raise verb.error

    def close(self, deadline: Deadline) -> bool:
        """Ends the threads when they have nothing to do. False: some still had when the deadline was over."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._running and not deadline.is_over:
                self._changed.wait(min(deadline.left_s, _TICK_S))
            return not self._running

    def _work(self, own: Own) -> None:
        while (entry := self._next()) is not None:
            job, verb = entry
            error: BaseException | None = None
            try:
                verb.check()
                job(verb, own)
            except GivenUp:
                pass
            except self._spoils as found:
                self._spoilt.append(own)
                own = self._own()
                error = TierError(self._tier, str(found))
            except BaseException as found:  # the caller gets it; the thread must live on
                error = found
            verb.ended(error)
            del job, verb, entry, error  # they hold the caller's pages
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _next(self) -> tuple[Job[Own], Verb] | None:
        """None: it is closed."""
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None
