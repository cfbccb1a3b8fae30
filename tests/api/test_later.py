"""What is counted after an answer: before the table changes, in the order of the answers, and no call waits for the
curves but those that read them."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial

import pytest
from app_rig import OWN, Rig, opened

from kvdock._core import POOL_FACTORS, Curve
from kvdock.api.record.curve import KEEP_S, Curves
from kvdock.api.record.later import MOST_SIMULATIONS, Later
from kvdock.api.reports.metrics import CLASSIC
from kvdock.api.turns import SLICE_S
from kvdock.protocol import schemas as s
from kvdock.protocol.forms import JSON
from kvdock.protocol.reports import CopyRates
from kvdock.protocol.wire_types import KEY_BYTES, MAX_KEYS

pytestmark = pytest.mark.security


def curves_of(rig: Rig) -> Curves:
    curves = rig.parts.sampler._curves
    assert curves is not None
    return curves


def spin() -> None:
    """A simulation that takes a slice."""
    until_s = time.thread_time() + SLICE_S
    while time.thread_time() < until_s:
        pass


def delay_curves(rig: Rig) -> None:
    """For many turns."""
    for _ in range(MOST_SIMULATIONS // 2):
        rig.parts.sampler._tally._later.simulate(spin)


async def look_up(rig: Rig, request: str, keys: bytes = secrets.token_bytes(KEY_BYTES * MAX_KEYS)) -> None:
    body = s.Lookup(session=rig.session, member="m", request=request, keys=keys)
    await rig.parts.handlers.service.lookup(OWN, body, JSON)


def test_a_release_waits_for_the_count_of_a_lookup_and_not_for_the_curve() -> None:
    with opened() as rig:
        tally, curves = rig.parts.sampler._tally, curves_of(rig)

        async def story() -> None:
            """In one turn of the event loop."""
            await tally.catch_up()
            lookups, simulated = tally.totals().lookups, curves._simulated.all.lookups
            await look_up(rig, "new")
            tally.count_answered()
            assert tally.counters.lookups == lookups + 1
            assert curves._simulated.all.lookups == simulated
            await tally.catch_up()
            assert curves._simulated.all.lookups == simulated + 1

        asyncio.run(story())


def test_lookups_are_counted_first_and_simulations_in_their_order() -> None:
    async def story() -> list[str]:
        later, done = Later(lambda: False), list[str]()
        for number in range(3):
            later.simulate(partial(done.append, f"simulated {number}"))
            later.count(partial(done.append, f"counted {number}"))
        assert not done
        while len(done) < 6:
            await asyncio.sleep(0)
        return done

    found = asyncio.run(story())
    assert found == [f"counted {number}" for number in range(3)] + [f"simulated {number}" for number in range(3)]


def test_what_waits_for_the_curves_has_a_bound() -> None:
    async def story() -> int:
        later, done = Later(lambda: False), list[int]()
        for number in range(3 * MOST_SIMULATIONS):
            later.simulate(partial(done.append, number))
        assert done == list(range(2 * MOST_SIMULATIONS))
        await later.catch_up()
        return len(done)

    assert asyncio.run(story()) == 3 * MOST_SIMULATIONS


def test_what_fails_keeps_nothing_waiting() -> None:
    async def story() -> list[str]:
        later, done = Later(lambda: False), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: done.append(str(context["exception"])))

        def fail() -> None:
            raise ValueError("failed")

        later.count(fail)
        later.simulate(lambda: done.append("simulated"))
        while len(done) < 2:
            await asyncio.sleep(0)
        return done

    assert asyncio.run(story()) == ["failed", "simulated"]


def test_a_part_of_a_simulation_that_fails_is_not_tried_again() -> None:
    async def story() -> list[str]:
        failures, done = list[str](), list[str]()

        def fail() -> bool:
            if done:
                return False
            raise ValueError("failed")

        later = Later(fail)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
        later.simulate(lambda: None)
        later.simulate(lambda: done.append("simulated"))
        for _ in range(10):
            await asyncio.sleep(0)
        return failures + done

    assert asyncio.run(story()) == ["failed", "simulated"]


def test_whoever_catches_up_gives_others_their_turns_and_waits_only_for_what_was_there() -> None:
    async def story() -> tuple[int, int]:
        later, done, turns = Later(lambda: False), list[int](), 0

        def simulate(number: int) -> None:
            spin()
            done.append(number)
            later.simulate(partial(simulate, number + MOST_SIMULATIONS // 2))

        for number in range(MOST_SIMULATIONS // 2):
            later.simulate(partial(simulate, number))
        catching = asyncio.create_task(later.catch_up())
        while not catching.done() and turns < 10 * MOST_SIMULATIONS:
            turns += 1
            await asyncio.sleep(0)
        assert catching.done() and done[: MOST_SIMULATIONS // 2] == list(range(MOST_SIMULATIONS // 2))
        return turns, len(done)

    turns, simulated = asyncio.run(story())
    assert turns >= MOST_SIMULATIONS // 4
    assert simulated <= MOST_SIMULATIONS


def test_metrics_have_the_reuse_distances_of_all_lookups_that_were_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as rig:
        metrics, curves, used = rig.parts.handlers.metrics, curves_of(rig), list[int]()
        rates = metrics._lists.copy_rates

        async def looked_up_meanwhile() -> CopyRates:
            found = await rates()
            delay_curves(rig)
            await look_up(rig, "one")
            await look_up(rig, "the same again")
            used.append(sum(curves.distances[1]))
            return found

        monkeypatch.setattr(metrics._lists, "copy_rates", looked_up_meanwhile)
        text = asyncio.run(metrics.text(OWN, CLASSIC)).decode()
        shown = next(line for line in text.splitlines() if line.startswith("kvdock_reuse_distance_bytes_count "))
        assert float(shown.split()[1]) == sum(curves.distances[1]) > used[0]


def test_a_curve_that_is_kept_has_all_lookups_that_were_answered() -> None:
    with opened() as rig:
        curves = curves_of(rig)

        async def story() -> int:
            await rig.parts.sampler._tally.catch_up()
            curves._kept_s -= KEEP_S
            before = curves._simulated.all.lookups
            delay_curves(rig)
            await look_up(rig, "kept")
            await rig.parts.sampler.keep_curve_when_due()
            return before

        before = asyncio.run(story())
        kept = Curves(rig.pool, curves._now_s, curves._boot_s, curves._kept)
        assert kept._simulated.all.lookups == before + 1


def test_each_simulated_pool_sees_a_lookup_in_a_step_of_its_own() -> None:
    """While others have turns; and whoever reads sees all of it."""
    in_steps, at_once = (
        Curve("lru", 1 << 20, salt=1, most_share=1.0, most_entries=16384, most_work=1e9) for _ in range(2)
    )
    for curve in (in_steps, at_once):
        curve.set_space(0, 16, 4096)
    assert not in_steps.go_on()
    keys = secrets.token_bytes(KEY_BYTES * 100)
    for number in range(20):
        some = keys[: KEY_BYTES * (number + 1) * 5]
        in_steps.looked_up(0, some, number)
        at_once.looked_up(0, some, number)
        at_once.stored(0, some)
        steps = 0
        while in_steps.go_on():
            steps += 1
        in_steps.stored(0, some)
        while in_steps.go_on():
            steps += 1
        assert steps == 2 * (len(POOL_FACTORS) - 1)
    assert in_steps.keep() == at_once.keep()
    in_steps.check()
