"""The callers: where a call comes from, what it may do, and the audit log of operators' calls and of callers that were
refused for lack of an access token.

A connection's Peer is made once, from the kernel's facts about its socket, never from anything that the caller sends.
An access token (kvdock/api/access/access_file.py) in a call's header stands for another Peer during that call.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final, NamedTuple

from kvdock.protocol.access import Identity, credentials_of
from kvdock.protocol.calls import INCLUDED, Call
from kvdock.protocol.errors import ApiError, without_secrets, without_session_secrets
from kvdock.protocol.forms import JSON
from kvdock.protocol.reports import Caller
from kvdock.protocol.wire_types import OWN_TENANT, Answer, Body, Scope

SCOPES_OF_USER: Final = INCLUDED["engine"] | INCLUDED["admin"]
"""With these a caller may do whatever the server's own user may with sessions."""
ALL_SCOPES: Final = SCOPES_OF_USER | INCLUDED["peer"]


class Peer(NamedTuple):
    name: str
    """For the log: `user 1000`, `token team-a`."""
    scopes: frozenset[Scope]
    tenant: str | None
    """The tenant whose sessions and namespaces it may use. None: it may use none."""
    is_unix: bool
    """The call came over the Unix socket, which no web page can reach."""
    process: int = 0
    """The process at the other end of a Unix connection; 0: it is in a namespace of processes that is not seen here."""

    @property
    def identity(self) -> Identity:
        """A token with the scopes `engine` and `admin` may use every session of its tenant, as the server's own user
        may."""
        return Identity(None if self.scopes >= SCOPES_OF_USER else self.name, self.is_unix)

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes

    def view(self) -> Caller:
        return Caller(scopes=[scope for scope in INCLUDED if scope in self.scopes], tenant=self.tenant)

    def sees(self, tenant: str) -> bool:
        return tenant == self.tenant or "admin" in self.scopes

    def require(self, scope: Scope) -> None:
        """Raises ApiError without the scope: unauthenticated if there is no access token, forbidden if the token lacks
        it."""
        if scope in self.scopes:
            return
        if self.tenant is None:
            raise ApiError("unauthenticated", "send an access token", found=self.name, wanted=f"scope {scope}")
        raise ApiError("forbidden", "the access token may not do this", found=self.name, wanted=f"scope {scope}")


NOBODY: Final = Peer("nobody: TCP without an access token", INCLUDED["health"], None, is_unix=False)


def peer_of(connected: socket.socket) -> Peer:
    """The peer of a connection that was just accepted. Raises OSError if the kernel does not name it."""
    if connected.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_UNIX:
        return NOBODY
    found = credentials_of(connected)
    return of_user(found.uid)._replace(process=found.pid)


def of_user(uid: int) -> Peer:
    """The peer of a Unix connection of that user."""
    if uid in (os.geteuid(), 0):
        return Peer(f"user {uid}", ALL_SCOPES, OWN_TENANT, is_unix=True)
    return Peer(f"user {uid} without an access token", INCLUDED["health"], None, is_unix=True)


AUDIT = "kvdock.audit"
"""The name of the audit log's logger."""
SHOWN_CHARACTERS = 200
"""The most characters of a body, an answer or a path in one line of the log."""
READ_BYTES = 16 * SHOWN_CHARACTERS
"""How much is read of a body, which may be long."""
ACCESS_CODES = frozenset({"unauthenticated", "forbidden"})

log = logging.getLogger(AUDIT)
log.setLevel(logging.INFO)


def log_done(peer: Peer, call: Call[Answer], asked: Body, answer: Answer) -> None:
    """Logs a call of an operator that took effect, with its body and its answer."""
    log.info("%s: %s %s %s: %s", peer.name, call.method, call.path, _cut(JSON.encode(asked)), _cut(JSON.encode(answer)))


def log_refusal(peer: Peer, method: str, path: str, error: ApiError) -> None:
    """Logs the refusal if its code is one of ACCESS_CODES."""
    if error.code in ACCESS_CODES:
        shown = _cut(without_secrets(path).encode())
        log.warning("refused %s: %s %s: %s, wanted %s", peer.name, method, shown, error.code, error.wanted)


def _cut(text: bytes) -> str:
    """The text as ASCII in quotes, so that a caller's text cannot end a line or change its direction."""
    begin = text
    if len(text) > READ_BYTES:  # and no part of an id is left at its end
        begin = text[:READ_BYTES].rstrip(b"0123456789abcdefABCDEF-")
    shown = ascii(without_session_secrets(begin.decode(errors="replace")))
    if len(shown) <= SHOWN_CHARACTERS and begin is text:
        return shown
    return f"{shown[:SHOWN_CHARACTERS]}…"
