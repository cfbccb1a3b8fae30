"""Which earlier tokens a layer attends to: one small class for each kind of KV group.

Layers of one kind form a group and share a block table. All that the engine needs to know about a kind follows
from `first_seen`, which never decreases:

    to compute from token n on      KV of [first_needed(n), n) must be present: that is a hit of n tokens
    once n tokens are computed      blocks wholly below first_needed(n) are no longer needed

In chunked-local attention the first token seen would be position // chunk * chunk; with a recurrent state, kept
as one entry for each block, position - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    """The most blocks a request of `tokens` can hold at a time when it computes `step_tokens` in a step."""
    whole = -(-tokens // block_tokens)
    # One more, because the range may begin and end in the middle of a block.
    return whole if kind.reach is None else min(whole, -(-(kind.reach + step_tokens) // block_tokens) + 1)
