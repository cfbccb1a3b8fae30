"""Requests that reach vLLM while a step runs.

vLLM's scheduler takes new requests in between two steps, and only then tells connectors of them. Under load a step
takes 300 ms and more, in which a lower tier loads gigabytes. So the connector hears of a request when vLLM's core
receives it:

    vLLM's receiving thread   EngineCore.preprocess_add_request ──► `received`: the server is asked, tiers begin to load
    vLLM's scheduler thread   … a step ends ──► on_new_request ──► get_num_new_matched_tokens: what has come is found

Connectors have no hook there, so `listen` wraps the method. A vLLM without it is served as well: a request is asked
about in between two steps. `in_turn` lets one of the two threads in at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

log = logging.getLogger("kvdock.vllm")

CORE = "vllm.v1.engine.core"
_is_listening = False


class TakesTurns(Protocol):
    """`turn`: held while one of its methods runs."""

    turn: AbstractContextManager[Any]


T = TypeVar("T", bound=TakesTurns)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """The method, which waits for its turn."""

    @wraps(method)
    def run(self: T, /, *args: P.args, **more: P.kwargs) -> R:
        with self.turn:
            return method(self, *args, **more)

    return run


def listen() -> None:
    """From now on all cores of this process tell their connectors of each request that they have received, by
    `received(request)`."""
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
            _tell(self, made[0])
        except Exception:  # whatever a core of another version is like, it has its request
            log.exception("a request is asked about in between two steps")
        return made

    core.preprocess_add_request = preprocess
    _is_listening = True


def _tell(core: Any, request: Any) -> None:
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for one in (connector, *getattr(connector, "_connectors", ())):  # MultiConnector has several
        if hasattr(one, "received"):
            one.received(request)
