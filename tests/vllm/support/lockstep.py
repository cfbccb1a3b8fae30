"""Threads of the connector as queues that move when the engine steps: the same seed gives the same run.

What the connector does in the background (lookups, reservations, loads, stores) is done between two steps instead,
some steps after it was asked for. So hundreds of interleavings are tried without waiting, also those that threads
rarely show.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from sched_engine import SchedEngine

from kvdock.connectors import lookups as lookups_module
from kvdock.connectors.background import Background
from kvdock.connectors.lookups import FRESH_S
from kvdock.connectors.vllm import worker as worker_module
from kvdock.connectors.waits import Patience, SentQuestion
from kvdock.connectors.worker import Loading, Own
from kvdock.datapath.copy import CopyHandle, PartResult
from kvdock.shm.checksum import checksum

LEAST_QUESTIONS = 8
"""So often a load that may be verified is asked whether it has ended: up to three times a step."""


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


ASIDE = 1
"""A stream that holds nothing of what is computed."""


class LateLoading(Loading):
    """Copies in the step in which it ends, or when somebody waits for its end, or orders work after it. It is verified
    when its bytes are seen to be whole, `unsure` questions after it was submitted."""

    def __init__(
        self, engine: SchedEngine, submit: Callable[..., Loading], steps: int, unsure: int, attachment: Any, plan: Any,
        bands: Any = None, *, waits: bool, after: int | None,
    ) -> None:
        super().__init__(attachment, plan, 0.0)
        self._engine, self._waits = engine, waits
        self._submit, self.steps_left, self._unsure, self._copied = submit, steps, unsure, False
        groups = sorted({piece.group for piece in plan.pieces})
        self.copies = [(Own(0, group), (), LateCopy(self)) for group in groups]
        engine.seen["loads_after" if waits else "loads_after_stores" if after is not None else "loads_at_once"] += 1
        if engine.is_late and not waits:
            self.wait(None)

    def done(self) -> bool:
        self.steps_left -= 1
        return self.steps_left < 0

    def wait(self, timeout_s: float | None) -> bool:
        if timeout_s is None and not self._copied:
            self._copied = True
            if self._waits:
                self._engine.computes()
            made = self._submit(self.attachment, self.plan)
            made.wait(None)
            self.holds_lease, self.lost = made.holds_lease, made.lost
            self.copies = [(group, pieces, LateCopy(self, handle)) for group, pieces, handle in made.copies]
        return self._copied

    def verified(self, timeout_s: float) -> bool:
        self._unsure -= 1
        return self._unsure < 0 and all(
            checksum(self._bytes(part)) == part.checksum_value for piece in self.plan.pieces for part in piece.parts
        )

    def _bytes(self, part: Any) -> memoryview:
        address = self.attachment.segments.address(part.segment, part.offset, part.length)
        return memoryview((ctypes.c_char * part.length).from_address(address)).cast("B")


class LateCopy:
    """A StreamHandle of a LateLoading."""

    def __init__(self, loading: LateLoading, real: CopyHandle | None = None) -> None:
        self._loading, self._real = loading, real

    def order(self, stream: int, band: int | None = None) -> int:
        self._loading.wait(None)
        return band or 0

    def done(self) -> bool:
        return self._real is not None

    def wait(self, timeout_s: float | None) -> bool:
        return self.done()

    def took_s(self) -> float | None:
        return None

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        return self.result() if self.done() else None

    def result(self) -> list[PartResult]:
        self._loading.wait(None)
        copied = self if self._real is not None else next(copy for _, _, copy in self._loading.copies)
        return copied._real.result() if copied._real is not None else []

    def wrong(self) -> list[int]:
        return [at for at, result in enumerate(self.result()) if not result.ok]


class AsksAgain(Patience):
    """Waits for nothing and never loses trust; old answers are asked for once more with each lookup."""

    def __init__(self) -> None:
        super().__init__(0.0, time.perf_counter)
        lookups_module.FRESH_S = -1.0

    def wait(self, question: SentQuestion) -> bool:
        return question.answered.done()


def misses() -> Patience:
    lookups_module.FRESH_S = FRESH_S
    return Patience(0.0, time.perf_counter)


WAITS: dict[str, Callable[[], Patience | None]] = {"never": lambda: None, "misses": misses, "asks again": AsksAgain}
"""What becomes of a lookup whose answer is not there: the engine asks again; it is a miss; or the engine asks again,
and asks once more after each answer that was not all."""


def into_lockstep(
    engine: SchedEngine, source: random.Random, most_steps: int, *, verified: bool = False, hasty: bool = True,
    waits: str = "never",
) -> list[Exception]:
    """From now on the engine is stepped by hand. Returns the list that failures of background work go to. `verified`:
    loads are reported before they have copied anything, as on a GPU before all was copied; `hasty`: in every step.
    `waits`: see WAITS."""
    failures: list[Exception] = []
    queues = []
    connector = engine.scheduler.connector._scheduler._connector
    connector.lookups.waits.patience = WAITS[waits]()

    def delay() -> int:
        return source.randrange(most_steps + 1)

    worker = engine.worker._worker
    for owner in (connector.lookups, connector.stores, connector, worker._reports, worker._stores):
        for value in vars(owner).values():
            if isinstance(value, Background) and value._thread not in queues:  # two of them share one
                value.close()
                queues.append(Queue(delay, failures))
                value._thread = queues[-1]
    submit = worker._connector.submit_load
    least = LEAST_QUESTIONS if verified else 0
    worker._connector.submit_load = lambda *arguments, **how: LateLoading(
        engine, submit, least + delay(), delay(), *arguments, **how
    )
    submit_store = worker._connector.submit_store

    def submit_computed(*arguments: Any, after: int | None) -> Any:
        if after != ASIDE:
            engine.computes()
            return submit_store(*arguments)
        storing = submit_store(*arguments)
        storing.wait(None)  # as early as it may
        return storing

    worker._connector.submit_store, worker._stores._aside = submit_computed, ASIDE
    worker._kv = replace(worker._kv, aside=ASIDE)
    worker._reports_early = verified
    if verified and hasty:
        into_haste(worker)
    fence, wait_for_layer = worker.fence, worker.wait_for_layer
    worker.fence = lambda orders, stream: fence(orders, 0)  # nothing that runs here has streams
    worker.wait_for_layer = lambda layer, stream: wait_for_layer(layer, 0)

    def tick() -> None:
        for queue in queues:
            queue.tick()

    def wait(jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.result()

    worker_module.wait, worker_module.REPORT_AFTER_S = wait, 0.0
    engine.before_step = tick
    return failures


def into_haste(worker: Any) -> None:
    """Loads are reported in every step, not in those alone that compute nothing."""
    start = worker.start

    def started(orders: Any) -> None:
        start(replace(orders, is_idle=True))

    worker.start = started
