"""What an exclusive pool keeps of a request while it runs, and when it has ended: figures are chunks that are found."""

from __future__ import annotations

from typing import Any

from hint_scenarios import CHUNK, Hinted
from sched_engine import SchedEngine, kv_transfer_state
from sched_scenarios import prompt
from vllm.v1.request import RequestStatus

CHUNKS = 20
OTHERS = 24
"""Chunks of each other request."""
ROOM = 250
"""About as many chunks as the server has room for."""


def while_it_runs(address: str, exclusive: bool, end: str, beside: str = "none") -> dict[str, Any]:
    """A request runs while others need the pool's room. `end`: generates, aborted. `beside`: a second engine, in
    the "same" namespace, in an "other", or "none"."""
    made = Hinted(address, exclusive=exclusive)
    engine, second = made.engine, None
    if beside != "none":
        own = engine.config.kv_transfer_config.kv_connector_extra_config["weights_digest"]
        second = SchedEngine(address, chunk_tokens=CHUNK, weights_digest=own if beside == "same" else "another")
        kv_transfer_state._KV_CONNECTOR_AGENT = engine.worker  # vLLM has one engine in a process
    request = engine.add("long", prompt(1, CHUNKS * CHUNK + 1), 300)
    assert made.reaches(lambda: made.found(request) >= CHUNKS)
    for number in range(ROOM // OTHERS + 1):
        other = engine.add(f"other {number}", prompt(1000 + number, OTHERS * CHUNK + 1), 2)
        assert made.reaches(lambda other=other: other.is_finished() and not made.scheduler._stores)
    during = made.found(request)
    assert not request.is_finished()
    if end == "aborted":
        engine.scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
        engine.step()
    assert made.reaches(lambda: request.is_finished() and not made.scheduler._stores)
    found = {"during": min(during, CHUNKS), "after": min(made.found(request), CHUNKS)}
    engine.forget_prefixes()
    engine.add("again", prompt(1, CHUNKS * CHUNK + 1), 2)
    engine.run()
    found["wrong"] = len(engine.bad_reads) + engine.wrong_tokens
    engine.close()
    if second is not None:
        second.close()
    return found


SCENARIOS = {made.__name__: made for made in (while_it_runs,)}
