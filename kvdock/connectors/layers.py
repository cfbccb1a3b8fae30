"""Layer by layer: how loads are cut into bands of layers, and which of them a step's forward pass has asked for.

A load that may be reported early is copied band by band. When most of it was moved, and the CPU has hashed the rest,
the request may run: either the step's work is ordered after the whole load, or each attention layer's after the band
that has its KV, so that the first layers are computed while the last ones are still on their way. Where a load was
verified before it began, the first band may be small: layers are computed from then on.

Invariant: `all_ordered` is False while some band of a watched load was not asked for: what ran may have read anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from kvdock.connectors.worker import Bands, Loading
from kvdock.datapath.copy import StreamHandle


class Cut(NamedTuple):
    """`first_share`: of the layers, in the first band; `later`: how many bands follow, of which each costs a descriptor
    upload and an event; `verified_after`: as the copier has it."""

    first_share: float
    later: int
    verified_after: int


VERIFIED_EARLY = Cut(0.625, 4, 1)
"""While the first band is copied the CPU hashes the others (kvdock/connectors/cores.py)."""
VERIFIED_BEFORE = Cut(0.125, 7, 0)
"""The GPU hashes the whole load while it copies it, and the result is known when the load has ended."""


class Layers:
    """`planes[g]`: of KV group g, each layer's plane."""

    def __init__(self, planes: Sequence[Mapping[str, int]], cut: Cut = VERIFIED_EARLY) -> None:
        self.bands: list[Bands] = []
        """Per group."""
        self._where: dict[str, list[tuple[int, int]]] = {}
        for group, of_layers in enumerate(planes):
            count = max(of_layers.values()) + 1
            first = ceil(count * cut.first_share)
            ends = sorted({first + (count - first) * band // cut.later for band in range(cut.later + 1)})
            self.bands.append(Bands(ends, cut.verified_after))
            for layer, plane in of_layers.items():
                band = next(band for band, end in enumerate(ends) if plane < end)
                self._where.setdefault(layer, []).append((group, band))
        self._watched: list[Loading] = []
        self._ordered: set[tuple[int, int, int]] = set()

    def watch(self, loadings: Sequence[Loading]) -> None:
        """Loads that are verified, of a step that asks for each layer; those of the step before are forgotten."""
        self._watched, self._ordered = [loading for loading in loadings if loading.copies], set()

    def order(self, layer: str, stream: int) -> None:
        """Work put on `stream` from now on finds the layer's KV. A layer of no group shares another's: all of it."""
        if not self._watched:
            return
        all_of_it = [(group, len(bands.ends) - 1) for group, bands in enumerate(self.bands)]
        for group, band in self._where.get(layer, all_of_it):
            if (group, band, stream) not in self._ordered:
                self._ordered.add((group, band, stream))
                self._order(group, band, stream)

    def _order(self, group: int, band: int, stream: int) -> None:
        for loading in self._watched:
            for of_group, _, handle in loading.copies:
                if of_group == group:
                    assert isinstance(handle, StreamHandle), "watched loads are a GPU's"
                    handle.order(stream, band)

    @property
    def any_watched(self) -> bool:
        return bool(self._watched)

    @property
    def all_ordered(self) -> bool:
        asked = {(group, band) for group, band, _ in self._ordered}
        return all(
            (group, band) in asked
            for loading in self._watched for group, _, _ in loading.copies
            for band in range(len(self.bands[group].ends))
        )
