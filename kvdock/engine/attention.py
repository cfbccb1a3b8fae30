"""Attention of one request over its paged KV: write the new tokens, gather the pages, attend.

Owns nothing; writes only the KV of the tokens being computed. One request at a time, so the shapes, and the bits
of the result, depend on the request alone and not on the other requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvdock.engine.groups import GroupKind
from kvdock.engine.kv_cache import KVCache


@dataclass(frozen=True)
class Pages:
    """Where the KV of tokens [start, end) goes, and where the KV is that they attend to; equal in a group's layers."""

    seen: slice
    """The tokens of `blocks` that [start, end) attend to."""
    blocks: Tensor
    """int64 (pages,): from the first block that is read to the last that is written."""
    slot_block: Tensor
    slot_offset: Tensor
    """int64 (end - start,): block and offset of each new token."""
    mask: Tensor | None
    """bool (end - start, seen): what each new token attends to; None for a single token, which attends to all."""


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
    """q (new, heads, head), k and v (new, kv_heads, …) → (new, heads, value); stores k and v on the way.
    v None: it is the front of k (latent attention)."""
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
