"""Random misfortune: requests aborted, prefixes dropped, stored bytes damaged."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sched_engine import SchedEngine
from vllm.v1.request import RequestStatus


class Chaos:
    """`likely`: of each kind of misfortune, in each step or load. A load that vLLM has no good way back from is left
    alone, and what it shares with others: one of several groups before 0.33, and one in the step that runs its
    request. What damage() does before anybody asks must be a miss there."""

    def __init__(self, engine: SchedEngine, source: random.Random, likely: float) -> None:
        self._engine, self._source, self._likely = engine, source, likely
        self.seen: Counter[str] = Counter()
        self._parts: list[tuple[Any, Any]] = []
        self._looked_at: list[Any] = []
        """Answers whose parts are looked at in the background: they are promised if they are found whole."""
        self._lock = threading.Lock()
        half = self._connector = engine.scheduler.connector._scheduler._connector
        verify = half.lookups._verify_now

        def verifying(request_id: str) -> None:
            request = half._requests.get(request_id)
            with self._looking_at(request.lookup.answer if request is not None else None):
                verify(request_id)

        half.lookups._verify_now = verifying
        worker = engine.worker._worker
        self._has_way_back = len(engine.windows) == 1 or worker._traits.takes_failed_requests
        finish, submit, begin = worker._connector.finish_store, worker._submit, worker.start
        self._in_step: list[Any] = []

        def begun(orders: Any) -> None:
            plans = [order.plan for order in orders.loads if not order.is_async]
            self._in_step = [part for plan in plans for piece in plan.pieces for part in piece.parts]
            begin(orders)

        def noted(storing: Any, **how: Any) -> int:
            self._parts += [(storing.attachment, part) for piece in storing.plan.pieces for part in piece.parts]
            return int(finish(storing, **how))

        def endangered(order: Any, is_early: bool) -> Any:
            if order.is_async and self._has_way_back and self._happens():
                piece = source.choice(order.plan.pieces)
                attachment = worker._connector.session.attachment
                part = source.choice(piece.parts) if piece.parts else None
                with self._lock:
                    if part is not None and attachment is not None and part not in self._promised():
                        self._flip(attachment, part)
                        self.seen["damaged_loads"] += 1
            return submit(order, is_early)

        worker._connector.finish_store, worker._submit, worker.start = noted, endangered, begun

    def step(self) -> None:
        engine = self._engine
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and self._happens():
            name = self._source.choice(running)
            self.seen[f"aborted_{engine.requests[name].status.name.lower()}"] += 1
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if self._happens():
            self.seen["forgotten"] += engine.scheduler.reset_prefix_cache()
        engine.step()

    def _promised(self) -> list[Any]:
        """Parts of loads that were promised because they were seen to be whole, or may be."""
        half = self._connector
        lookups = [request.lookup for request in list(half._requests.values())]
        verified = [one.verified for one in lookups if one.verified is one.answer]
        promised = [answer for answer in verified + self._looked_at if answer is not None]
        return [part for answer in promised for parts in answer.chunks for part in parts] + self._in_step

    @contextmanager
    def _looking_at(self, answer: Any) -> Iterator[None]:
        with self._lock:
            self._looked_at.append(answer)
        try:
            yield
        finally:
            with self._lock:
                self._looked_at.remove(answer)

    def damage(self, count: int) -> None:
        """Some of what was stored. Nothing may be asked for at the time."""
        for attachment, part in self._source.sample(self._parts, min(count, len(self._parts))):
            self._flip(attachment, part)
            self.seen["damaged"] += 1

    def _flip(self, attachment: Any, part: Any) -> None:
        address = attachment.segments.address(part.segment, part.offset, part.length)
        byte = ctypes.c_uint8.from_address(address + self._source.randrange(part.length))
        byte.value ^= 1 << self._source.randrange(8)

    def _happens(self) -> bool:
        return self._source.random() < self._likely
