"""RunningWeights: a tag stands for one set of weights, whatever an engine says and when."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from kvdock.connectors.running_weights import RunningWeights

pytestmark = pytest.mark.weights


def weights(*, trusts_versions: bool = True) -> tuple[RunningWeights, list[str]]:
    names, told = itertools.count(), list[str]()
    made = RunningWeights(trusts_versions=trusts_versions, draw=lambda: f"n{next(names)}", renamed=told.append)
    return made, told


def test_the_first_weights_have_no_tag_and_share() -> None:
    one, told = weights()
    one.computed()
    assert (one.tag, one.name, one.epoch, one.may_share, one.is_stale, told) == (b"", "", 0, True, False, [])


def test_a_change_without_a_version_is_private_and_stale_until_the_flush() -> None:
    one, told = weights()
    one.computed()
    one.changed()
    assert (one.epoch, one.is_stale, one.may_share) == (1, True, True)
    assert told == [], "the server hears of weights with their first use, not with each part of an update"
    assert one.tag == b"weights private n0" and told == ["private n0"]
    one.flushed()
    assert (one.is_stale, one.name) == (False, "private n0")
    one.changed()
    assert one.name == "private n1"


def test_equal_versions_have_equal_tags() -> None:
    (one, _), (other, _) = weights(), weights()
    one.changed("7")
    other.changed()
    other.computed()
    private = other.tag
    other.named("7")
    assert one.tag == other.tag == b"weights version 7" != private
    assert other.epoch == 1, "a name is no change"


def test_a_long_version_has_a_short_name_of_its_own() -> None:
    (one, _), (other, _) = weights(), weights()
    one.changed("7" * 5000)
    other.changed("7" * 5001)
    assert one.name != other.name and len(one.name) < 100


def test_versions_that_are_not_trusted_are_private() -> None:
    one, _ = weights(trusts_versions=False)
    one.changed("7")
    first = one.name
    one.changed("8")
    assert first == "private n0" and one.name == "private n1"


def test_nothing_is_shared_between_the_beginning_and_the_end_of_a_change() -> None:
    one, _ = weights()
    one.computed()
    one.begin()
    assert (one.may_share, one.is_stale) == (False, True)
    one.flushed()
    assert (one.may_share, one.is_stale) == (False, False)
    before = one.epoch
    one.changed()
    assert (one.may_share, one.epoch > before) == (False, True)
    one.computed()  # with weights that are neither the old ones nor the new ones
    one.named("3")
    one.end()
    assert (one.may_share, one.is_stale, one.name) == (True, True, "version 3")


def test_a_cache_that_was_flushed_before_the_change_is_not_stale() -> None:
    one, _ = weights()
    one.computed()
    one.flushed()  # paused, as engines are before their weights change
    one.begin()
    one.end("1")
    assert (one.is_stale, one.name) == (False, "version 1")


def test_parts_of_one_update_keep_their_version() -> None:
    one, _ = weights()
    for _ in range(3):
        one.changed("3")
    one.flushed()
    assert one.name == "version 3"


@pytest.mark.parametrize("by_name", [False, True], ids=["with the change", "after it"])
def test_a_version_that_stands_for_two_sets_of_weights_is_not_trusted(
    by_name: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = weights()

    def update(version: str) -> None:
        one.changed("" if by_name else version)
        if by_name:
            one.named(version)

    update("prod")
    one.computed()
    with caplog.at_level(logging.WARNING, "kvdock.weights"):
        update("prod")
    assert one.name == "private n0" and "'prod'" in caplog.text
    update("9")
    assert one.name == "version 9"
    update("prod")
    assert one.name == "private n1", "what was computed under it by half an update is at the server"


def test_going_back_to_a_version_shares_with_it() -> None:
    one, _ = weights()
    for version in ("1", "2", "1"):
        one.changed(version)
        one.computed()
    assert one.name == "version 1"


def test_another_name_without_a_change_counts_as_one() -> None:
    one, _ = weights()
    one.computed()
    one.named("1")
    assert (one.name, one.epoch, one.is_stale) == ("version 1", 1, True)
    one.flushed()
    one.named("1")
    assert (one.epoch, one.is_stale) == (1, False)
    one.computed()
    one.named("2")
    assert (one.name, one.epoch, one.is_stale) == ("version 2", 2, True)


def test_doubt_is_said_once_and_ends_in_a_change(caplog: pytest.LogCaptureFixture) -> None:
    one, _ = weights()
    with caplog.at_level(logging.WARNING, "kvdock.weights"):
        one.withhold("its updater has no method x")
        one.withhold("its updater has no method x")
    assert (one.may_share, caplog.text.count("has no method x")) == (False, 1)
    one.trust_again()
    assert (one.may_share, one.epoch, one.name) == (True, 1, "private n0")


def test_a_tag_never_stands_for_two_sets_of_weights() -> None:
    """Random histories. Each change makes a new set, and each version is named for one set, as long as it is."""
    for seed in range(300):
        chance = random.Random(seed)
        one, _ = weights()
        at, fresh, computed = 0, itertools.count(1), dict[bytes, set[int]]()
        versions: dict[int, str] = {}
        for _ in range(40):
            match chance.choice(("changed", "changed as", "begin", "end", "end as", "named", "flushed", "compute")):
                case "changed" | "begin" | "end" as what:
                    at = next(fresh)
                    getattr(one, what)()
                case "changed as" | "end as" as what:
                    at = next(fresh)
                    versions[at] = f"v{at}"
                    getattr(one, what.split()[0])(versions[at])
                case "named":
                    one.named(versions.setdefault(at, f"v{at}"))
                case "flushed":
                    one.flushed()
                case _ if one.may_share:
                    one.computed()
                    computed.setdefault(one.tag, set()).add(at)
        mixed = {tag: sets for tag, sets in computed.items() if len(sets) > 1}
        assert not mixed, f"seed {seed}"
