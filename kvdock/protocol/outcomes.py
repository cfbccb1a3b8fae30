"""What became of an engine's requests, as the engine itself knows it: heartbeats report it, and people read it.

The record is the same for every engine. The reason why not more of a prompt was loaded is a short word of the engine's
choice: REASONS has those that this project's connectors use, and any other one is shown as it is.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvdock.protocol.wire_types import Answer, Body, Carrier, Identity, Name

Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
MAX_OUTCOMES: Final = 64
"""The most outcomes in one heartbeat."""
TokenCount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Microseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
Why = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{0,64}$(?!\n)")]

REASONS: Final = {
    "late": "the server's answer was late",
    "load_failed": "not all of a load came",
    "declined_short": "fewer tokens than min_load_tokens",
    "declined_dear": "computing was expected to be quicker",
    "bypassed_adapter": "not looked up: its adapter is not known for sure",
    "bypassed_media": "not looked up: its media are not known for sure",
    "bypassed_embeddings": "not looked up: its embeddings are not at hand",
    "bypassed_growing": "not looked up: its prompt grows",
    "bypassed_unready": "not looked up: its adapter or media were not hashed in time",
}
"""Why not more was loaded, in words. docs/vllm.md explains each."""


def in_words(why: str) -> str:
    """A reason as text for people; "" stays ""."""
    return REASONS.get(why) or why.replace("_", " ")


class Outcome(Identity, frozen=True, kw_only=True):
    """A request that has ended. Its loaded tokens follow the local tokens of the same admission."""

    request: Name
    """The request's id in the engine's lookups."""
    prompt_tokens: TokenCount
    local_tokens: TokenCount = 0
    """How much the engine's own cache had of it when it was first admitted, or when its last load began."""
    found_tokens: TokenCount = 0
    """The longest prefix that the server had, from the first token on."""
    loaded_tokens: TokenCount = 0
    why: Why = ""
    """The reason why no more was loaded. Empty: nothing prevented it."""
    loaded_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)] = 0
    """The size of the last load, over all ranks."""
    load_us: Microseconds | None = None
    """From when the engine began the load until it knew the load's end. None: it did not load, or not all came."""
    copy_us: Microseconds | None = None
    """The part of `load_us` that was copying, on the slowest rank. None: not known."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    """How fast the engine computes prompts, as it has measured. 0: it has not."""


class Copied(Body, kw_only=True, omit_defaults=True):
    """What a member's copies moved since its last heartbeat."""

    load_bytes: Amount = 0
    load_us: Amount = 0
    """How long the copies took, in sum: copies that ran at the same time count in full, each of them."""
    store_bytes: Amount = 0
    store_us: Amount = 0
    ceiling_bytes_per_s: Rate = 0.0
    """How fast plain copies of that member go, as measured on its machine. 0: not measured."""


class Reporting(Carrier, kw_only=True):
    """A call that may report what became of requests, and what was copied."""

    outcomes: Annotated[list[Outcome], msgspec.Meta(max_length=MAX_OUTCOMES)] = msgspec.field(default_factory=list)
    """Requests that have ended, in the order in which they ended. Reporting one again is harmless."""
    outcomes_dropped: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """How many more requests have ended since the last heartbeat, for which `outcomes` had no space."""
    copied: Copied | None = None
    """None: the member has copied nothing since its last heartbeat."""


class OutcomeView(Answer, kw_only=True):
    """As Outcome has it."""

    prompt_tokens: int
    local_tokens: int
    found_tokens: int
    loaded_tokens: int
    why: str
    why_in_words: str
    loaded_bytes: int = 0
    load_us: int | None = None
    copy_us: int | None = None
    prefill_tokens_per_s: float = 0.0
    saved_s: float | None = None
    """What computing the loaded tokens would have taken, less what loading them took; below 0: loading took
    longer. None: one of the two is not known."""


def view_of(outcome: Outcome) -> OutcomeView:
    return OutcomeView(
        prompt_tokens=outcome.prompt_tokens, local_tokens=outcome.local_tokens, found_tokens=outcome.found_tokens,
        loaded_tokens=outcome.loaded_tokens, why=outcome.why, why_in_words=in_words(outcome.why),
        loaded_bytes=outcome.loaded_bytes, load_us=outcome.load_us, copy_us=outcome.copy_us,
        prefill_tokens_per_s=outcome.prefill_tokens_per_s, saved_s=saved_s(outcome),
    )


def saved_s(outcome: Outcome) -> float | None:
    """As OutcomeView has it."""
    if not outcome.loaded_tokens or outcome.load_us is None or not outcome.prefill_tokens_per_s:
        return None
    return outcome.loaded_tokens / outcome.prefill_tokens_per_s - outcome.load_us / 1e6
