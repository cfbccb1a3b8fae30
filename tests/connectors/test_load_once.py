"""Waiting for what another request of the same engine loads, by a clock. tests/vllm/test_load_once.py has it under
vLLM's scheduler and tests/engine/test_load_once.py in the small engine, with real loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvdock.connectors.waits import (
    FIRST_FIXED_S,
    FIRST_TOKEN_S,
    LEAST_STEPS,
    MOST_IN_VAIN,
    MOST_TIMES,
    SLACK_S,
    LoadOnce,
)
from kvdock.protocol.keys import chunk_keys

CHUNK = 32
TOKENS = list(range(100, 100 + 20 * CHUNK))
EXPECTED_S = FIRST_FIXED_S + FIRST_TOKEN_S * 8 * CHUNK
"""The expected seconds of a load of eight chunks, before any was seen."""


def keys(*parts: Sequence[int]) -> list[bytes]:
    return chunk_keys(b"n" * 32, [token for part in parts for token in part], CHUNK)


EIGHT, OTHERS = keys(TOKENS[: 8 * CHUNK]), keys(TOKENS[-8 * CHUNK :])
"""The prompts' first eight chunks."""


class Made:
    """A LoadOnce whose clock stands still, with the outcomes of waits."""

    def __init__(self, **how: Any) -> None:
        self.now_s, self.outcomes, self.waited_s = 5.0, list[str](), list[float]()
        self.once = LoadOnce(CHUNK, lambda: self.now_s, count=self.ended, **{"whole": False, **how})

    def ended(self, how: str, seconds: float) -> None:
        self.outcomes.append(how)
        self.waited_s.append(seconds)

    def waits(
        self, name: str = "follows", local_tokens: int = 0, own: Sequence[bytes] = EIGHT, least_tokens: int = 1
    ) -> bool:
        return self.once.waits(name, lambda: own, local_tokens, least_tokens)

    def passes(self, seconds: float, steps: int = LEAST_STEPS + 1) -> None:
        self.now_s += seconds
        for _ in range(steps):
            self.once.step()


@pytest.fixture
def made() -> Made:
    loading = Made()
    loading.once.started("loads", EIGHT, 0, 8 * CHUNK)
    return loading


def test_who_shares_the_next_chunk_waits_until_it_is_at_hand(made: Made) -> None:
    assert made.waits()
    made.passes(EXPECTED_S)
    made.once.ended("loads")
    assert made.waits(), "it has come, and the engine has not put it into its cache"
    made.once.admitted("loads")
    assert not made.waits(local_tokens=8 * CHUNK)
    assert made.outcomes == ["fulfilled"] and made.waited_s == pytest.approx([EXPECTED_S])


def test_who_is_admitted_without_being_looked_up_once_more_has_got_what_it_waited_for(made: Made) -> None:
    assert made.waits()
    made.passes(0.5 * EXPECTED_S)
    made.once.admitted("follows")
    made.once.forget("follows")
    assert made.outcomes == ["fulfilled"] and made.waited_s == pytest.approx([0.5 * EXPECTED_S])


@pytest.mark.parametrize(("name", "how"), [
    ("another prompt", {"own": OTHERS}),
    ("the same behind another beginning", {"own": keys(TOKENS[-CHUNK:], TOKENS[CHUNK : 8 * CHUNK])}),
    ("all of it at hand", {"local_tokens": 8 * CHUNK}), ("the loader itself", {"name": "loads"}),
    ("less in common than it would load", {"least_tokens": 8 * CHUNK + 1}), ("no whole chunk", {"own": []}),
])
def test_nobody_else_waits(name: str, how: dict[str, Any], made: Made) -> None:
    assert not made.waits(**how)


def test_without_a_load_under_way_no_keys_are_made(made: Made) -> None:
    made.once.admitted("loads")
    assert not made.once.waits("follows", lambda: pytest.fail("it made keys"), 0)


def test_who_waits_makes_its_keys_once(made: Made) -> None:
    assert made.waits()
    assert made.once.waits("follows", lambda: pytest.fail("it made keys"), 0)


def test_whoever_has_a_part_at_hand_waits_for_the_rest(made: Made) -> None:
    assert made.waits(local_tokens=5 * CHUNK + 16)
    assert not made.waits(local_tokens=8 * CHUNK)


def test_who_shares_the_beginning_waits_for_that_alone(made: Made) -> None:
    own = keys(TOKENS[: 6 * CHUNK], range(4 * CHUNK))
    assert made.waits(own=own)
    made.once.admitted("loads")
    assert not made.waits(own=own, local_tokens=6 * CHUNK)
    assert made.outcomes == ["fulfilled"]


@pytest.mark.parametrize(("common", "waits"), [(1, False), (8, True)])
def test_a_long_load_is_not_waited_for_by_who_needs_little_of_it(common: int, waits: bool) -> None:
    long = Made()
    for number in range(3):  # loads take a second for each chunk
        long.once.started(f"{number}", keys([number] * CHUNK * 8), 0, 8 * CHUNK)
        long.passes(8.0)
        long.once.ended(f"{number}")
        long.once.admitted(f"{number}")
    long.once.started("loads", keys(TOKENS[: 10 * CHUNK]), 0, 10 * CHUNK)
    own = keys(TOKENS[: common * CHUNK], [7] * CHUNK)
    assert long.waits(own=own) == waits
    if not waits:
        long.passes(9.5)
        assert long.waits(own=own), "it ends soon"


