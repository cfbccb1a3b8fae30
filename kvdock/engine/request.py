"""One request from arrival to completion: its tokens, its blocks, how much of its KV is valid.

Invariant: the blocks of `table` hold valid KV for those of the tokens [0, computed) that are still needed. `tokens`
may be longer (not computed yet), and so may `table` (allocated ahead).

    WAITING ─► LOADING ─► RUNNING ─► FINISHED
       │  ▲───────┴─────────┘ ▲          abort leads to FINISHED from every state
       └──────────────────────┘          back to WAITING: preempted, or the load was of no use
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from kvdock.engine.block_manager import Table
from kvdock.engine.block_pool import chain_hash


class RequestError(ValueError):
    """The request cannot be served; the message names the value found and the value wanted."""


class State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. temperature 0 is greedy; otherwise each request draws with `seed`."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    ignore_eos: bool = False
    keep_logits: bool = False
    """Keeps the logits of every sampled position: float32 (vocab,) each."""
    max_local_hit_tokens: int | None = None
    """A limit for this request, beside that of EngineConfig; None: no other."""

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
    """Where the KV of one request came from. Counts include what was done before a preemption."""

    time_to_first_token_s: float | None = None
    local_hit_tokens: int = 0
    """Found in the engine's own prefix cache."""
    loaded_tokens: int = 0
    """Loaded by the connector and valid."""
    computed_prefill_tokens: int = 0
    """Computed, without the one token of each decoding step."""
    preemptions: int = 0


@dataclass
class Request:
    id: str
    tokens: list[int]
    """Prompt, then output."""
    prompt_length: int
    sampling: SamplingParams
    arrival: int
    """Order of arrival: a smaller number is served earlier and preempted later."""
    arrived_s: float
    traceparent: str = ""
    """The W3C trace context that it came with; empty: none."""
    state: State = State.WAITING
    computed: int = 0
    table: Table = field(default_factory=list)
    local: int = 0
    """Tokens [0, local) are in blocks that other requests may share, so they are never written."""
    hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the first full blocks; extended on demand."""
    registered: int = 0
    """Blocks [0, registered) of each group have been offered to the prefix cache."""
    metrics: Metrics = field(default_factory=Metrics)
    logits: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.sampling.seed)

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
    logits: list[torch.Tensor]
    """One row for each sampled token, with keep_logits."""
