"""What is counted after an answer: before the table changes, in the order of the answers, and no call waits for the
curves but those that read them."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

import pytest
from app_rig import OWN, opened

from kvdock._core import POOL_FACTORS, Curve
from kvdock.api.record.later import MOST_SIMULATIONS, Later
from kvdock.protocol import schemas as s
from kvdock.protocol.forms import JSON
from kvdock.protocol.wire_types import KEY_BYTES, MAX_KEYS

pytestmark = pytest.mark.security


def test_a_release_waits_for_the_count_of_a_lookup_and_not_for_the_curve() -> None:
    with opened() as rig:
        service, tally, curves = rig.parts.handlers.service, rig.parts.sampler._tally, rig.parts.sampler._curves
        assert curves is not None

        async def story() -> None:
            """In one turn of the event loop."""
            tally.catch_up()
            lookups, simulated = tally.totals().lookups, curves._simulated.all.lookups
            keys = secrets.token_bytes(KEY_BYTES * MAX_KEYS)
            await service.lookup(OWN, s.Lookup(session=rig.session, member="m", request="new", keys=keys), JSON)
            tally.count_answered()
            assert tally.counters.lookups == lookups + 1
            assert curves._simulated.all.lookups == simulated
            tally.catch_up()
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
        later.catch_up()
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
