"""What became of an engine's requests, as the engine itself knows it: heartbeats report it, and people read it.

The record is the same for every engine. kvdock/protocol/hits.py says how the server divides a prompt by it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvdock.protocol.hits import PromptRun
from kvdock.protocol.wire_types import Answer, Body, Carrier, Identity, Name

Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
LEAST_TOKENS_PER_S = 0.01
"""A reported speed below this means that the engine has not measured its speed."""
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
MAX_OUTCOMES: Final = 64
"""The most outcomes in one heartbeat."""
TokenCount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Microseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
Why = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{0,64}$(?!\n)")]

class Outcome(Identity, frozen=True, kw_only=True):
    """A request that has ended. Its loaded tokens follow the local tokens."""

    request: Name
    """The request's id in the engine's lookups."""
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    """Rises from outcome to outcome of a member, so that one that is reported again is counted once. 0: outcomes are
    not numbered, and are counted each time."""
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """The epoch of the last lookup before the request was first admitted; 0: it was not looked up, or not known."""
    prompt_tokens: TokenCount
    local_tokens: TokenCount = 0
    """How much the engine's own cache had of it when it was first admitted."""
    asked_from: TokenCount = 0
    """The position in the prompt of the first token that its lookups name: engines may name the tail of a prompt alone.
    The engine's own cache had those before it."""
    found_tokens: TokenCount = 0
    """The longest prefix that the server had, from the first token on."""
    loaded_tokens: TokenCount = 0
    """How many tokens were loaded at the first admission."""
    reloaded_tokens: TokenCount = 0
    """How many were loaded when it came back after preemptions."""
    why: Why = ""
    """Why no more was loaded: a key of COMPUTED in kvdock/protocol/hits.py, or a reason of the engine's own. Empty: the
    engine knows of none."""
    loaded_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)] = 0
    """The size of all its loads, over all ranks."""
    load_us: Microseconds | None = None
    """The time of all its loads, each from when the engine began it until it knew its end, complete or not. None: it
    began none."""
    copy_us: Microseconds | None = None
    """The part of `load_us` that was copying, on the slowest rank. None: not known."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    """How fast the engine would have computed what it has loaded, as it has measured on long prompts. Below
    LEAST_TOKENS_PER_S: it has not."""


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


class OutcomeView(Answer, kw_only=True, gc=False):
    """A request that has ended, as its engine reported it, and its prompt divided by origin."""

    prompt_tokens: int
    local_tokens: int
    asked_from: int = 0
    """The position in the prompt of the first token that its lookups name."""
    found_tokens: int
    loaded_tokens: int
    reloaded_tokens: int = 0
    runs: list[PromptRun] = msgspec.field(default_factory=list)
    """The whole prompt, from its first token."""
    why: str = ""
    """The engine's reason why no more was loaded; empty: it knows of none."""
    loaded_bytes: int = 0
    load_us: int | None = None
    copy_us: int | None = None
    prefill_tokens_per_s: float = 0.0
    saved_s: float | None = None
    """What computing the loaded tokens would have taken, less what loading them took; below 0: loading took
    longer. None: one of the two is not known."""


def view_of(outcome: Outcome, runs: list[PromptRun]) -> OutcomeView:
    """The outcome as lists show it, with its prompt divided by origin."""
    return OutcomeView(
        prompt_tokens=outcome.prompt_tokens, local_tokens=outcome.local_tokens, asked_from=outcome.asked_from,
        found_tokens=outcome.found_tokens, loaded_tokens=outcome.loaded_tokens,
        reloaded_tokens=outcome.reloaded_tokens, runs=runs, why=outcome.why, loaded_bytes=outcome.loaded_bytes,
        load_us=outcome.load_us, copy_us=outcome.copy_us,
        prefill_tokens_per_s=outcome.prefill_tokens_per_s, saved_s=saved_s(outcome),
    )


def saved_s(outcome: Outcome) -> float | None:
    """As OutcomeView has it."""
    if outcome.load_us is None or outcome.prefill_tokens_per_s < LEAST_TOKENS_PER_S:
        return None
    loaded = outcome.loaded_tokens + outcome.reloaded_tokens
    return loaded / outcome.prefill_tokens_per_s - outcome.load_us / 1e6
