"""What an engine was told to wish for a request's chunks, and how the server hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdock.connectors.session import Attachment, EngineSession
from kvdock.connectors.tell import tell
from kvdock.protocol.hints import Hint
from kvdock.protocol.tier_schemas import Prefetch
from kvdock.protocol.wire_types import MAX_KEYS


@dataclass(frozen=True)
class Wish:
    """For a request's chunks once it has ended. `tokens`: for its first ones; None: for all. `prefetch_after_s`: lower
    tiers load then what the pool lacks of them; None: this is a hint, and the other fields are those of schemas.Hint.
    """

    priority: int = 0
    duration_s: float | None = None
    tokens: int | None = None
    conversation_ended: bool = False
    prefetch_after_s: float | None = None


def tell_wishes(
    session: EngineSession, attachment: Attachment, keys: Sequence[bytes], wishes: Sequence[Wish]
) -> None:
    """Background. `keys`: a request's, from its first. Where they are more than one call may name, the first are
    retained or loaded, and the last are let go."""
    chunk_tokens = session.manifest.chunk_tokens
    for wish in wishes:
        meant = keys if wish.tokens is None else keys[: -(-wish.tokens // chunk_tokens)]
        is_from_first = wish.priority > 0 or wish.prefetch_after_s is not None
        meant = meant[:MAX_KEYS] if is_from_first else meant[-MAX_KEYS:]
        if not meant:
            continue
        if wish.prefetch_after_s is not None:
            tell(session, attachment, session.client.prefetch, Prefetch(
                session=attachment.session, member=attachment.member, keys=b"".join(meant),
                after_s=wish.prefetch_after_s,
            ))
            continue
        body = Hint(
            session=attachment.session, member=attachment.member, keys=b"".join(meant), priority=wish.priority,
            duration_s=wish.duration_s, conversation_ended=wish.conversation_ended,
        )
        tell(session, attachment, session.client.hint, body)
