"""What engines wish for chunks: bodies and answers of `POST /v1/hints`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvdock.protocol.wire_types import MAX_HINT_S, MOST_PRIORITY, Answer, Body, Keys, Name


class Hint(Body, kw_only=True):
    """What an engine was told of a prompt: how long its chunks are worth keeping, or that nobody will ask for them."""

    session: Name
    member: Name
    keys: Keys
    """A prompt's, in order. A priority above 0 takes them from the prompt's first on, any other from their end."""
    priority: Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    """Chunks of lower priority are evicted first. Above 0: they are retained. 0: what was wished before is over."""
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_HINT_S)] | None = None
    """None, for priorities below 0: until another request names the chunk."""
    conversation_ended: bool = False
    """Nobody is expected to ask for the chunks again: they are evicted before those of any priority."""


class HintAnswer(Answer, kw_only=True):
    chunks: int
    """How many the hint took effect for."""
    refused: int = 0
    """How many were not retained, because as much of the pool is as may be."""
