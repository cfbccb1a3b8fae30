"""Two threads of vLLM call the connector's scheduler side: one at a time."""

from __future__ import annotations

import threading

from kvdock.connectors.vllm.arrivals import MOST_STEPS, Unscheduled, in_turn


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
    unscheduled = Unscheduled()
    unscheduled.add("refused")
    assert unscheduled.refused() == []
    unscheduled.add("taken")
    unscheduled.remove("taken")
    unscheduled.remove("never received")
    assert [unscheduled.refused() for _ in range(MOST_STEPS + 1)] == [[]] * (MOST_STEPS - 1) + [["refused"], []]
