"""What tiers do whose server hangs, is killed, or is killed in the midst of copies and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from tier_helpers import (
    MIB,
    POISON,
    Part,
    Parts,
    assert_loads,
    assert_never_wrong,
    eventually,
    load,
    store,
    store_all,
    works,
)
from tier_subjects import SERVED, TierSubject, opened

from kvdock.tiers.tier import Deadline, Outcome, TierError

pytestmark = [
    pytest.mark.tiers,
    pytest.mark.parametrize("made", SERVED, ids=lambda kind: kind.name, indirect=True, scope="module"),
]

UNDONE = {Outcome.MISSING, Outcome.LATE, Outcome.FAILED, Outcome.FULL}
"""FULL: none is left that has room."""
LATE_BY_S = 15.0
"""How long after its deadline a verb may come back, on a busy machine."""

T = TypeVar("T")


def ends_soon(call: Callable[[], list[T]], seconds: float) -> list[T]:
    """Its answers, none after a TierError. It comes back soon after its deadline of `seconds`."""
    began = time.monotonic()
    try:
        return call()
    except TierError:
        return []
    finally:
        assert time.monotonic() - began < seconds + LATE_BY_S


def test_a_server_that_hangs_costs_no_more_than_the_deadline(subject: TierSubject, parts: Parts) -> None:
    there, new = parts.many(2, 2 * MIB)
    with opened(subject) as tier:
        store_all(tier, [there])
        subject.stop()
        try:
            target, source = there.to_load(), new.to_store()
            for _ in range(2):
                loaded = ends_soon(lambda: [tier.load([target], Deadline(0.3))[0].outcome], 0.3)
                assert set(loaded) <= UNDONE
                assert set(ends_soon(lambda: tier.store([source], Deadline(0.3)), 0.3)) <= UNDONE
                assert set(ends_soon(lambda: tier.delete([new.name], Deadline(0.3)), 0.3)) <= UNDONE
                found = ends_soon(lambda: tier.exists([there.name], Deadline(0.3)), 0.3)
                assert found in ([], [False], [not subject.forgets_at_once])
            target.pages[:] = bytes([POISON]) * len(target.pages)
            tier.usage()
        finally:
            subject.resume()
        eventually(lambda: works(lambda: assert_loads(tier, [there])))
        assert target.pages == bytes([POISON]) * len(target.pages), "a load wrote after it had returned"
        assert_never_wrong([new], load(tier, [new]))


def test_a_server_that_is_killed_is_found_again_when_it_is_back(subject: TierSubject, parts: Parts) -> None:
    there, new = parts.many(2, 100_000)
    with opened(subject) as tier:
        store_all(tier, [there])
        subject.kill()
        try:
            for _ in range(3):
                assert set(ends_soon(lambda: [tier.load([there.to_load()], Deadline(1))[0].outcome], 1)) <= UNDONE
                assert set(ends_soon(lambda: tier.store([new.to_store()], Deadline(1)), 1)) <= UNDONE
                ends_soon(lambda: tier.delete([new.name], Deadline(1)), 1)
                found = ends_soon(lambda: tier.exists([there.name], Deadline(1)), 1)
                assert found in ([], [False], [not subject.forgets_at_once])
        finally:
            subject.restart()
        eventually(lambda: Outcome.DONE in ends_soon(lambda: store(tier, [new]), 60))
        assert_loads(tier, [new])
        assert_never_wrong([there], load(tier, [there]))


@pytest.mark.sweep("harm")
@pytest.mark.parametrize("harm", ["stop", "kill"])
def test_a_server_lost_in_the_midst_of_copies(subject: TierSubject, parts: Parts, harm: str) -> None:
    batch = parts.many(6, MIB)
    with opened(subject) as tier:
        store_all(tier, batch)
        wanted = [part.to_load() for part in batch]
        ended = threading.Event()
        wrong: list[Part] = []

        def read() -> None:
            while not ended.is_set():
                for one in wanted:
                    one.pages[:] = bytes(len(one.pages))
                try:
                    answers = tier.load(wanted, Deadline(0.5))
                except TierError:
                    return
                for part, one, answer in zip(batch, wanted, answers, strict=True):
                    if answer.outcome is Outcome.DONE and one.pages[: one.length] != part.data:
                        wrong.append(part)
                if any(answer.outcome is not Outcome.DONE for answer in answers):
                    return

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.05)  # so that a load is usually in progress
        getattr(subject, harm)()
        reader.join(LATE_BY_S)
        alive = reader.is_alive()
        ended.set()
        for one in wanted:
            one.pages[:] = bytes([POISON]) * len(one.pages)
        (subject.resume if harm == "stop" else subject.restart)()
        reader.join()
        assert not alive and not wrong
        eventually(lambda: Outcome.DONE in ends_soon(lambda: store(tier, batch[:1]), 60))
        assert_loads(tier, batch[:1])
        assert all(one.pages == bytes([POISON]) * len(one.pages) for one in wanted)
