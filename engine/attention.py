"""Attention of one request over its paged KV: write the new tokens, gather the pages, attend.

Owns nothing; writes only the slots of the tokens being computed. One request at a time: the shapes,
and so the bits of the result, depend on the request alone, never on who else is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvdock.engine.kv_cache import KVCache


@dataclass(frozen=True)
class Pages:
    """Where tokens [start, end) of a request go, and where tokens [0, end) lie. Same for every layer."""

    end: int
    blocks: Tensor
    """int64 (pages of [0, end),)."""
    slot_block: Tensor
    slot_offset: Tensor
    """int64 (end - start,): block and offset of each new token."""
    mask: Tensor | None
    """bool (end - start, end): what each new token may see; None for a single token, which sees all."""


def pages(block_table: Sequence[int], block_tokens: int, start: int, end: int) -> Pages:
    """The slot mapping of tokens [start, end); `block_table` covers [0, end)."""
    blocks = torch.tensor(block_table[: -(-end // block_tokens)], dtype=torch.int64)
    positions = torch.arange(start, end)
    new = end - start
    # Row i is position start + i: it sees columns 0..start + i.
    mask = torch.ones(new, end, dtype=torch.bool).tril(start) if new > 1 else None
    return Pages(end, blocks, blocks[positions // block_tokens], positions % block_tokens, mask)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, where: Pages) -> Tensor:
    """q (new, heads, head), k and v (new, kv_heads, head) → (new, heads, head); stores k and v on the way."""
    cache.k[layer][where.slot_block, where.slot_offset] = k
    cache.v[layer][where.slot_block, where.slot_offset] = v
    # index_select makes a contiguous copy whatever the strides: one arithmetic for every format.
    keys = cache.k[layer].index_select(0, where.blocks).flatten(0, 1)[: where.end]
    values = cache.v[layer].index_select(0, where.blocks).flatten(0, 1)[: where.end]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=where.mask, scale=1.0, enable_gqa=True,
    )
    return out[0].transpose(0, 1)
