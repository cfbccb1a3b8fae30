"""Which chunks the mover writes, by what becomes of those that were asked for once."""

from __future__ import annotations

import pytest

from kvdock.tiers.mover.write_behind import DAY_S, JUDGED, MOST_JUDGED, AskCounts, WriteBudget

pytestmark = pytest.mark.tiers

CAPACITY = 100


def keys(first: int, count: int) -> list[bytes]:
    return [at.to_bytes(32, "big") for at in range(first, first + count)]


def passed_by(asks: AskCounts, first: int, count: int, *, again: int = 0) -> None:
    """Chunks that are asked for and evicted; then the first `again` of them are asked for once more."""
    some = keys(first, count)
    asks.asked(some)
    asks.evicted(some, CAPACITY)
    asks.asked(some[:again])


def test_at_first_every_chunk_is_worth_it() -> None:
    asks = AskCounts(0)
    new = keys(0, 4)
    asks.asked(new)
    assert asks.worth(new) == new


def test_chunks_that_nobody_asks_for_again_are_not_written_and_those_asked_for_twice_are() -> None:
    asks = AskCounts(0)
    passed_by(asks, 0, CAPACITY + JUDGED - 1)
    assert asks.worth(keys(9000, 4)), "chunks that tiers could still have are not counted yet"
    passed_by(asks, 1000, 1)
    assert not asks.worth(keys(9000, 4))
    twice = keys(2000, 4)
    asks.asked(twice)
    asks.asked(twice)
    assert asks.worth([*twice, *keys(9000, 4)]) == twice


def test_they_are_written_again_once_a_quarter_comes_back() -> None:
    asks = AskCounts(0)
    passed_by(asks, 0, CAPACITY + JUDGED)
    for first in range(1000, 1000 + 20 * MOST_JUDGED, 50):
        passed_by(asks, first, 50, again=10)
    assert not asks.worth(keys(10**6, 4)), "a fifth"
    for first in range(10**7, 10**7 + 20 * MOST_JUDGED, 50):
        passed_by(asks, first, 50, again=15)
    assert asks.worth(keys(10**6, 4)), "three tenths"


def test_what_was_asked_for_twice_before_it_went_does_not_count() -> None:
    asks = AskCounts(0)
    for first in range(0, 4 * CAPACITY + 4 * JUDGED, 50):
        some = keys(first, 50)
        asks.asked(some)
        asks.asked(some)
        asks.evicted(some, CAPACITY)
    assert asks.worth(keys(9000, 4))


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_number_that_is_set_is_kept(wanted: int) -> None:
    asks = AskCounts(wanted)
    passed_by(asks, 0, CAPACITY + JUDGED)
    new = keys(5000, 2)
    for _ in range(wanted):
        assert asks.worth(new) == (new if wanted == 1 else [])
        asks.asked(new)
    assert asks.worth(new) == new


def test_a_day_s_writes_come_evenly_and_add_up_to_a_day_s() -> None:
    now_s, written = [0.0], [0]
    budget = WriteBudget(24_000, lambda: written[0], lambda: now_s[0])
    steps = [(0.0, 0, 1000), (0.0, 1500, -500), (3600.0, 0, 500), (10 * DAY_S, 0, 24_000)]  # at first an hour's
    for later_s, more, left in steps:
        now_s[0], written[0] = now_s[0] + later_s, written[0] + more
        assert (budget.left_bytes, budget.is_spent) == (left, left <= 0)
    assert not WriteBudget(0, lambda: 1, lambda: 0.0).is_spent
