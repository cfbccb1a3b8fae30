"""What every rank of an engine has: its share of the model and of the KV memory. It computes steps.

Decides nothing: a Step says which tokens of a request to compute and where its blocks are. Invariant: a step that
returned has written its KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdock.engine.attention import attend, pages
from kvdock.engine.config import EngineConfig, require
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.model import Model
from kvdock.engine.team import Alone, Team


@dataclass(frozen=True)
class Step:
    """Compute `tokens`, which begin at position `start`; `table` (block_manager.py) covers [0, their end)."""

    tokens: tuple[int, ...]
    start: int
    table: tuple[tuple[int | None, ...], ...]


class Runner:
    """Sets torch's thread count for the whole process. Raises ConfigError when `kv` was made for another config."""

    def __init__(self, config: EngineConfig, kv: KVCache | None = None, team: Team | None = None) -> None:
        torch.set_num_threads(config.threads)
        require(kv is None or kv.config == config, "kv", kv and kv.config, "the KV memory of the same config")
        team = team if team is not None else Alone()
        wanted = f"{config.tensor_parallel} as the config says"
        require(team.size == config.tensor_parallel, "ranks", team.size, wanted)
        self.config = config
        self.model = Model(config.model, team)
        self.kv = kv if kv is not None else KVCache(config)

    def check(self) -> None:
        """Raises RankLost when a rank cannot continue."""

    def run(self, step: Step) -> Tensor:
        """Logits of the token after the last, float32 (vocab,), the same in every rank. All ranks must run the same
        steps. Raises RankLost."""
        kinds, end = self.config.model.groups, step.start + len(step.tokens)
        where = [
            pages(blocks, kind, self.config.block_tokens, step.start, end)
            for blocks, kind in zip(step.table, kinds, strict=True)
        ]
        with torch.inference_mode():
            return self.model.forward(
                torch.tensor(step.tokens),
                step.start,
                lambda layer, q, k, v: attend(q, k, v, self.kv, layer // len(kinds), where[layer % len(kinds)]),
            )
