"""What is counted after an answer: before the table changes, in the order of the answers, and no call waits for the
curves but those that read them."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from app_rig import OWN, opened

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
        later, done = Later(), list[str]()
        for number in range(3):
            later.simulate(lambda number=number: done.append(f"simulated {number}"))  # type: ignore[misc]
            later.count(lambda number=number: done.append(f"counted {number}"))  # type: ignore[misc]
        assert not done
        while len(done) < 6:
            await asyncio.sleep(0)
        return done

    found = asyncio.run(story())
    assert found == [f"counted {number}" for number in range(3)] + [f"simulated {number}" for number in range(3)]


def test_what_waits_for_the_curves_has_a_bound() -> None:
    async def story() -> int:
        later, done = Later(), list[int]()
        for number in range(3 * MOST_SIMULATIONS):
            later.simulate(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == list(range(2 * MOST_SIMULATIONS))
        later.catch_up()
        return len(done)

    assert asyncio.run(story()) == 3 * MOST_SIMULATIONS


def test_what_fails_keeps_nothing_waiting() -> None:
    async def story() -> list[str]:
        later, done = Later(), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: done.append(str(context["exception"])))

        def fail() -> None:
            raise ValueError("failed")

        later.count(fail)
        later.simulate(lambda: done.append("simulated"))
        while len(done) < 2:
            await asyncio.sleep(0)
        return done

    assert asyncio.run(story()) == ["failed", "simulated"]
