"""The paged KV memory, and the attention of one request over it.

The memory is allocated in a named format, with one view for each row. A row holds one layer of each KV group: a block
belongs to one group at a time and holds the KV of that group's layers, one in each row. With one group, rows are
layers. A rank has the memory for its share of the KV heads.

Invariants: k[row] and v[row] are (num_blocks, block_tokens, kv_heads, size) views, whatever the format; `planes` cover
every byte of `tensors` once. The block manager decides which request may write to a block.

`attend` writes the new tokens, gathers the request's blocks and attends. It computes one request at a time, so the
shapes, and the bits of the result, depend on the request alone and not on the other requests of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kvdock.datapath.layout import FORMATS, NamedFormat
from kvdock.engine.config import EngineConfig, GroupKind

Tensors: TypeAlias = Tensor | Sequence["Tensors"]


class KVCache:
    """The KV memory of one rank. A connector needs `format`, `tensors` (nested as the format says) and
    `block_tokens`."""

    def __init__(self, config: EngineConfig) -> None:
        """Allocates config.num_blocks blocks of zeros. Raises RuntimeError (torch) if there is not enough memory."""
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


# ------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Pages:
    """Where the KV of tokens [start, end) is written, and the KV that they attend to; the same for all layers of a
    group."""

    seen: slice
    """The range of tokens in `blocks` that [start, end) attend to."""
    blocks: Tensor
    """int64 (pages,): from the first block that is read to the last that is written."""
    slot_block: Tensor
    slot_offset: Tensor
    """int64 (end - start,): block of each new token, and its offset in the block."""
    mask: Tensor | None
    """bool (end - start, seen): the tokens that each new token attends to; None for a single token, which attends to
    all."""


def pages(blocks: Sequence[int | None], kind: GroupKind, block_tokens: int, start: int, end: int) -> Pages:
    """The slot mapping of tokens [start, end) in one group, whose list of blocks covers [0, end)."""
    first = kind.first_seen(start)
    skipped = first // block_tokens
    present = [block for block in blocks[skipped : -(-end // block_tokens)] if block is not None]
    assert len(present) == -(-end // block_tokens) - skipped, "a block that is to be read is missing"
    table = torch.tensor(present, dtype=torch.int64)
    positions = torch.arange(start, end)
    mask = None
    if end - start > 1:
        seen_from = torch.tensor([kind.first_seen(position) for position in range(start, end)])
        columns = torch.arange(first, end)
        mask = (columns <= positions[:, None]) & (columns >= seen_from[:, None])
    offset = skipped * block_tokens
    return Pages(
        slice(first - offset, end - offset), table, table[positions // block_tokens - skipped],
        positions % block_tokens, mask,
    )


def attend(q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, row: int, where: Pages) -> Tensor:
    """Writes k and v to their blocks, and attends: q (new, heads, head), k and v (new, kv_heads, …) → (new, heads,
    value). v None: the value is the front of k (latent attention)."""
    cache.k[row][where.slot_block, where.slot_offset] = k
    if v is not None:
        cache.v[row][where.slot_block, where.slot_offset] = v
    # index_select makes a contiguous copy whatever the strides, so every format is computed in the same way.
    keys = cache.k[row].index_select(0, where.blocks).flatten(0, 1)[where.seen]
    values = cache.v[row].index_select(0, where.blocks).flatten(0, 1)[where.seen]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=where.mask, scale=1.0, enable_gqa=True,
    )
    return out[0].transpose(0, 1)
