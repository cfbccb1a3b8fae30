"""A call in the background to a server that may be gone, and whose answer nobody needs."""

from __future__ import annotations

from collections.abc import Callable

from kvdock.connectors.session import Attachment, EngineSession
from kvdock.protocol.errors import ApiError, ServerUnavailable


def tell(session: EngineSession, attachment: Attachment, call: Callable[..., object], *arguments: object) -> None:
    """Nothing happens when the server that `attachment` is to is not there: should it return, it asks."""
    if session.attachment is not attachment:
        return
    try:
        call(*arguments)
    except (ServerUnavailable, ApiError) as error:
        session.lost(attachment, error)
