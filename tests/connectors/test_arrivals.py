"""Two threads of vLLM call the connector's scheduler side: one at a time."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.vllm import arrivals
from kvdock.connectors.vllm.arrivals import CORE, MOST_STEPS, Arrivals, in_turn, listen
from kvdock.connectors.waits import EarlyQuestions


class Side:
    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.inside, self.most = 0, 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    @in_turn
    def planned(self) -> None:
        self._stay()
        self.has_begun.set()
        assert self.may_end.wait(10.0)
        self.inside -= 1

    @in_turn
    def received(self) -> None:
        self._stay()
        self.inside -= 1

    def _stay(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)


def test_one_thread_at_a_time_is_let_in_and_may_call_on() -> None:
    side = Side()
    threads = [threading.Thread(target=side.planned), threading.Thread(target=side.received)]
    threads[0].start()
    assert side.has_begun.wait(10.0)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "it waits"
    side.may_end.set()
    for thread in threads:
        thread.join(10.0)
    assert side.most == 1
    with side.turn:
        side.received()


def test_what_is_not_scheduled_for_some_steps_was_refused() -> None:
    arrivals = Arrivals(EarlyQuestions(lambda request_id: None))
    arrivals.received("refused")
    assert arrivals.refused() == []
    arrivals.received("taken")
    arrivals.scheduled("taken")
    arrivals.scheduled("never received")
    assert [arrivals.refused() for _ in range(MOST_STEPS + 1)] == [[]] * (MOST_STEPS - 1) + [["refused"], []]


def core_of(monkeypatch: pytest.MonkeyPatch, *connectors: Any) -> Any:
    """A core of a vLLM that has these behind its MultiConnector; in this environment there is no vLLM."""

    class EngineCore:
        scheduler = SimpleNamespace(connector=SimpleNamespace(_connectors=connectors))

        def preprocess_add_request(self, request: str) -> tuple[str, int]:
            return request.upper(), 7

    module = ModuleType(CORE)
    module.EngineCore = EngineCore  # type: ignore[attr-defined]  # as that module has it
    monkeypatch.setitem(sys.modules, CORE, module)
    monkeypatch.setattr(arrivals, "_is_listening", False)
    return EngineCore()


def test_of_several_connectors_ours_hears_what_the_core_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    core = core_of(monkeypatch, SimpleNamespace(), SimpleNamespace(kvdock_received=heard.append))
    listen()
    listen()
    assert core.preprocess_add_request("a") == ("A", 7) and heard == ["A"], "once, however often it was told to listen"


def test_a_connector_that_fails_costs_no_request_and_is_told_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def received(request: str) -> None:
        heard.append(request)
        raise ValueError("another version's request")

    core = core_of(monkeypatch, SimpleNamespace(kvdock_received=received))
    listen()
    assert [core.preprocess_add_request(name) for name in ("a", "b")] == [("A", 7), ("B", 7)]
    assert heard == ["A"] and caplog.text.count("in between two steps") == 1
