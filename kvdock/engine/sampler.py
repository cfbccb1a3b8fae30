"""Logits to a token: greedy, or drawn with the request's own generator.

Owns nothing. Invariant: the token depends on the logits, the parameters and how many tokens this request has
drawn before, never on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdock.engine.request import SamplingParams


def sample(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """logits float32 (vocab,) → token id. Greedy ties go to the lowest id."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
