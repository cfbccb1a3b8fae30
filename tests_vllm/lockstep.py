"""Threads of the connector as queues that move when the engine steps: the same seed gives the same run.

What the connector does in the background (lookups, reservations, loads, stores) is done between two steps instead,
some steps after it was asked for. So hundreds of interleavings are tried without waiting, also those that threads
rarely show.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sched_engine import SchedEngine

from kvdock.connectors.vllm import worker_side
from kvdock.connectors.worker import Loading


class Job(Future[Any]):
    """Asking for its result makes it, and what is queued before it."""

    def __init__(self, queue: Queue, steps: int, work: Callable[[], Any]) -> None:
        super().__init__()
        self.queue, self.steps_left, self.work = queue, steps, work

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self.queue.run_first()
        return super().result()


@dataclass
class Queue:
    """An executor of one thread, without the thread. A job waits for `delay()` steps once it is the first."""

    delay: Callable[[], int]
    failures: list[Exception]

    def __post_init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def submit(self, work: Callable[..., Any], *arguments: object) -> Job:
        job = Job(self, self.delay(), lambda: work(*arguments))
        self._jobs.append(job)
        return job

    def tick(self) -> None:
        while self._jobs and self._jobs[0].steps_left <= 0:
            self.run_first()
        if self._jobs:
            self._jobs[0].steps_left -= 1

    def run_first(self) -> None:
        job = self._jobs.popleft()
        try:
            job.set_result(job.work())
        except Exception as error:  # handed on to whoever asks, as an executor does
            self.failures.append(error)
            job.set_exception(error)

    def shutdown(self, wait: bool = True) -> None:
        while self._jobs:
            self.run_first()


class LateLoading(Loading):
    """Copies in the step in which it ends, or when somebody waits for its end."""

    def __init__(self, submit: Callable[..., Loading], steps: int, attachment: Any, plan: Any, *rest: Any) -> None:
        super().__init__(attachment, plan, 0.0)
        self._submit, self._rest, self.steps_left, self._copied = submit, rest, steps, False

    def done(self) -> bool:
        self.steps_left -= 1
        return self.steps_left < 0

    def wait(self, timeout_s: float | None) -> bool:
        if timeout_s is None and not self._copied:
            self._copied = True
            made = self._submit(self.attachment, self.plan, *self._rest)
            made.wait(None)
            self.__dict__.update(made.__dict__)
        return self._copied


def into_lockstep(engine: SchedEngine, source: random.Random, most_steps: int) -> list[Exception]:
    """From now on the engine is stepped by hand. Returns the list that failures of background work go to."""
    failures: list[Exception] = []
    queues = []

    def delay() -> int:
        return source.randrange(most_steps + 1)

    for side in (engine.scheduler.connector._scheduler, engine.worker._worker):
        for name, value in list(vars(side).items()):
            if isinstance(value, ThreadPoolExecutor):
                value.shutdown()
                queues.append(Queue(delay, failures))
                setattr(side, name, queues[-1])
    half = engine.worker._worker._half
    submit = half.submit_load
    half.submit_load = lambda *arguments: LateLoading(submit, delay(), *arguments)

    def tick() -> None:
        for queue in queues:
            queue.tick()

    def wait(jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.result()

    worker_side.wait, worker_side.TELL_AFTER_S = wait, 0.0
    engine.before_step = tick
    return failures
