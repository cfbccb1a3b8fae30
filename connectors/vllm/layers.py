"""Layer by layer: how loads are cut into bands of layers, and which of them a step's forward pass has asked for.

A load is copied band by band, and an attention layer's work is ordered after the band that has its KV. So the first
layers are computed while the last ones are still on their way.

Invariant: `all_ordered` is False while some band of a watched load was not asked for: what ran may have read anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvdock.connectors.worker import Loading

BANDS = 8
"""Enough for the first band to be a small share; each costs a descriptor upload and an event."""


@runtime_checkable
class Ordered(Protocol):
    """A copy that streams can wait for: CudaHandle."""

    def order(self, stream: int, band: int) -> None: ...


class Layers:
    """`planes[g]`: of KV group g, each layer's plane."""

    def __init__(self, planes: Sequence[Mapping[str, int]]) -> None:
        self.bands: list[list[int]] = []
        """Per group, where each band ends, in planes."""
        self._where: dict[str, tuple[int, int]] = {}
        for group, of_layers in enumerate(planes):
            count = max(of_layers.values()) + 1
            ends = sorted({count * (band + 1) // BANDS for band in range(BANDS)} - {0})
            self.bands.append(ends)
            for layer, plane in of_layers.items():
                self._where[layer] = group, next(band for band, end in enumerate(ends) if plane < end)
        self._watched: list[Loading] = []
        self._ordered: set[tuple[int, int, int]] = set()

    def watch(self, loadings: Sequence[Loading]) -> None:
        """The loads of a step; those of the step before are forgotten."""
        self._watched, self._ordered = [loading for loading in loadings if loading.copies], set()

    def order(self, layer: str, stream: int) -> None:
        """Work put on `stream` from now on finds the layer's KV. A layer of no group shares another's: all of it."""
        if not self._watched:
            return
        known = self._where.get(layer)
        wanted = [known] if known is not None else [(group, len(ends) - 1) for group, ends in enumerate(self.bands)]
        for group, band in wanted:
            if (group, band, stream) not in self._ordered:
                self._ordered.add((group, band, stream))
                self._order(group, band, stream)

    def _order(self, group: int, band: int, stream: int) -> None:
        for loading in self._watched:
            for of_group, _, handle in loading.copies:
                if of_group == group:
                    assert isinstance(handle, Ordered), "watched loads are a GPU's"
                    handle.order(stream, band)

    @property
    def any_watched(self) -> bool:
        return bool(self._watched)

    @property
    def all_ordered(self) -> bool:
        asked = {(group, band) for group, band, _ in self._ordered}
        return all(
            (group, band) in asked
            for loading in self._watched for group, _, _ in loading.copies for band in range(len(self.bands[group]))
        )
