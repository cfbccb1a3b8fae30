"""One request from arrival to completion: its tokens, its blocks, how much of its KV is valid, and how its next token
is drawn.

Invariants: the blocks of `table` hold valid KV for those of the tokens [0, computed) that are still needed; `tokens`
may be longer (not computed yet), and so may `table` (allocated ahead). A sampled token depends on the logits, the
parameters and how many tokens this request has drawn before, never on the batch.

    WAITING ─► LOADING ─► RUNNING ─► FINISHED
       │  ▲───────┴─────────┘ ▲          abort leads to FINISHED from every state
       └──────────────────────┘          back to WAITING: preempted, or no useful part of the load is valid
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from kvdock.engine.blocks import Table, chain_hash


class RequestError(ValueError):
    """The request cannot be served; the message names the value found and the value wanted."""


class State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. temperature 0 is greedy; otherwise each request draws with `seed`."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    ignore_eos: bool = False
    keep_logits: bool = False
    """Whether to keep the logits of every sampled position: float32 (vocab,) each."""
    max_local_hit_tokens: int | None = None
    """A limit for this request, in addition to that of EngineConfig; None: no limit."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens: found {self.max_tokens}, wanted at least 1")
        if not self.temperature >= 0:
            raise RequestError(f"temperature: found {self.temperature}, wanted at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k: found {self.top_k}, wanted None or at least 1")
        if self.max_local_hit_tokens is not None and self.max_local_hit_tokens < 0:
            raise RequestError(f"max_local_hit_tokens: found {self.max_local_hit_tokens}, wanted None or at least 0")


@dataclass
class Metrics:
    """Where the KV of one request came from. The counts include work before a preemption."""

    time_to_first_token_s: float | None = None
    local_hit_tokens: int = 0
    """Tokens found in the engine's own prefix cache."""
    loaded_tokens: int = 0
    """Tokens that the connector loaded and that are valid."""
    computed_prefill_tokens: int = 0
    """Tokens that were computed, without the one token of each decoding step."""
    preemptions: int = 0


@dataclass(frozen=True)
class Arrival:
    """When a request came, and the trace that it belongs to."""

    order: int
    """A request with a smaller number is served earlier and preempted later."""
    at_s: float
    """By the engine's clock."""
    traceparent: str = ""
    """The request's W3C trace context; empty: none."""


class Request:
    """A request of an engine. The scheduler changes its state, its blocks and their marks; the engine its tokens."""

    def __init__(self, request_id: str, prompt: list[int], sampling: SamplingParams, arrival: Arrival) -> None:
        self.id = request_id
        self.tokens = prompt
        """The prompt, then the output."""
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.arrival = arrival
        self.state = State.WAITING
        self.metrics = Metrics()
        self.logits: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.hashes: list[bytes] = []
        """Chain hashes of the first full blocks; extended on demand."""
        self.take_table([], 0, 0)

    def take_table(self, table: Table, local: int, registered: int) -> None:
        """Replaces the table by a new one, for which nothing is computed yet. Tokens [0, local) are in blocks that
        other requests may share, so they are never written. Blocks [0, registered) of each group are in the prefix
        cache already."""
        self.table, self.local, self.registered, self.computed = table, local, registered, 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def is_decoding(self) -> bool:
        """True when only the KV of the newest token, which is an output, is missing."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.prompt_length

    def block_hashes(self, block_tokens: int, count: int) -> list[bytes]:
        """Chain hashes of the first `count` blocks, which must be full of tokens."""
        while len(self.hashes) < count:
            start = len(self.hashes) * block_tokens
            parent = self.hashes[-1] if self.hashes else b""
            self.hashes.append(chain_hash(parent, self.tokens[start : start + block_tokens]))
        return self.hashes[:count]


@dataclass(frozen=True)
class Completion:
    """The result of a request."""

    request_id: str
    prompt_tokens: list[int]
    output_tokens: list[int]
    text: str
    finish_reason: str
    """'stop' (EOS), 'length' or 'aborted'."""
    metrics: Metrics
    logits: list[Tensor]
    """One row for each sampled token, with keep_logits."""


def sample(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """logits float32 (vocab,) → token id. Greedy ties go to the lowest id."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
