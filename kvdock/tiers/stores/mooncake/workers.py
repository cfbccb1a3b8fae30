"""Threads that make the blocking calls of a library, for callers that wait no longer than their deadlines.

If a call of the library hangs, it blocks one of these threads, but not the caller. A job uses the caller's pages only
inside touching(): it cannot enter once the caller has given up, and the caller waits until no job is inside.
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
    """The caller no longer waits for this job."""


class Call:
    """One call of a tier's verb, which consists of several jobs. It is over once its caller has given up."""

    def __init__(self, jobs: int) -> None:
        self.changed: Final = threading.Condition()
        self.jobs_left = jobs
        self.error: BaseException | None = None
        self._is_over, self._touching = False, 0

    def check(self) -> None:
        """Raises GivenUp if the caller has given up."""
        if self._is_over:
            raise GivenUp

    def pause(self, seconds: float) -> None:
        """Waits. Raises GivenUp as soon as the caller gives up."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_over, seconds)
            self.check()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Surrounds code that reads or writes the caller's pages. Raises GivenUp before it is entered. If the code
        raises, it counts as still touching the pages."""
        with self.changed:
            self.check()
            self._touching += 1
        yield
        with self.changed:
            self._touching -= 1
            self.changed.notify_all()

    def give_up(self, patience_s: float) -> bool:
        """Ends the call, and waits until no job uses the caller's pages. False: after `patience_s` a job still does."""
        with self.changed:
            self._is_over = True
            self.changed.notify_all()
            return self.changed.wait_for(lambda: not self._touching, patience_s)

    def ended(self, error: BaseException | None) -> None:
        """One of its jobs has ended."""
        with self.changed:
            self.jobs_left -= 1
            self.error = self.error or error
            self.changed.notify_all()


class Names:
    """The names in use, because the library allows only one read or write of a name at a time."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def held(self, names: Sequence[str], call: Call) -> Iterator[None]:
        """Waits until all names are free, and takes all of them together. Raises GivenUp."""
        with self._changed:
            while not self._used.isdisjoint(names):
                call.check()
                self._changed.wait(_TICK_S)
            self._used.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._used.difference_update(names)
                self._changed.notify_all()


Buffer = TypeVar("Buffer")
"""The type of a thread's own memory."""
Job = Callable[[Call, Buffer], None]


class Workers(Generic[Buffer]):
    """Threads that run jobs. `new_buffer`: makes a thread's buffer; the thread gets a new one after a job that raised
    `spoils`. The threads are daemons, because a call that never ends must not delay the end of the process."""

    def __init__(self, tier: str, count: int, new_buffer: Callable[[], Buffer], spoils: type[Exception]) -> None:
        self._tier, self._new_buffer, self._spoils = tier, new_buffer, spoils
        self._queue: deque[tuple[Job[Buffer], Call]] = deque()
        self._changed = threading.Condition()
        self._is_closed, self._running = False, count
        self._spoilt: list[Buffer] = []  # a call may still write to these
        for number, first in enumerate([new_buffer() for _ in range(count)]):
            threading.Thread(target=self._work, args=(first,), name=f"{tier}-{number}", daemon=True).start()

    def run(self, jobs: Sequence[Job[Buffer]], deadline: Deadline, patience_s: float) -> None:
        """Returns when all jobs are done, one has raised, or the deadline has passed. Raises what a job raised, and
        StillRunning if a job still touches the caller's pages after another `patience_s`."""
        call = Call(len(jobs))
        with self._changed:
            self._queue.extend((job, call) for job in jobs)
            self._changed.notify_all()
        with call.changed:
            while call.jobs_left and call.error is None and not deadline.is_over:
                call.changed.wait(min(deadline.left_s, _TICK_S))
        with self._changed:
            self._queue = deque(entry for entry in self._queue if entry[1] is not call)
        if not call.give_up(patience_s):
            raise StillRunning(self._tier, "a copy from or to the pages did not end")
        if call.error is not None:
            raise call.error

    def close(self, deadline: Deadline) -> bool:
        """Ends the threads when they are idle. False: some were still busy at the deadline."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._running and not deadline.is_over:
                self._changed.wait(min(deadline.left_s, _TICK_S))
            return not self._running

    def _work(self, buffer: Buffer) -> None:
        while (entry := self._next()) is not None:
            job, call = entry
            error: BaseException | None = None
            try:
                call.check()
                job(call, buffer)
            except GivenUp:
                pass
            except self._spoils as found:
                self._spoilt.append(buffer)
                buffer = self._new_buffer()
                error = TierError(self._tier, str(found))
            except BaseException as found:  # the caller gets it; the thread must go on
                error = found
            call.ended(error)
            del job, call, entry, error  # they keep the caller's pages alive
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _next(self) -> tuple[Job[Buffer], Call] | None:
        """The next job and its call. None: the Workers are closed, and no job is left."""
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None