def test_a_wait_ends_when_loads_of_that_length_have_long_ended(made: Made) -> None:
    assert made.waits()
    made.passes(MOST_TIMES * EXPECTED_S + SLACK_S - 0.001)
    assert made.waits("second"), "counted from the load's begin"
    assert made.waits()
    made.passes(0.002, 0)
    assert not made.waits()
    assert not made.waits("second")
    assert not made.waits("third"), "nor does anybody begin to wait"
    assert made.outcomes == ["expired", "expired"]
    made.once.started("follows", EIGHT, 0, 8 * CHUNK)
    assert not made.waits("second"), "it has waited in vain"
    assert made.waits("third")


def test_a_load_may_end_in_the_steps_after_that_in_which_it_began() -> None:
    ahead = Made(steps_ahead=1)
    ahead.once.started("loads", EIGHT, 0, 8 * CHUNK)
    assert ahead.waits()
    ahead.passes(100.0, LEAST_STEPS + 1)
    assert ahead.waits(), "three long steps"
    ahead.passes(0.0, 1)
    assert not ahead.waits()


def test_expected_is_what_loads_took(made: Made) -> None:
    for name in "abc":
        made.once.started(name, OTHERS, 0, 8 * CHUNK)
        made.passes(2.0)
        made.once.ended(name)
        made.once.admitted(name)
    made.once.started("later", OTHERS, 0, 8 * CHUNK)
    assert made.waits(own=OTHERS)
    made.passes(MOST_TIMES * 2.0)
    assert made.waits(own=OTHERS)
    made.passes(2 * SLACK_S)
    assert not made.waits(own=OTHERS)


def test_a_load_that_nobody_waits_for_any_more_is_learned_from(made: Made) -> None:
    for name in "abc":
        made.once.started(name, OTHERS, 0, 8 * CHUNK)
        made.waits(name + " follows", own=OTHERS)
        made.passes(20.0)
        assert not made.waits(name + " follows", own=OTHERS)
        made.once.ended(name)
        made.once.admitted(name)
    made.once.started("later", OTHERS, 0, 8 * CHUNK)
    made.waits(own=OTHERS)
    made.passes(20.0)
    assert made.waits(own=OTHERS)


@pytest.mark.parametrize("why", ["damaged", "gone"])
def test_when_a_load_fails_one_of_those_who_wait_loads_and_the_others_wait_for_that_one(why: str, made: Made) -> None:
    assert made.waits("second") and made.waits("third")
    if why == "damaged":
        made.once.ended("loads", 5 * CHUNK)
    else:
        made.once.forget("loads")
    assert not made.waits("second")
    assert made.once.takes_back("second") == (why == "damaged")
    assert not made.once.takes_back("second"), "once"
    made.once.started("second", EIGHT, 0, 8 * CHUNK)
    assert made.waits("third")
    assert made.once.takes_back("third") == (why == "damaged")
    assert made.outcomes == ["failed", "failed"]


def test_a_loader_that_is_looked_up_anew_has_lost_what_it_loaded(made: Made) -> None:
    assert made.waits()
    assert not made.waits("loads")
    assert not made.waits()
    assert made.outcomes == ["failed"]


def test_nobody_waits_for_one_failed_load_after_the_other(made: Made) -> None:
    for number in range(MOST_IN_VAIN):
        assert made.waits(), number
        made.once.forget("loads")
        made.once.started("loads", EIGHT, 0, 8 * CHUNK)
    assert not made.waits()
    assert made.waits("another")


def test_who_does_not_find_what_was_loaded_waits_no_more(made: Made) -> None:
    assert made.waits()
    made.once.admitted("loads")
    assert not made.waits()
    made.once.started("again", EIGHT, 0, 8 * CHUNK)
    assert not made.waits()
    made.once.forget("follows")
    assert made.waits(), "another request, of the same name"
    assert made.outcomes == ["missed"]


def test_with_windows_only_who_shares_all_of_it_waits() -> None:
    windows = Made(whole=True)
    windows.once.started("loads", EIGHT, 0, 8 * CHUNK)
    assert not windows.waits(own=keys(TOKENS[: 7 * CHUNK], [7] * 8 * CHUNK))
    assert not windows.waits(own=EIGHT[:7])
    assert windows.waits(own=keys(TOKENS[: 8 * CHUNK], [7] * CHUNK))


def test_what_the_engine_computes_again_at_the_end_is_not_waited_for() -> None:
    drafts = Made(lost_tokens=16)
    drafts.once.started("loads", EIGHT, 0, 8 * CHUNK)
    assert not drafts.waits(local_tokens=8 * CHUNK - 16)
    assert drafts.waits()
    drafts.once.admitted("loads")
    assert not drafts.waits(local_tokens=8 * CHUNK - 16)
    assert drafts.outcomes == ["fulfilled"]


def test_whose_prefix_has_another_name_in_the_engines_own_cache_does_not_wait() -> None:
    asked: list[tuple[str, str, int]] = []

    def shares(*names: Any) -> bool:
        asked.append(names)
        return bool(names[1] == "follows")

    named = Made(shares=shares)
    named.once.started("loads", EIGHT, 0, 8 * CHUNK)
    assert named.waits() and not named.waits("other adapter", own=keys(TOKENS[: 6 * CHUNK], [7] * 64))
    assert asked == [("loads", "follows", 8 * CHUNK), ("loads", "other adapter", 6 * CHUNK)]


def test_nothing_is_kept_of_requests_that_are_gone(made: Made) -> None:
    made.waits()
    for name in ("loads", "follows"):
        made.once.forget(name)
    assert not made.once._loads and not made.once._by_key and not made.once._waits
