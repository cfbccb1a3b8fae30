"""Releases that wait until the next call of their session carries them to the server."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from typing import TypeVar

import msgspec

from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import MAX_RANKS, MAX_RELEASES, Carrier, Released

C = TypeVar("C", bound=Carrier)
_LEASE = re.compile(r"[0-9a-f]{16}")


class ReleaseQueue:
    """Releases waiting for a call of their session to carry them. Thread-safe.

    A release may be sent any number of times: grant ids are never used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, set[int]]] = {}

    def add(self, session: str, lease: str, ranks: Collection[int]) -> None:
        """ValueError for values that every server refuses: they would make the call that carries them fail."""
        if not _LEASE.fullmatch(lease):
            raise ValueError(f"lease found {lease!r}, wanted 16 lower-case hex digits")
        if not all(0 <= rank < MAX_RANKS for rank in ranks):
            raise ValueError(f"ranks found {sorted(ranks)}, wanted 0..{MAX_RANKS - 1}")
        with self._lock:
            self._waiting.setdefault(session, {}).setdefault(lease, set()).update(ranks)

    def sessions(self) -> list[str]:
        with self._lock:
            return list(self._waiting)

    def waits(self, session: str) -> bool:
        """Whether any release of the session waits."""
        return session in self._waiting

    def load(self, session: str | None, body: C) -> tuple[C, list[Released]]:
        """The body with the session's oldest releases, as many as fit, and which they are: see `put_back`."""
        if session is None or session not in self._waiting:
            return body, []
        taken = self._take(session, MAX_RELEASES - len(body.releases))
        return msgspec.structs.replace(body, releases=[*body.releases, *taken]), taken

    def _take(self, session: str, at_most: int) -> list[Released]:
        with self._lock:
            leases = self._waiting.get(session, {})
            taken = [Released(lease, sorted(leases.pop(lease))) for lease in list(leases)[:at_most]]
            if not leases:
                self._waiting.pop(session, None)
        return taken

    def put_back(self, session: str, releases: list[Released], error: BaseException) -> None:
        """After a call that failed: they may not have arrived. A server that does not know the session holds nothing
        that they release."""
        if isinstance(error, ApiError) and error.code == "unknown_session":
            return
        for released in releases:
            self.add(session, released.lease, released.ranks)
