"""The audit log: who did what as an operator, and who was refused for want of an access token."""

from __future__ import annotations

import logging

from kvdock.api.access.peer import Peer
from kvdock.protocol.calls import Call
from kvdock.protocol.errors import ApiError
from kvdock.protocol.forms import JSON
from kvdock.protocol.wire_types import Answer, Body

AUDIT = "kvdock.audit"
"""The logger."""
SHOWN_CHARACTERS = 200
"""The most that a line has of a body, an answer or a path."""
ACCESS_CODES = frozenset({"unauthenticated", "forbidden"})

log = logging.getLogger(AUDIT)
log.setLevel(logging.INFO)


def done(peer: Peer, call: Call[Answer], asked: Body, answer: Answer) -> None:
    """A call of an operator that took effect, with what it asked for and what it did."""
    log.info("%s: %s %s %s: %s", peer.name, call.method, call.path, _cut(JSON.encode(asked)), _cut(JSON.encode(answer)))


def refused(peer: Peer, method: str, path: str, error: ApiError) -> None:
    """Logs the refusal if it is one of access."""
    if error.code in ACCESS_CODES:
        shown = _cut(path.encode())
        log.warning("refused %s: %s %s: %s, wanted %s", peer.name, method, shown, error.code, error.wanted)


def _cut(text: bytes) -> str:
    """As ASCII in quotes: what a caller chose cannot end a line or change the direction of one."""
    shown = ascii(text.decode(errors="replace"))
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"
