"""A decoder-only transformer, and the part of it that each rank computes: RMSNorm, RoPE, grouped-query or latent
attention, SwiGLU.

Model owns the weights. Those of a trained model come from a file (trained.py). Otherwise they are drawn from the
config's seed and never trained, so the text is meaningless, but every cached block must change the output. In a plain
untrained transformer the context would average out. Three measures prevent that: queries and keys are normalised, and
scored with a fixed sharpness for each head; the output of a head is normalised again, so an average over thousands of
tokens is as large as a single token; and the residual stream starts small, so that the context outweighs the last
token. A trained model has none of the three.

Every rank makes all weights and keeps its share: whole heads, rows into the MLP and columns out of it. The outputs of
attention and MLP are partial sums, which the Team of the ranks adds up. Every rank has the whole latent.

Runner has a rank's model and KV memory. It decides nothing: a Step names the tokens of a request to compute, and its
blocks.

Invariants: equal config, team size and shapes give equal bits, in every process with the same thread count; a step
that has returned has written its KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvdock.engine import trained
from kvdock.engine.config import EngineConfig, ModelConfig, require
from kvdock.engine.kv_cache import KVCache, attend, pages
from kvdock.engine.weights import Layer, drawn


class Team(Protocol):
    """The ranks that compute one model together, as one of them sees them."""

    rank: int
    size: int

    def total(self, part: Tensor) -> Tensor:
        """The sum of `part` over all ranks, equal in all of them. All must call it, in the same order. Raises
        RankLost."""


class Alone:
    """The team of an engine with one rank."""

    rank, size = 0, 1

    def total(self, part: Tensor) -> Tensor:
        return part


Attend = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
"""(layer, q (n, heads, head), k, v (n, kv_heads, head)) → (n, heads, value); v None: the front of k."""


class Model:
    def __init__(self, config: ModelConfig, team: Team | None = None) -> None:
        self.team: Team = team if team is not None else Alone()
        self.config = config.share(self.team.size)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        weights = trained.read(config) if config.file else drawn(config)
        self.layers = [
            Layer(
                qkv=self.share(layer.qkv, config.projected, whole=1 if config.latent_size else 0),
                out=self.share(layer.out, [config.heads * config.value_size], dim=1),
                gate_up=self.share(layer.gate_up, [config.mlp_hidden] * 2),
                down=self.share(layer.down, [config.mlp_hidden], dim=1),
            )
            for layer in weights.layers
        ]
        self.embedding, self.head = weights.embedding, weights.head
        # The scores of unit-size vectors have standard deviation sqrt(head_size).
        self.sharpness = self.share(weights.sharpness / math.sqrt(config.head_size), [config.heads])
        self.cos, self.sin = rope_table(config)

    def share(self, weights: Tensor, sections: Sequence[int], *, whole: int = 0, dim: int = 0) -> Tensor:
        """This rank's part of each section of `weights` along `dim`; the last `whole` sections are not divided."""
        if self.team.size == 1:
            return weights
        parts = torch.split(weights, list(sections), dim)
        cut = len(parts) - whole
        own = [part.chunk(self.team.size, dim)[self.team.rank] for part in parts[:cut]]
        return torch.cat([*own, *parts[cut:]], dim)

    def forward(self, tokens: Tensor, start: int, attend: Attend) -> Tensor:
        """tokens int64 (n,) at positions [start, start + n) → the logits of the next token, float32 (vocab,)."""
        cos, sin = self.cos[start : start + len(tokens)], self.sin[start : start + len(tokens)]
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            q, k, v = self.project(layer, x, cos, sin)
            read = self.tamed(attend(index, q, k, v)).flatten(1)
            x = x + self.team.total(F.linear(read, layer.out))
            gate, up = F.linear(self.unit(x), layer.gate_up).chunk(2, dim=-1)
            x = x + self.team.total(F.linear(F.silu(gate) * up, layer.down))
        # Only the last row: the head's shape is the same in every step.
        return F.linear(self.unit(x[-1:]), self.head)[0].float()

    def project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (n, hidden) → q (n, heads, head), multiplied by the sharpness; k and v (n, kv_heads, head).

        Latent attention is in its absorbed form: queries are in the latent's space, and the latent is the value."""
        c = self.config
        rows = F.linear(self.unit(x), layer.qkv).view(len(x), -1, c.head_size)
        q, k, v = torch.split(rows, [c.heads, c.kv_heads, rows.shape[1] - c.heads - c.kv_heads], dim=1)
        q, k = self.turn(q, cos, sin) * self.sharpness, self.turn(k, cos, sin)
        return q.to(self.dtype), k.to(self.dtype), None if c.latent_size else v

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Tames, and rotates the elements after the latent: (n, heads, head) → float32 of the same shape."""
        latent = self.config.latent_size
        turned = rotate(self.tamed(x[..., latent:]), cos, sin)
        return torch.cat((self.tamed(x[..., :latent]).float(), turned), dim=-1) if latent else turned

    def unit(self, x: Tensor) -> Tensor:
        """RMSNorm without a gain: (…, n) → (…, n) with a mean square of one."""
        return F.rms_norm(x, (x.shape[-1],), eps=self.config.norm_eps)

    def tamed(self, x: Tensor) -> Tensor:
        """What only an untrained model normalises."""
        return x if self.config.file else self.unit(x)


def rope_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 (max_positions, 1, rope_size / 2)."""
    half = config.rope_size // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, which pairs the first half with the second: (n, heads, head) → float32 of the same shape."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


# ------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Step:
    """Compute `tokens`, which begin at position `start`; `table` (blocks.py) covers the positions from 0 to their
    end."""

    tokens: tuple[int, ...]
    start: int
    table: tuple[tuple[int | None, ...], ...]


class Runner:
    """A rank's model and KV memory. Sets torch's thread count for the whole process. `model`: that of the same config,
    if it is made already. Raises ConfigError when `kv` was made for another config."""

    def __init__(
        self, config: EngineConfig, kv: KVCache | None = None, team: Team | None = None, model: Model | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        require(kv is None or kv.config == config, "kv", kv and kv.config, "the KV memory of the same config")
        team = team if team is not None else Alone()
        wanted = f"{config.tensor_parallel} as the config says"
        require(team.size == config.tensor_parallel, "ranks", team.size, wanted)
        self.config = config
        self.model = model if model is not None else Model(config.model, team)
        self.kv = kv if kv is not None else KVCache(config)

    def check(self) -> None:
        """Raises RankLost when a rank cannot continue."""

    def run(self, step: Step) -> Tensor:
        """The logits of the next token, float32 (vocab,), the same in every rank. All ranks must run the same steps.
        Raises RankLost."""
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
