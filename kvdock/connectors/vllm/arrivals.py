"""Requests that reach vLLM while a step runs.

vLLM's scheduler takes in new requests between two steps, and only then reports them to connectors. Under load a step
takes 300 ms and more, in which a lower tier loads gigabytes. So kvdock's connector learns of a request when vLLM's core
receives it:

    vLLM's receiving thread   EngineCore.preprocess_add_request ──► kvdock_received: a question is sent, tiers load
    vLLM's scheduler thread   … a step ends ──► on_new_request ──► get_num_new_matched_tokens: the answer is read

Connectors have no hook there, so `listen` wraps the method. A vLLM without it is served as well: then questions are
sent between two steps. `in_turn` makes the two threads call the connector one at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvdock.connectors.waits import EarlyQuestions

log = logging.getLogger("kvdock.vllm")

CORE = "vllm.v1.engine.core"
MOST_STEPS = 3
"""A request that vLLM does not schedule within this many steps was refused."""
_is_listening = False


class TakesTurns(Protocol):
    @property
    def turn(self) -> AbstractContextManager[Any]:
        """A lock that is held while a method of the object runs."""


T = TypeVar("T", bound=TakesTurns)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Wraps a method so that it waits until no other thread runs such a method of the object."""

    @wraps(method)
    def run(self: T, /, *args: P.args, **more: P.kwargs) -> R:
        with self.turn:
            return method(self, *args, **more)

    return run


class Arrivals:
    """Requests that vLLM has received and not yet passed to its scheduler, which takes them in before it plans the next
    step. vLLM refuses some requests, for example while it is paused, without a report to its scheduler or to
    connectors. Leases for refused requests are cancelled when vLLM plans steps again. `early`: sends questions for
    requests that wait."""

    def __init__(self, early: EarlyQuestions) -> None:
        self.early = early
        self._steps = 0
        self._since: dict[str, int] = {}

    def received(self, request_id: str) -> None:
        self._since[request_id] = self._steps

    def scheduled(self, request_id: str) -> None:
        """vLLM's scheduler has taken the request in."""
        self._since.pop(request_id, None)

    def refused(self) -> list[str]:
        """Called in each step. Returns the requests that vLLM has refused. If one is scheduled later after all, a new
        question is sent for it."""
        self._steps += 1
        found = [request_id for request_id, steps in self._since.items() if self._steps - steps > MOST_STEPS]
        for request_id in found:
            del self._since[request_id]
            self.early.left(request_id)
        return found


def listen() -> None:
    """From now on all cores of this process report each request that they have received to their connectors, by
    `kvdock_received(request)`."""
    global _is_listening
    core = getattr(sys.modules.get(CORE), "EngineCore", None)  # not loaded: this process has no core
    if core is None or _is_listening:
        return
    real = getattr(core, "preprocess_add_request", None)
    if real is None:
        log.info("requests are asked about in between two steps: vLLM has no EngineCore.preprocess_add_request")
        return

    @wraps(real)
    def preprocess(self: Any, *args: Any, **more: Any) -> Any:
        made = real(self, *args, **more)
        try:
            _report(self, made[0])
        except Exception:  # vLLM keeps the request all the same, even if its core is not as expected here
            core.preprocess_add_request = real  # one traceback, not one for each request
            log.exception("from now on requests are asked about in between two steps")
        return made

    core.preprocess_add_request = preprocess
    _is_listening = True


def _report(core: Any, request: Any) -> None:
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for one in (connector, *getattr(connector, "_connectors", ())):  # MultiConnector has several
        if hasattr(one, "kvdock_received"):
            one.kvdock_received(request)
