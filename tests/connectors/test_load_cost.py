"""When a hit is computed instead of loaded: the line through what loads took, the engine's speed, and the probe."""

from __future__ import annotations

import random

import pytest

from kvdock.connectors.cost import LEAST_LOADS, PROBE_S, LoadCost, LoadOrCompute, PrefillSpeed


def cost_of(*loads: tuple[int, float]) -> LoadCost:
    cost = LoadCost()
    for tokens, seconds in loads:
        cost.loaded(tokens, seconds)
    return cost


def test_loads_of_many_lengths_give_a_fixed_time_and_one_for_each_token() -> None:
    source = random.Random(1)
    cost = cost_of(*((tokens, 0.002 + tokens * 3e-6) for tokens in (source.randrange(100, 32_000) for _ in range(40))))
    for tokens in (1, 1000, 100_000):
        assert cost.seconds(tokens) == pytest.approx(0.002 + tokens * 3e-6)


def test_loads_of_one_length_say_what_a_token_takes() -> None:
    assert cost_of(*[(1000, 0.01)] * 5).seconds(500) == pytest.approx(0.005)


@pytest.mark.parametrize("loads", [
    [(100, 0.001), (200, 0.1), (150, 0.01), (180, 0.05)],  # a line through them begins below zero
    [(100, 0.1), (1000, 0.01), (500, 0.05), (800, 0.02)],  # the longer, the quicker
])
def test_no_load_is_expected_to_take_less_than_nothing(loads: list[tuple[int, float]]) -> None:
    cost = cost_of(*loads)
    least = [cost.seconds(tokens) or 0.0 for tokens in (1, 100, 10_000)]
    assert 0 < least[0] <= least[1] <= least[2]


def test_what_loads_take_now_counts_most() -> None:
    cost = cost_of(*[(tokens, tokens * 1e-6) for tokens in (1000, 2000, 3000) * 10])
    for tokens in (1000, 2000, 3000) * 10:
        cost.loaded(tokens, tokens * 1e-4)
    assert cost.seconds(2000) == pytest.approx(0.2, rel=0.1)


class Choosing:
    """An engine that computes 10,000 tokens a second, in steps of 1,000, once it has computed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.speed = PrefillSpeed(lambda: self.now_s)
        self.choice = LoadOrCompute(self.speed, lambda: self.now_s)

    def compute(self) -> None:
        for _ in range(4):
            self.speed.step(1000)
            self.now_s += 0.1
        self.speed.step(0)

    def load(self, *loads: tuple[int, float]) -> None:
        for tokens, seconds in loads:
            self.choice.loaded(tokens, seconds)


SLOW = [(tokens, 0.05 + tokens * 5e-5) for tokens in (500, 1000, 2000)]
"""50 ms each, and half of what computing takes."""


def test_a_short_hit_is_slower_to_load_than_to_compute_and_a_long_one_is_not() -> None:
    choosing = Choosing()
    choosing.compute()
    choosing.load(*SLOW)
    assert choosing.choice.is_too_slow(990) and not choosing.choice.is_too_slow(1010)


def test_until_both_are_known_every_hit_is_loaded() -> None:
    choosing = Choosing()
    choosing.load(*SLOW)
    assert not choosing.choice.is_too_slow(1)
    other = Choosing()
    other.compute()
    other.load(*SLOW[: LEAST_LOADS - 1])
    assert not other.choice.is_too_slow(1)


def test_after_a_while_without_a_load_one_is_made_to_see() -> None:
    choosing = Choosing()
    choosing.compute()
    choosing.load(*SLOW)
    choosing.now_s += PROBE_S - 0.01
    assert choosing.choice.is_too_slow(100)
    choosing.now_s += 0.02
    assert not choosing.choice.is_too_slow(100), "the probe"
    assert choosing.choice.is_too_slow(100), "one is enough"
    choosing.load(*[(tokens, tokens * 1e-6) for tokens in (100, 200, 300) * 10])
    assert not choosing.choice.is_too_slow(100), "the bus is free again"
