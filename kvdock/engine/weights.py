"""The weights of a model: drawn from its seed here, or read from a file (trained.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdock.engine.config import ModelConfig

EMBEDDING_SCALE = 0.1


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, each as (out, in), the order that F.linear expects."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """All weights of a model. `sharpness`: of the scores, (heads, 1)."""

    layers: list[Layer]
    embedding: Tensor
    head: Tensor
    sharpness: Tensor


def drawn(config: ModelConfig) -> Weights:
    """Draws the weights: layer by layer, in the order of the fields, then embedding and head."""
    draw = torch.Generator().manual_seed(config.seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        weights = torch.randn(rows, columns, generator=draw) * (scale / math.sqrt(columns))
        return weights.to(getattr(torch, config.dtype))

    layers = [
        Layer(
            qkv=matrix(sum(config.projected), config.hidden),
            out=matrix(config.hidden, config.heads * config.value_size),
            gate_up=matrix(2 * config.mlp_hidden, config.hidden, math.sqrt(2)),
            down=matrix(config.hidden, config.mlp_hidden),
        )
        for _ in range(config.layers)
    ]
    embedding = matrix(config.vocab_size, config.hidden, EMBEDDING_SCALE * math.sqrt(config.hidden))
    head = matrix(config.vocab_size, config.hidden, config.logit_scale)
    return Weights(layers, embedding, head, torch.linspace(*config.sharpness, config.heads)[:, None])
