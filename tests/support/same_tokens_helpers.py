"""What the same-tokens matrices share: the models, what was served, and a connector that damages a byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from connector_helpers import CHUNK
from torch import Tensor

from kvdock.connectors.engine_connector import EngineConnector
from kvdock.connectors.interface import BlocksRead, GroupBlocks, LoadDone, Progress, StoreDone
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.request import Completion

MODELS = {
    "mha": "tiny-mha", "gqa": "tiny", "mla": "tiny-mla", "hybrid of 2 groups": "tiny-hybrid2",
    "hybrid of 3 groups": "tiny-hybrid3",
}
TOKENS = 40
LENGTH = 210
STORED = LENGTH // CHUNK * CHUNK
Damage = Literal["none", "before", "after"]
"""When one byte of a stored chunk is changed: before its checksum is made, or after."""


def bf16_config(model: str) -> EngineConfig:
    """With KV that packs: bf16, and heads so large that a plane of a chunk has several tiles."""
    made = preset(MODELS[model])
    latent = 64 if made.model.latent_size else 0
    of_model = dataclasses.replace(
        made.model, dtype="bfloat16", head_size=128 if latent else 64, latent_size=latent
    )
    return dataclasses.replace(made, model=of_model, num_blocks=200)


@dataclass(frozen=True)
class Served:
    output: list[int]
    logits: Tensor
    at_hand: int
    """Tokens that were not computed; for a preempted run, after the preemption."""


def served(done: Completion) -> Served:
    return Served(
        done.output_tokens, torch.stack(done.logits), done.metrics.loaded_tokens + done.metrics.local_hit_tokens
    )


class StandIn:
    """A connector in front of another: it can wait for a store to end. `kv` is the engine's memory."""

    def __init__(self, inner: EngineConnector, kv: KVCache) -> None:
        self.inner, self.kv = inner, kv
        self.loads: list[LoadDone] = []
        self.stores: list[StoreDone] = []
        self.lookup, self.begin_load = inner.lookup, inner.begin_load
        self.finished, self.close = inner.finished, inner.close

    def stored(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        """Begins the store, and waits until its copies have ended."""
        read = self.inner.begin_store(request_id, token_ids, block_ids, computed_tokens)
        while read and StoreDone(request_id, read) not in self.stores:
            self._take_in(self.inner.poll(0.05))
        return read

    def poll(self, timeout_s: float = 0.0) -> Progress:
        self._take_in(self.inner.poll(0.0 if self.loads or self.stores else timeout_s))
        news = Progress(tuple(self.loads), tuple(self.stores))
        self.loads, self.stores = [], []
        return news

    def _take_in(self, news: Progress) -> None:
        self.loads += news.loads
        self.stores += news.stores


class Spoiler(StandIn):
    """Changes one byte of a block of the last group while it is stored, and restores it: no checksum can show that.

    It is in the first row of the memory, because no later token would read the last layer's window again."""

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        # The last block of the newest whole chunk that this call stores: every hit of the chunk loads it.
        index = computed_tokens // CHUNK * CHUNK // self.kv.block_tokens - 1
        block = block_ids[-1][index] if index >= 0 else None
        if block is not None:
            self._flip(block)
        read = self.stored(request_id, token_ids, block_ids, computed_tokens)
        if block is not None:
            self._flip(block)
        return read

    def _flip(self, block: int) -> None:
        flip_exponent(self.kv.k[0], block)


def flip_exponent(plane: Tensor, block: int) -> None:
    """Flips the lowest bit of the exponent of a value in the middle of the block, which doubles or halves it."""
    at = (block, plane.shape[1] // 2, 0, 3)
    plane[at] = (plane[at].view(torch.int32) ^ (1 << 23)).view(torch.float32)


def assert_same(found: Served, wanted: Served) -> None:
    assert found.output == wanted.output
    assert found.logits.shape == wanted.logits.shape == (TOKENS, found.logits.shape[1])
    assert not found.logits.isnan().any()
    assert torch.equal(found.logits, wanted.logits), f"logits differ by {(found.logits - wanted.logits).abs().max()}"
