"""Where the tokens of a prompt came from: the one definition of a hit.

A prompt is divided when its request has ended, into runs of tokens from the first one on:

    local      the engine's own prefix cache had them
    loaded     kvdock brought them: from memory, from a lower tier, or after a wait for another engine's store
    computed   the engine computed them, for one of the reasons of COMPUTED

The runs of a prompt add up to its tokens. A preempted request is divided as it was when it was first admitted; what it
loads when it comes back is counted apart, as tokens loaded again. A lease that was given back counts nowhere.

Engines report how many tokens they had, loaded and why not more (kvdock/protocol/outcomes.py). The server knows where
the tokens that it offered came from, and what became of those that it did not have. kvdock/api/record/hits.py joins
the two.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from kvdock.protocol.wire_types import Answer

MEMORY: Final = "memory"
"""The source of tokens that the pool had when the request was first looked up."""
WAITED: Final = "waited"
"""The source of tokens that another engine stored while the request waited for them. Any other source is a tier's name.
"""

ComputedWhy = Literal[
    "never_stored", "room", "ahead", "quota", "shrunk", "cleared", "evicted", "deleted", "mismatched", "unread", "read",
    "weights", "store_declined", "tier_slow", "being_stored", "partial", "held_bytes", "pinning", "draining",
    "late", "unverified", "load_failed", "declined_short", "declined_dear", "not_loaded", "not_asked", "opted_out",
    "bypassed_adapter", "bypassed_media", "bypassed_embeddings", "bypassed_growing", "bypassed_unready",
    "short", "tail", "other",
]

COMPUTED: Final[dict[ComputedWhy, str]] = {
    # what the server knows of the chunks that it did not have
    "never_stored": "as far as the server remembers, they were never stored",
    "room": "they were evicted to make room for a store",
    "ahead": "they were evicted because the pool had too little free room",
    "quota": "they were evicted because their tenant had reached its quota",
    "shrunk": "they were evicted with a segment that was given back",
    "cleared": "an operator cleared the cache",
    "evicted": "an operator evicted them",
    "deleted": "an operator deleted them",
    "mismatched": "a reader found other bytes than were stored, so they were taken out of use",
    "unread": "a lower tier had loaded them for a request that ended first",
    "read": "a lower tier had loaded them for one request, and they left the pool with it",
    "weights": "they were evicted first, because no engine had run their weights for a while",
    "store_declined": "their store was declined in favour of chunks that are expected to be used sooner",
    "tier_slow": "a lower tier has them, and the request did not wait until they were loaded",
    "being_stored": "another engine was storing them",
    "partial": "they are stored without the parts of their sliding windows that a hit of this length needs",
    "held_bytes": "the engine holds as much of the pool as it may",
    "pinning": "not every rank has page-locked the memory that they lie in",
    "draining": "the server was drained, and gave out nothing",
    # what the engine knows of those that it did not load
    "late": "the server's answer was late",
    "unverified": "the engine had not verified them when its time for that was over",
    "load_failed": "their load did not complete",
    "declined_short": "the hit had fewer tokens than min_load_tokens",
    "declined_dear": "to load them was expected to take longer than to compute them",
    "not_loaded": "the server had them, and the engine did not load them",
    "not_asked": "this server was not asked for them",
    "opted_out": "the request asked that nothing be loaded",
    "bypassed_adapter": "not looked up: the request's adapter is not known for sure",
    "bypassed_media": "not looked up: the request's media are not known for sure",
    "bypassed_embeddings": "not looked up: the request's embeddings are not at hand",
    "bypassed_growing": "not looked up: the request's prompt grows",
    "bypassed_unready": "not looked up: the request's adapter or media were not hashed in time",
    # what follows from the prompt's length
    "short": "the prompt is shorter than a chunk",
    "tail": "they do not fill a chunk",
    "other": "a reason of the engine's own",
}
"""Why tokens were computed, as the end of a sentence about the tokens."""
assert tuple(COMPUTED) == get_args(ComputedWhy)


class PromptRun(Answer, kw_only=True):
    """Consecutive tokens of a prompt with the same origin."""

    tokens: int
    origin: Literal["local", "loaded", "computed"]
    source: str = ""
    """Where loaded tokens came from: `memory`, `waited`, or the name of the tier."""
    why: ComputedWhy | Literal[""] = ""
    """Why tokens were computed."""


class HitTotals(Answer, kw_only=True):
    """Sums over requests that have ended, as their engines reported them. `local_tokens`, the values of `loaded` and
    those of `computed` add up to `prompt_tokens`."""

    requests: int = 0
    prompt_tokens: int = 0
    local_tokens: int = 0
    """Tokens that the engines' own prefix caches had."""
    loaded: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens by source: `memory`, `waited`, or the name of a tier."""
    computed: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens by reason, a key of COMPUTED."""
    reloaded_tokens: int = 0
    """Tokens that preempted requests loaded when they came back. They are in none of the other sums."""
    saved_s: float | None = None
    """What computing all loaded tokens would have taken the engines, less what loading them took; below 0: loading took
    longer. None: no engine has reported both."""

    @property
    def loaded_tokens(self) -> int:
        return sum(self.loaded.values())

    @property
    def computed_tokens(self) -> int:
        return sum(self.computed.values())

    @property
    def loaded_share(self) -> float | None:
        """The share of all prompt tokens that were loaded: kvdock's hit rate. None: there were no prompt tokens."""
        return self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def local_share(self) -> float | None:
        return self.local_tokens / self.prompt_tokens if self.prompt_tokens else None


def by_source(hits: HitTotals) -> dict[str, int]:
    """All prompt tokens: `local`, each source of loaded ones, and `computed`."""
    return {"local": hits.local_tokens, MEMORY: 0, **hits.loaded, "computed": hits.computed_tokens}
