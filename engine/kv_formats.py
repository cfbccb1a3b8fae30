"""The named paged-KV formats as data: a name says which axes are lists of tensors and which are axes of a tensor.

Axes: NL layers, TWO K and V, NB blocks, BS tokens of a block, NH KV heads, HS head size, NBBS blocks times tokens, ONE
a single head. `A_X_B_C` is a list over A of tensors with axes B and C, outermost first. No code compares format names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVFormat:
    """`lists` index separate tensors, outermost first; `axes` are the axes of each, outermost first."""

    lists: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def is_latent(self) -> bool:
        """One plane a layer, for multi-head latent attention, instead of K and V."""
        return "TWO" not in self.lists + self.axes


def spelled(name: str) -> KVFormat:
    *lists, axes = name.split("_X_")
    return KVFormat(tuple(lists), tuple(axes.split("_")))


KV_FORMATS: dict[str, KVFormat] = {
    name: spelled(name)
    for name in (
        "NB_NL_TWO_BS_NH_HS",
        "NL_X_TWO_NB_BS_NH_HS",
        "NL_X_NB_TWO_BS_NH_HS",
        "TWO_X_NL_X_NBBS_NH_HS",
        "NB_NL_TWO_NH_BS_HS",
        "NL_X_TWO_NB_NH_BS_HS",
        "NL_X_NB_TWO_NH_BS_HS",
        "NL_X_NB_BS_HS",
        "NL_X_NBBS_ONE_HS",
    )
}
