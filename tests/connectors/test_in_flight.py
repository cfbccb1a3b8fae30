"""How long a block counts as used by steps under way. Who uses what: test_vllm_scheduler.py."""

from __future__ import annotations

from kvdock.connectors.vllm.tables import InFlight

STEPS = 3


def test_what_a_step_uses_is_free_once_as_many_steps_have_followed_as_may_be_under_way() -> None:
    in_flight = InFlight(STEPS, keeps_back=True)
    in_flight.start_step()
    in_flight.uses([1, None, 2])
    for _ in range(STEPS):
        assert in_flight.touches({2, 9}) and not in_flight.touches({9})
        in_flight.start_step()
    assert not in_flight.touches({2, 9})


def test_a_step_of_which_nothing_is_known_may_use_any_block() -> None:
    in_flight = InFlight(STEPS, keeps_back=True)
    in_flight.start_step()
    in_flight.uses_any()
    in_flight.uses([1])
    for _ in range(STEPS):
        assert in_flight.touches({9})
        in_flight.start_step()
    assert not in_flight.touches({1, 9})
