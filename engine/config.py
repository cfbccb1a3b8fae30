"""The engine's settings: what model it is, how its KV is paged, how much it may do in a step.

Owns every default. Invariants: a config that exists is valid, and it never changes. The model's
weights are a function of ModelConfig alone, so `ModelConfig.revision` names them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal

from kvdock.engine.kv_formats import KV_FORMATS
from kvdock.engine.tokenizer import VOCAB_SIZE


class ConfigError(ValueError):
    """A setting outside its range; the message names the value found and the value wanted."""


def require(ok: bool, name: str, found: object, wanted: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}: found {found!r}, wanted {wanted}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention; weights are drawn from `seed`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_hidden: int
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    sharpness: tuple[float, float] = (2.0, 7.0)
    """Standard deviation of the attention scores, from the first head to the last: flat heads see
    everything a little, sharp heads see a few tokens clearly."""
    logit_scale: float = 3.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_size", "mlp_hidden", "max_positions"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(self.heads % self.kv_heads == 0, "heads", self.heads, f"a multiple of kv_heads={self.kv_heads}")
        require(self.head_size % 2 == 0, "head_size", self.head_size, "an even number (RoPE turns pairs)")
        require(self.vocab_size >= VOCAB_SIZE, "vocab_size", self.vocab_size, f"at least {VOCAB_SIZE}")
        require(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, "'float32' or 'bfloat16'")

    @property
    def revision(self) -> str:
        """32 hex digits that name the weights: equal configs, equal weights."""
        fields = repr(sorted(dataclasses.asdict(self).items()))
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        item_bytes = 4 if self.dtype == "float32" else 2
        return self.layers * 2 * self.kv_heads * self.head_size * item_bytes


@dataclass(frozen=True)
class EngineConfig:
    """How one engine pages its KV and fills a step."""

    model: ModelConfig
    block_tokens: int = 16
    num_blocks: int = 256
    kv_format: str = "NL_X_TWO_NB_BS_NH_HS"
    max_running: int = 16
    """Requests that hold blocks at the same time, loading ones included."""
    prefill_chunk_tokens: int = 512
    """A prompt is computed in chunks that end at multiples of this, whoever else is running."""
    max_step_tokens: int = 1024
    max_local_hit_tokens: int | None = None
    """Upper bound of what the engine's own prefix cache may contribute; None: no bound, 0: never."""
    threads: int = 1
    """torch's intra-op threads: part of the shape of a computation, hence fixed."""
    idle_wait_s: float = 0.05
    """How long a step waits for the connector when nothing can be computed."""

    def __post_init__(self) -> None:
        for field in ("block_tokens", "num_blocks", "max_running", "prefill_chunk_tokens", "threads"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(self.kv_format in KV_FORMATS, "kv_format", self.kv_format, f"one of {sorted(KV_FORMATS)}")
        least = self.prefill_chunk_tokens + self.max_running
        require(self.max_step_tokens >= least, "max_step_tokens", self.max_step_tokens,
                f"at least {least} (a prefill chunk and a token for every running request)")
        limit = self.max_local_hit_tokens
        require(limit is None or limit >= 0, "max_local_hit_tokens", limit, "None or at least 0")
        require(self.idle_wait_s > 0, "idle_wait_s", self.idle_wait_s, "more than 0")

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus output that one request can have: it must fit the pool alone."""
        return min(self.num_blocks * self.block_tokens, self.model.max_positions)


TINY = ModelConfig(
    name="kvdock-tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, mlp_hidden=128
)
"""For tests: 512 bytes of KV a token (float32), a few hundred tokens in milliseconds."""

SMALL = ModelConfig(
    name="kvdock-small", layers=8, hidden=512, heads=8, kv_heads=4, head_size=64, mlp_hidden=1536
)
"""For the demo: 16 KiB of KV a token (float32), a 4000-token prompt in a few seconds on two cores."""

PRESETS: dict[str, EngineConfig] = {
    "tiny": EngineConfig(model=TINY, num_blocks=128, prefill_chunk_tokens=64, max_step_tokens=256),
    "small": EngineConfig(model=SMALL, num_blocks=1024, threads=2),
}


def preset(name: str) -> EngineConfig:
    """The named preset; change fields with dataclasses.replace. Raises ConfigError for another name."""
    require(name in PRESETS, "preset", name, f"one of {sorted(PRESETS)}")
    return PRESETS[name]
