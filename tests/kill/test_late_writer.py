"""A writer stopped for longer than every deadline, and then let go on: its late bytes reach nobody."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_cases import CHUNKS, Case, Run
from kill_engine import CHUNK_BYTES
from kill_helpers import Nursery, nursery, until

from kvdock.client.client import Client

pytestmark = [pytest.mark.kill_matrix, pytest.mark.timeout(900)]  # the first run compiles the extension

LATE, OTHERS = 1, range(20, 30)
STOPPED_S = 1.5
"""Many heartbeats and settlings, and three of its deadlines, by the clock of a server that nothing holds up."""


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture
def run(children: Nursery) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="kvdock-late-") as folder:
        one = Run(children, Path(folder), Case("late", "copy.gathering", "writer"))
        yield one
        one.close()


@pytest.mark.parametrize("server_dies", [False, True])
def test_the_late_bytes_of_a_stopped_writer_never_reach_another_chunks_readers(run: Run, server_dies: bool) -> None:
    """It stops in the middle of its copy; its deadline passes; others fill the pool; it goes on and commits."""
    run.ready(run.serve())
    late, other, reader = run.engine(1), run.engine(2), run.engine(3)
    for child in (late, other, reader):
        child.answer()
    late.do("hurry", 0.5)
    late.page.arm("copy.gathering", 40)
    late.begin("store", LATE, CHUNKS)
    until(lambda: late.page.reached, "it copies")
    late.signal(signal.SIGSTOP)
    if server_dies:
        assert run.server is not None
        run.server.end()
        run.ready(run.serve())
    time.sleep(STOPPED_S)
    with Client(run.unix) as client:
        until(lambda: other.do("store", OTHERS[0], 1) or reader.do("load", OTHERS[0], 1) == (1, 0), "others are served")
        other.do("fill", OTHERS[0], len(OTHERS), CHUNKS)
        until(lambda: client.status().pool.quarantined_bytes == CHUNKS * CHUNK_BYTES, "its memory waits for it")
        assert client.status().counters["evicted_chunks"] > 0, "the pool is full"
        before = [reader.do("load", conversation, CHUNKS) for conversation in OTHERS]
        assert (CHUNKS, 0) in before
        late.page.disarm()
        late.signal(signal.SIGCONT)
        late.answer()
        assert reader.do("load", LATE, CHUNKS) == (0, 0), "nothing of it was published"
        assert [reader.do("load", conversation, CHUNKS) for conversation in OTHERS] == before
        until(lambda: client.status().pool.quarantined_bytes == 0, "its late word frees its memory")
        until(lambda: late.do("store", LATE, CHUNKS) or reader.do("load", LATE, CHUNKS) == (CHUNKS, 0), "it goes on")
    assert run.server is not None and run.server.do("check") == ""
