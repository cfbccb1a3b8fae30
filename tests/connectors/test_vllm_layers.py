"""Layer by layer: which bands a forward pass has waited for. The copies themselves: tests/cuda/test_streams.py."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.worker import VERIFIED_BEFORE, VERIFIED_EARLY, Layers, Own
from kvdock.datapath.copy import PartResult


class Copy:
    """Writes down what was ordered after it. `joined`: the last of the bands that are joined with each band."""

    def __init__(self, joined: dict[int, int] | None = None) -> None:
        self.orders: list[tuple[int, int | None]] = []
        self._joined = joined or {}

    def order(self, stream: int, band: int | None = None) -> int:
        self.orders.append((stream, band))
        return self._joined.get(band or 0, band or 0)

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def took_s(self) -> float | None:
        return None

    def verified(self, timeout_s: float | None) -> list[PartResult] | None:
        return []

    def result(self) -> list[PartResult]:
        return []

    def wrong(self) -> list[int]:
        return []


def loading(*groups: int, joined: dict[int, int] | None = None) -> tuple[Any, list[Copy]]:
    copies = [Copy(joined) for _ in groups]
    made = [(Own(0, group), (), copy) for group, copy in zip(groups, copies, strict=True)]
    return SimpleNamespace(copies=made), copies


def state(layers: Layers) -> tuple[bool, bool]:
    """(something is waited for, all of it was asked for)"""
    return layers.any_watched, layers.all_ordered


def test_the_first_band_has_its_share_of_the_planes_and_the_others_share_the_rest() -> None:
    cut = VERIFIED_EARLY
    for count in (1, 2, 7, 8, 9, 32, 61):
        ends, verified_after = Layers([{f"layer.{at}": at for at in range(count)}], cut).bands[0]
        first, later = ends[0], count - ends[0]
        assert verified_after == cut.verified_after and cut.first_share * count <= first < cut.first_share * count + 1
        assert list(ends) == sorted(set(ends)) and ends[-1] == count and len(ends) == 1 + min(later, cut.later)
        sizes = [end - begin for begin, end in pairwise(ends)]
        assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("planes", [1, 2], ids=["latent", "k and v"])
def test_what_was_verified_before_can_be_read_layer_by_layer(planes: int) -> None:
    of_layers = {f"layer.{at}": planes * (at + 1) - 1 for at in range(32)}
    ends, verified_after = Layers([of_layers], VERIFIED_BEFORE).bands[0]
    assert (list(ends), verified_after) == ([planes * (at + 1) for at in range(32)], 0)


def test_each_band_is_waited_for_once_a_stream_and_every_layer_must_be_asked_for() -> None:
    layers = Layers([{f"layer.{at}": at for at in range(16)}])
    assert state(layers) == (False, True)
    layers.order("layer.0", 5)
    one, (copy,) = loading(0)
    layers.watch([one])
    for at in range(0, 16, 2):
        assert state(layers) == (True, False)
        layers.order(f"layer.{at}", 5)
        layers.order(f"layer.{at + 1}", 5)
    assert state(layers) == (True, True)
    assert copy.orders == [(5, band) for band in range(1 + VERIFIED_EARLY.later)]
    layers.order("layer.10", 6)
    assert copy.orders[-1] == (6, 1), "another stream has not waited"
    layers.watch([])
    assert state(layers) == (False, True)


def test_bands_that_the_copier_has_joined_are_waited_for_once() -> None:
    """The first of eight bands of one layer stays alone, the next four are one batch, and the last three another."""
    layers = Layers([{f"layer.{at}": at for at in range(8)}], VERIFIED_BEFORE)
    one, (copy,) = loading(0, joined={at: at and (4 if at < 5 else 7) for at in range(8)})
    alone, (other,) = loading(0)
    layers.watch([one, alone])
    for at in range(8):
        assert state(layers) == (True, False)
        layers.order(f"layer.{at}", 5)
    assert copy.orders == [(5, 0), (5, 1), (5, 5)] and state(layers) == (True, True)
    assert other.orders == [(5, band) for band in range(8)], "a smaller load beside it has its own bands"
    layers.order("layer.3", 6)
    layers.order("layer.2", 6)
    assert copy.orders[3:] == [(6, 3)], "the bands before one have come when it has"


def test_a_layer_waits_for_its_own_groups_copies_alone() -> None:
    layers = Layers([{f"full.{at}": at for at in range(4)}, {"window.0": 0}])
    both, (full, window) = loading(0, 1)
    layers.watch([both])
    layers.order("window.0", 1)
    assert full.orders == [] and window.orders == [(1, 0)]
    layers.order("full.2", 1)
    assert full.orders == [(1, 0)] and state(layers) == (True, False)
    layers.order("full.3", 1)
    assert full.orders == [(1, 0), (1, 1)] and state(layers) == (True, True)


def test_a_layer_that_reads_anothers_kv_waits_for_all_of_it() -> None:
    layers = Layers([{f"a.{at}": at for at in range(4)}, {"c": 0}])
    both, (first, second) = loading(0, 1)
    layers.watch([both])
    layers.order("shares.another", 1)
    assert first.orders == [(1, 1)] and second.orders == [(1, 0)]


def test_layers_at_one_address_are_in_one_band() -> None:
    layers = Layers([{f"a.{at}": at for at in range(4)} | {"same as a.3": 3}])
    one, (copy,) = loading(0)
    layers.watch([one])
    layers.order("same as a.3", 1)
    assert copy.orders == [(1, 1)]
    assert not layers.all_ordered, "the first three were not asked for"


def test_a_load_without_copies_is_not_waited_for() -> None:
    layers = Layers([{"a": 0}])
    lost, _ = loading()
    layers.watch([lost])
    assert state(layers) == (False, True)
