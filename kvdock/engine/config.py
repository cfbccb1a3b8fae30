"""The engine's settings: its model, the kinds of its KV groups, how its KV is paged, and how much a step may compute.

Invariants: a config that exists is valid and never changes; the weights of a model follow from ModelConfig alone, and
from the file that it names, so `ModelConfig.revision` names them.

A KV group is the layers that attend to the same earlier tokens; they share a block table. Everything that the engine
needs to know about the kind of a group follows from `first_seen`, which never decreases, and `reach`:

    to compute from token n on      the KV of [first_needed(n), n) must be present: that is a hit of n tokens
    once n tokens are computed      blocks that lie completely below first_needed(n) are no longer needed

Chunked-local attention would be a kind whose first token is position // chunk * chunk; a recurrent state, kept as one
entry for each block, would be one whose first token is position - 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Protocol

from kvdock.datapath.layout import FORMATS
from kvdock.engine.tokenizer import VOCAB_SIZE


class GroupKind(Protocol):
    @property
    def reach(self) -> int | None:
        """The most tokens that a token attends to, including itself; None: all."""

    def first_seen(self, position: int) -> int:
        """The first token that the token at `position` attends to."""


@dataclass(frozen=True)
class FullAttention:
    reach = None

    def first_seen(self, position: int) -> int:
        return 0


@dataclass(frozen=True)
class SlidingWindow:
    """A token attends to itself and the `tokens - 1` tokens before it."""

    tokens: int

    @property
    def reach(self) -> int:
        return self.tokens

    def first_seen(self, position: int) -> int:
        return max(0, position - self.tokens + 1)


def first_needed(kind: GroupKind, tokens: int) -> int:
    """The first token whose KV is needed to continue after `tokens` tokens, the last of which is computed again."""
    return kind.first_seen(max(0, tokens - 1))


def most_blocks(kind: GroupKind, tokens: int, step_tokens: int, block_tokens: int) -> int:
    """The most blocks that a request of `tokens` can hold at one time if it computes `step_tokens` in a step."""
    whole = -(-tokens // block_tokens)
    # One more, because the range may begin and end in the middle of a block.
    return whole if kind.reach is None else min(whole, -(-(kind.reach + step_tokens) // block_tokens) + 1)


class ConfigError(ValueError):
    """A setting is out of its range; the message names the value found and the value wanted."""


def require(ok: bool, name: str, found: object, wanted: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}: found {found!r}, wanted {wanted}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, whose weights are drawn from `seed` or read from `file`. With as many KV heads as
    heads it has multi-head attention, with fewer grouped-query attention."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_hidden: int
    latent_size: int = 0
    """Multi-head latent attention if positive: one latent of this size, and head_size - latent_size rotated elements,
    replace K and V of all heads. 0: each KV head has K and V."""
    groups: tuple[GroupKind, ...] = (FullAttention(),)
    """The KV groups; layer i belongs to groups[i % len(groups)], so all groups have the same number of layers."""
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    sharpness: tuple[float, float] = (2.0, 7.0)
    """Standard deviation of the attention scores, from the first head to the last: with a small one a head attends to
    all tokens a little, with a large one to a few tokens strongly."""
    logit_scale: float = 3.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    norm_eps: float = 1e-6
    file: str = dataclasses.field(default="", compare=False)
    """The file of trained weights (trained.py); empty: they are drawn."""
    file_digest: str = ""
    """Names what is in the file."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_size", "mlp_hidden", "max_positions"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(self.heads % self.kv_heads == 0, "heads", self.heads, f"a multiple of kv_heads={self.kv_heads}")
        require(0 <= self.latent_size < self.head_size, "latent_size", self.latent_size, f"0..{self.head_size - 1}")
        require(self.rope_size % 2 == 0, "head_size", self.head_size, "even without latent_size (RoPE turns pairs)")
        require(not self.latent_size or self.kv_heads == 1, "kv_heads", self.kv_heads, "1 with latent_size")
        require(self.layers % max(1, len(self.groups)) == 0, "layers", self.layers, "a multiple of the groups")
        reaches = [kind.reach for kind in self.groups if kind.reach is not None]
        require(bool(self.groups) and min(reaches, default=1) >= 1, "groups", self.groups, "one or more, each seeing 1")
        require(self.vocab_size >= VOCAB_SIZE, "vocab_size", self.vocab_size, f"at least {VOCAB_SIZE}")
        require(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, "'float32' or 'bfloat16'")

    @property
    def revision(self) -> str:
        """32 hex digits that name the weights; equal configs have equal weights."""
        compared = [field.name for field in dataclasses.fields(self) if field.compare]
        fields = repr(sorted((name, getattr(self, name)) for name in compared))
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()

    @property
    def rope_size(self) -> int:
        """Elements of a head that RoPE rotates: all, or those after the latent."""
        return self.head_size - self.latent_size

    @property
    def value_size(self) -> int:
        return self.latent_size or self.head_size

    @property
    def projected(self) -> list[int]:
        """The rows into which a token is projected: of the queries, the keys and, without a latent, the values."""
        heads = [self.heads] + [self.kv_heads] * (1 if self.latent_size else 2)
        return [count * self.head_size for count in heads]

    @property
    def rows(self) -> int:
        """The number of layers of one group: layer i has its KV in row i // len(groups) of the memory."""
        return self.layers // len(self.groups)

    def share(self, ranks: int) -> ModelConfig:
        """The part of the model that each of `ranks` ranks computes: its heads and its part of the MLP. Every rank has
        the whole latent."""
        kv_heads = self.kv_heads if self.latent_size else self.kv_heads // ranks
        return dataclasses.replace(
            self, heads=self.heads // ranks, kv_heads=kv_heads, mlp_hidden=self.mlp_hidden // ranks
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token in all layers."""
        item_bytes = 4 if self.dtype == "float32" else 2
        planes = 1 if self.latent_size else 2
        return self.layers * planes * self.kv_heads * self.head_size * item_bytes


@dataclass(frozen=True)
class EngineConfig:
    """How one engine pages its KV and fills a step."""

    model: ModelConfig
    block_tokens: int = 16
    num_blocks: int = 256
    kv_format: str = "NL_X_TWO_NB_BS_NH_HS"
    max_running: int = 16
    """The most requests that hold blocks at the same time, including those that are loading."""
    prefill_chunk_tokens: int = 512
    """A prompt is computed in chunks that end at multiples of this, independent of other requests."""
    max_step_tokens: int = 1024
    max_local_hit_tokens: int | None = None
    """The most tokens a request may take from the engine's own prefix cache; None: no limit, 0: none."""
    threads: int = 1
    """torch's intra-op threads. The bits of a result depend on their number, so it is fixed."""
    tensor_parallel: int = 1
    """The number of ranks: processes that divide the heads and the columns of the MLP among them."""
    idle_wait_s: float = 0.05
    """How long a step waits for the connector when nothing can be computed."""

    def __post_init__(self) -> None:
        counts = ("block_tokens", "num_blocks", "max_running", "prefill_chunk_tokens", "threads", "tensor_parallel")
        for field in counts:
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        fitting = [name for name, form in FORMATS.items() if form.is_latent == (self.model.latent_size > 0)]
        require(self.kv_format in fitting, "kv_format", self.kv_format, f"one of {sorted(fitting)}")
        for field in ("heads", "mlp_hidden") if self.model.latent_size else ("heads", "kv_heads", "mlp_hidden"):
            count, ranks = getattr(self.model, field), self.tensor_parallel
            require(count % ranks == 0, field, count, f"a multiple of tensor_parallel={ranks}")
        least = self.prefill_chunk_tokens + self.max_running
        require(self.max_step_tokens >= least, "max_step_tokens", self.max_step_tokens,
                f"at least {least} (a prefill chunk and a token for every running request)")
        limit = self.max_local_hit_tokens
        require(limit is None or limit >= 0, "max_local_hit_tokens", limit, "None or at least 0")
        require(self.idle_wait_s > 0, "idle_wait_s", self.idle_wait_s, "more than 0")

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus output that fits in all blocks of the engine."""
        return bisect_right(range(1, self.model.max_positions + 1), self.num_blocks, key=self.most_blocks)

    @property
    def share(self) -> ModelConfig:
        """The part of the model that one rank computes."""
        return self.model.share(self.tensor_parallel)

    def most_blocks(self, tokens: int) -> int:
        """The most blocks that a request of `tokens` holds at one time."""
        step_tokens = self.prefill_chunk_tokens
        return sum(most_blocks(kind, tokens, step_tokens, self.block_tokens) for kind in self.model.groups)


TINY = ModelConfig(
    name="kvdock-tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, mlp_hidden=128
)
"""For tests: 512 bytes of KV for each token (float32)."""

TINY_MHA = dataclasses.replace(TINY, name="kvdock-tiny-mha", kv_heads=4)
TINY_MLA = dataclasses.replace(TINY, name="kvdock-tiny-mla", kv_heads=1, head_size=48, latent_size=32)
TINY_HYBRID2 = dataclasses.replace(
    TINY, name="kvdock-tiny-hybrid2", layers=4, groups=(FullAttention(), SlidingWindow(40))
)
TINY_HYBRID3 = dataclasses.replace(
    TINY, name="kvdock-tiny-hybrid3", layers=6, groups=(FullAttention(), SlidingWindow(24), SlidingWindow(72))
)

SMALL = ModelConfig(
    name="kvdock-small", layers=8, hidden=512, heads=8, kv_heads=4, head_size=64, mlp_hidden=1536
)
"""For the demo: 16 KiB of KV for each token (float32)."""

_TINY = EngineConfig(model=TINY, num_blocks=128, prefill_chunk_tokens=64, max_step_tokens=256)

PRESETS: dict[str, EngineConfig] = {
    "tiny": _TINY,
    "tiny-mha": dataclasses.replace(_TINY, model=TINY_MHA),
    "tiny-mla": dataclasses.replace(_TINY, model=TINY_MLA, kv_format="NL_X_NB_BS_HS"),
    "tiny-hybrid2": dataclasses.replace(_TINY, model=TINY_HYBRID2),
    "tiny-hybrid3": dataclasses.replace(_TINY, model=TINY_HYBRID3),
    "small": EngineConfig(model=SMALL, num_blocks=1024, threads=2),
}


def preset(name: str) -> EngineConfig:
    """The named preset; change fields with dataclasses.replace. Raises ConfigError for another name."""
    require(name in PRESETS, "preset", name, f"one of {sorted(PRESETS)}")
    return PRESETS[name]
