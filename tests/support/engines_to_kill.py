"""Real engines in processes of their own, which a test kills in the midst of their work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from connector_helpers import engine_over, kvdock_of
from engine_helpers import prompt, sampling
from tp_helpers import engine_of_ranks, shared

from kvdock.datapath.copy import Copier, CopyHandle, PartCopy, ScatterParts
from kvdock.engine.ranks import ProcessGroup


class HalfwayCopier:
    """Gathers half of what it is asked for, reports, and never comes back."""

    def __init__(self, inner: Copier, link: Connection) -> None:
        self.inner, self.link = inner, link

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        self.inner.gather(parts[: (len(parts) + 1) // 2]).result()
        self.link.send("halfway")
        threading.Event().wait()
        raise AssertionError("it waits for ever")

    def scatter(self, parts: ScatterParts, *, after: int | None = None) -> CopyHandle:
        return self.inner.scatter(parts, after=after)

    def close(self) -> None:
        self.inner.close()


def store_half(address: str, salt: str, length: int, link: Connection) -> None:
    """Computes one prompt and stores it with a copier that moves the first half of the parts' bytes into their slots.

    It says so, and then waits to be killed: no commit ever follows."""
    engine = engine_over(address, label="to be killed", salt=salt)
    worker = kvdock_of(engine).worker
    worker._storers = [HalfwayCopier(copier, link) for copier in worker._storers]
    engine.generate([prompt(1, length)], sampling(1))
    engine.drain(60.0)


def serve_for_ever(address: str, link: Connection) -> None:
    """Sends the process ids of the other ranks once it computes and stores."""
    process_group = ProcessGroup(4)
    engine = engine_of_ranks(process_group, shared("tiny-mla", 4), address)
    said = False
    number = 0
    while True:
        engine.add_request(prompt(number, 200), sampling(8))
        number += 1
        while engine.has_unfinished:
            engine.step()
            if not said and engine.scheduler.storing:
                said = True
                link.send([process.pid for process in process_group.processes.values()])
