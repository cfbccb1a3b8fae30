"""The paged KV memory: allocated in a named format, seen by attention as plain per-layer views.

Owns the tensors. Invariants: k[layer] and v[layer] are (num_blocks, block_tokens, kv_heads, head_size)
views, whatever the format; together the views cover every byte of `tensors` once. Who may write a
block is the block manager's business, not ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_formats import KV_FORMATS, KVFormat

Tensors: TypeAlias = Tensor | Sequence["Tensors"]


class KVCache:
    """What a connector needs to find the KV: `format`, `tensors` nested as the format says, `block_tokens`."""

    def __init__(self, config: EngineConfig) -> None:
        """Zeroed memory of config.num_blocks blocks. Raises RuntimeError (torch) when there is not enough."""
        model = config.model
        form = KV_FORMATS[config.kv_format]
        sizes = {
            "NL": model.layers, "TWO": 2, "NB": config.num_blocks, "BS": config.block_tokens,
            "NBBS": config.num_blocks * config.block_tokens, "NH": model.kv_heads, "HS": model.head_size,
        }
        self.config = config
        self.format = config.kv_format
        self.block_tokens = config.block_tokens
        self.num_blocks = config.num_blocks
        self.block_bytes = config.block_tokens * model.kv_bytes_per_token
        """Of one block over all layers, K and V."""
        self.tensors = allocate(form.lists, [sizes[axis] for axis in form.axes], sizes, getattr(torch, model.dtype))
        self.k = [view(form, self.tensors, sizes, {"NL": layer, "TWO": 0}) for layer in range(model.layers)]
        self.v = [view(form, self.tensors, sizes, {"NL": layer, "TWO": 1}) for layer in range(model.layers)]


def allocate(lists: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int], dtype: torch.dtype) -> Tensors:
    """Zeroed tensors of `shape`, in nested lists over the axes `lists`, outermost first."""
    if not lists:
        return torch.zeros(shape, dtype=dtype)
    return [allocate(lists[1:], shape, sizes, dtype) for _ in range(sizes[lists[0]])]


def view(form: KVFormat, tensors: Tensors, sizes: Mapping[str, int], at: Mapping[str, int]) -> Tensor:
    """K or V of one layer, (NB, BS, NH, HS), sharing memory: fix the axes in `at`, order the others."""
    for axis in form.lists:
        tensors = tensors[at[axis]]
    assert isinstance(tensors, Tensor)
    axes = [part for axis in form.axes for part in (("NB", "BS") if axis == "NBBS" else (axis,))]
    tensor = tensors.view([sizes[axis] for axis in axes])
    for axis in [a for a in axes if a in at]:
        tensor = tensor.select(axes.index(axis), at[axis])
        axes.remove(axis)
    return tensor.permute([axes.index(axis) for axis in ("NB", "BS", "NH", "HS")])
