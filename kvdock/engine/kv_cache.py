"""The paged KV memory: allocated in a named format, with one view for each row, which attention uses.

A row holds one layer of each KV group: a block belongs to one group at a time and holds the KV of that group's
layers, one in each row. With one group, rows are layers. A rank has its share of the KV heads.

Owns the tensors. Invariants: k[row] and v[row] are (num_blocks, block_tokens, kv_heads, size) views, whatever
the format; `planes` cover every byte of `tensors` once. Which request may write a block is decided by the block
manager, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvdock.datapath.layout import FORMATS, NamedFormat
from kvdock.engine.config import EngineConfig

Tensors: TypeAlias = Tensor | Sequence["Tensors"]


class KVCache:
    """What a connector needs to find the KV: `format`, `tensors` nested as the format says, `block_tokens`."""

    def __init__(self, config: EngineConfig) -> None:
        """Allocates config.num_blocks blocks, all zero. Raises RuntimeError (torch) when memory is short."""
        model = config.share
        form = FORMATS[config.kv_format]
        sizes = {
            "NL": model.rows, "TWO": 2, "NB": config.num_blocks, "BS": config.block_tokens,
            "NBBS": config.num_blocks * config.block_tokens, "NH": model.kv_heads, "HS": model.head_size,
            "ONE": 1,
        }
        self.config = config
        self.format = config.kv_format
        self.block_tokens = config.block_tokens
        self.num_blocks = config.num_blocks
        self.block_bytes = config.block_tokens * model.kv_bytes_per_token // len(model.groups)
        """Bytes of one block over all rows."""
        self.tensors = allocate(form.nesting, [sizes[axis] for axis in form.dims], sizes, getattr(torch, model.dtype))
        rows = range(model.rows)
        self.k = [view(form, self.tensors, sizes, {"NL": row, "TWO": 0}) for row in rows]
        if form.is_latent:  # the latent is the front of the key
            self.v = [k[..., : model.latent_size] for k in self.k]
            self.planes = self.k
        else:
            self.v = [view(form, self.tensors, sizes, {"NL": row, "TWO": 1}) for row in rows]
            self.planes = [*self.k, *self.v]


def allocate(lists: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int], dtype: torch.dtype) -> Tensors:
    """Zeroed tensors of `shape`, in nested lists over the axes `lists`, outermost first."""
    if not lists:
        return torch.zeros(shape, dtype=dtype)
    return [allocate(lists[1:], shape, sizes, dtype) for _ in range(sizes[lists[0]])]


def view(form: NamedFormat, tensors: Tensors, sizes: Mapping[str, int], at: Mapping[str, int]) -> Tensor:
    """One plane, (NB, BS, NH, HS), as a view: fixes the axes in `at` and puts the others in that order."""
    for axis in form.nesting:
        tensors = tensors[at[axis]]
    assert isinstance(tensors, Tensor)
    axes = [part for axis in form.dims for part in {"NBBS": ("NB", "BS"), "ONE": ("NH",)}.get(axis, (axis,))]
    tensor = tensors.view([sizes[axis] for axis in axes])
    if "NH" not in axes:
        tensor, axes = tensor.unsqueeze(-2), [*axes[:-1], "NH", axes[-1]]
    for axis in [a for a in axes if a in at]:
        tensor = tensor.select(axes.index(axis), at[axis])
        axes.remove(axis)
    return tensor.permute([axes.index(axis) for axis in ("NB", "BS", "NH", "HS")])
