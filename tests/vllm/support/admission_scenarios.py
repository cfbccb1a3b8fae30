"""Which requests a real Scheduler admits in which step, when each step takes as long as under load.

Steps are counted that compute something: one that does not costs a millisecond. A request is admitted in the step that
first computes some of it. An engine without a connector, and one whose connector knows every answer at once, say what
is wanted; `Arrivals` are the same for all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from sched_engine import SchedEngine
from sched_scenarios import prompt

from kvdock.connectors import waits as patience_module
from kvdock.connectors.background import Background
from kvdock.connectors.vllm.setup import Settings

STEP_S = 0.2
SHAPE: dict[str, Any] = {"blocks": 200, "budget": 128, "seqs": 4, "step_s": STEP_S}
WAIT_S = {"answers": 0.1}
"""How late an answer may be, if not as in production: a busy machine is no slow server."""
PREFIXES = 3
NEW = ((0, 2), (2, 3), (4, 2))
"""Arrivals of requests that have nothing to load: in which step, how many."""
MIXED = ((0, "hit"), (1, "new"), (1, "hit"), (2, "new"), (2, "hit"), (3, "new"))
"""Arrivals of requests that have, and that have not: in which step."""


class AtOnce:
    """An executor that has done what it is given before it says so."""

    def submit(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self, wait: bool = True) -> None:
        pass


def nothing_to_load(address: str, server: str, pid: int = 0) -> dict[str, Any]:
    """`server`: none, answers, slow, stopped, lost."""
    with engine_of(address, server, pid) as engine:
        arrivals = [(step, f"{step}-{number}") for step, count in NEW for number in range(count)]
        return admissions(engine, [(step, name, prompt(hash_of(name), 90)) for step, name in arrivals])


def some_to_load(address: str, server: str, pid: int = 0, ahead_s: float = 0.0) -> dict[str, Any]:
    """`server`: also "at_once", whose answers are there before anybody can look. `ahead_s`: how long before its step a
    request arrives."""
    weights = os.urandom(8).hex()
    if server != "none":
        fill(address, weights)
    with engine_of(address, server, pid, weights) as engine:
        arrivals = [
            (step, f"{number} {kind}", prompt(number % PREFIXES if kind == "hit" else 50 + number, 150))
            for number, (step, kind) in enumerate(MIXED)
        ]
        return admissions(engine, arrivals, ahead_s)


def fill(address: str, weights: str) -> None:
    """Stores what is found by the hits."""
    engine = SchedEngine(address, **{**SHAPE, "step_s": 0.0}, weights_digest=weights)
    for number in range(PREFIXES):
        engine.add(f"cold {number}", prompt(number, 150), 1)
    engine.run()
    engine.close()


@contextmanager
def engine_of(address: str, server: str, pid: int, weights: str = "none stored") -> Iterator[SchedEngine]:
    wait_s = WAIT_S.get(server, Settings.lookup_wait_s)
    engine = SchedEngine("" if server == "none" else address, **SHAPE, weights_digest=weights, lookup_wait_s=wait_s)
    try:
        if server == "slow":
            client = engine.scheduler.connector._scheduler._session.client
            lookup = client.lookup
            client.lookup = lambda body: (time.sleep(0.05), lookup(body))[1]
            client.begin_lookup = lambda body: None  # nothing is sent before lookup()
        elif server == "at_once":
            connector = engine.scheduler.connector._scheduler._connector
            for owner in (connector, connector.lookups, connector.stores):
                for value in vars(owner).values():
                    if isinstance(value, Background):
                        value._thread = AtOnce()
        elif server in ("stopped", "lost"):
            os.kill(pid, signal.SIGSTOP if server == "stopped" else signal.SIGKILL)
        yield engine
    finally:
        if server == "stopped":
            os.kill(pid, signal.SIGCONT)
        engine.close()


def admissions(
    engine: SchedEngine, arrivals: Sequence[tuple[int, str, list[int]]], ahead_s: float = 0.0
) -> dict[str, Any]:
    """A request that is computed all the while, so that no step is for nothing, and `arrivals`.

    `admitted`: requests by the step that first computed some of them. `waited_s`: the most that one step waited."""
    engine.add("decodes", prompt(99, 20), 100)
    seen, admitted, step, waited_s = {"decodes"}, [], 0, 0.0
    engine.step()
    with counted_waits() as waits:
        while len(admitted) < len(arrivals):
            for at, name, tokens in arrivals:
                if at == step and name not in engine.requests:
                    engine.add(name, tokens, 3)
            time.sleep(ahead_s)
            waits.clear()
            out = engine.step()
            waited_s = max(waited_s, sum(waits))
            new = [name for name in out.num_scheduled_tokens if name not in seen]
            seen.update(new)
            admitted += [[step, name] for name in new]
            step += bool(out.num_scheduled_tokens)
            assert step < 60, f"requests never came: {admitted}"
    loaded = engine.loaded_tokens if engine._is_connected else 0
    wrong = len(engine.bad_reads) + engine.wrong_tokens
    return {"admitted": admitted, "waited_s": waited_s, "loaded": loaded, "wrong": wrong}


@contextmanager
def counted_waits() -> Iterator[list[float]]:
    """How long the engine's thread was ready to wait, each time that it did; no longer than it really waited."""
    waits: list[float] = []
    real = patience_module.wait

    def counted(futures: Sequence[Future[None]], timeout_s: float) -> Any:
        began_s = time.monotonic()
        done = real(futures, timeout_s)
        waits.append(min(timeout_s, time.monotonic() - began_s))
        return done

    patience_module.wait = counted
    try:
        yield waits
    finally:
        patience_module.wait = real


def hash_of(name: str) -> int:
    """Another one for each name, the same in every run."""
    return 1000 + int.from_bytes(name.encode(), "big") % 100_003
