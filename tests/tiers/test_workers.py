"""Threads behind verbs: what they do to the caller's pages ends before the call does, or the call says that it does
not."""

from __future__ import annotations

import threading

import pytest
from tier_helpers import eventually, patient

from kvdock.tiers.stores.mooncake.workers import Call, GivenUp, Names, Workers
from kvdock.tiers.tier import Deadline, StillRunning, TierError

pytestmark = pytest.mark.tiers


class Spoilt(Exception):
    pass


def workers(count: int) -> Workers[list[str]]:
    return Workers("test", count, list, Spoilt)


def test_a_caller_who_gave_up_finds_its_pages_untouched_from_then_on() -> None:
    gate, events = threading.Event(), list[str]()

    def job(call: Call, buffer: list[str]) -> None:
        gate.wait()
        try:
            with call.touching():
                events.append("touched")
        except GivenUp:
            events.append("given up")
            raise

    threads = workers(1)
    threads.run([job], Deadline(0.05), patience_s=0)
    gate.set()
    eventually(lambda: bool(events))
    assert events == ["given up"]
    assert threads.close(patient())


def test_a_caller_waits_for_what_touches_its_pages_and_says_when_that_does_not_end() -> None:
    gate, inside = threading.Event(), threading.Event()
    touched: list[bool] = []

    def job(call: Call, buffer: list[str]) -> None:
        with call.touching():
            inside.set()
            gate.wait()
            touched.append(True)

    def cancelled_inside(gate_s: float | None) -> Deadline:
        """The deadline is cancelled once the job touches pages, and the job goes on `gate_s` seconds later."""
        deadline = Deadline()

        def cancel() -> None:
            inside.wait()
            deadline.cancel()
            if gate_s is not None:
                threading.Timer(gate_s, gate.set).start()

        threading.Thread(target=cancel).start()
        return deadline

    threads = workers(2)
    with pytest.raises(StillRunning):
        threads.run([job], cancelled_inside(None), patience_s=0.05)
    gate.set()
    eventually(lambda: touched == [True])
    gate.clear()
    inside.clear()
    threads.run([job], cancelled_inside(0.2), patience_s=60)
    assert touched == [True, True]
    assert threads.close(patient())


def test_what_a_job_raises_reaches_its_caller_and_the_thread_works_on() -> None:
    def job(call: Call, buffer: list[str]) -> None:
        raise TierError("test", "lost")

    done: list[bool] = []
    threads = workers(1)
    with pytest.raises(TierError, match="lost"):
        threads.run([job, job], patient(), patience_s=0)
    threads.run([lambda call, buffer: done.append(True)], patient(), patience_s=0)
    assert done == [True]
    assert threads.close(patient())


def test_memory_that_a_call_may_still_write_to_is_not_used_again() -> None:
    seen: list[list[str]] = []

    def job(call: Call, buffer: list[str]) -> None:
        buffer.append("x")
        seen.append(buffer)
        if len(seen) == 1:
            raise Spoilt("it may still be in progress")

    threads = workers(1)
    with pytest.raises(TierError, match="it may still be in progress"):
        threads.run([job], patient(), patience_s=0)
    threads.run([job], patient(), patience_s=0)
    assert [len(buffer) for buffer in seen] == [1, 1]
    assert threads.close(patient())


def test_a_name_is_in_one_pair_of_hands() -> None:
    names, call = Names(), Call(1)
    with names.held(["a", "b"], call), names.held(["c"], call):
        with call.changed:
            threading.Timer(0.05, lambda: call.give_up(0)).start()
        with pytest.raises(GivenUp), names.held(["b", "d"], call):
            raise AssertionError("two have it")
    with names.held(["d", "a"], Call(1)):
        pass
