"""What a lookup says of chunks that are not there yet and may come: a request may wait for them, or compute them."""

from __future__ import annotations

from typing import NamedTuple

from kvdock.protocol.wire_types import Answer


class WaitTerms(NamedTuple):
    """How long a request may wait for chunks that lower tiers load, and how fast its engine would compute them."""

    wait_s: float
    """0: not at all."""
    tokens_per_s: float
    """0: that is not known."""


NO_WAIT = WaitTerms(0.0, 0.0)


class BeingStored(Answer):
    """Other sessions, all of whose members are live, store the prefix up to `tokens`, or have promised to.
    `committed` of these tokens are stored. No limit on `hit_tokens` counts here."""

    tokens: int
    committed: int


class PendingTokens(Answer):
    """Lower tiers are asked for what is behind the hit, or are loading it for this request."""

    tokens: int
    """How long the hit will be, counted from token 0. While tiers are asked: how long it may become at most."""
    tier: str
    """Where it comes from; empty while tiers are asked."""
    by_s: float
    """It is expected to be there by then, seconds from now. It may come later, or not at all."""


def worth_chunks(
    most: int, *, chunk_bytes: int, chunk_tokens: int, latency_s: float, bytes_per_s: float, wait_s: float,
    tokens_per_s: float,
) -> int:
    """Whether it is worth waiting for a tier: how many of `most` chunks it loads within `wait_s`, and sooner than an
    engine computes them that computes `tokens_per_s` (0: that is not known). 0: it is not worth it. The latency counts
    least for the longest prefix that comes in time, so that prefix decides.

    The mover decides, with the chunks that a tier has and the time that is left (kvdock/tiers/mover/fetches.py). The
    engine passes on its terms: how long the request may wait, which is never longer than computing all that it lacks,
    and how fast it computes. The server (kvdock/api/tiers/tier_state.py) asks the same with the speed that the mover
    reported last and as if the tier had every chunk, only in order to refuse at once: where nothing is worth it for all
    chunks, nothing is for fewer. Without that, a request that no tier can serve in time would wait for a round trip
    through the mover, and for the step of its engine in which it is looked up again.
    """
    chunk_s = chunk_bytes / bytes_per_s
    count = min(most, int((wait_s - latency_s) / chunk_s))
    is_too_slow = tokens_per_s > 0 and latency_s + count * chunk_s > count * chunk_tokens / tokens_per_s
    return 0 if is_too_slow else max(0, count)
