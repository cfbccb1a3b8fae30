"""Releases that wait for the next call of their session, which carries them to the server."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from typing import TypeVar

import msgspec

from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError

C = TypeVar("C", bound=s.Carrier)
_LEASE = re.compile(r"[0-9a-f]{16}")


class ReleaseQueue:
    """Releases waiting for a call of their session to carry them. Thread-safe.

    A release may be sent any number of times: grant ids are never used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, set[int]]] = {}

    def add(self, session: str, lease: str, ranks: Collection[int]) -> None:
        """ValueError for what no server would take: it would fail the call that carries it."""
        if not _LEASE.fullmatch(lease):
            raise ValueError(f"lease found {lease!r}, wanted 16 lower-case hex digits")
        if not all(0 <= rank < 128 for rank in ranks):
            raise ValueError(f"ranks found {sorted(ranks)}, wanted 0..127")
        with self._lock:
            self._waiting.setdefault(session, {}).setdefault(lease, set()).update(ranks)

    def take(self, session: str, at_most: int = s.MAX_RELEASES) -> list[s.Released]:
        """The oldest first; the caller sends them or puts them back."""
        if not self._waiting:
            return []
        with self._lock:
            leases = self._waiting.get(session, {})
            taken = [s.Released(lease, sorted(leases.pop(lease))) for lease in list(leases)[:at_most]]
            if not leases:
                self._waiting.pop(session, None)
        return taken

    def put_back(self, session: str, releases: list[s.Released], error: BaseException) -> None:
        """They may not have arrived. What a lost session held is its server's to clear up."""
        if isinstance(error, ApiError) and error.code == "unknown_session":
            return
        for said in releases:
            self.add(session, said.lease, said.ranks)

    def sessions(self) -> list[str]:
        with self._lock:
            return list(self._waiting)

    def load(self, session: str | None, body: C) -> tuple[C, list[s.Released]]:
        """The body with what waits for its session, and what was taken for it."""
        taken = self.take(session, s.MAX_RELEASES - len(body.releases)) if session is not None else []
        return (msgspec.structs.replace(body, releases=[*body.releases, *taken]) if taken else body), taken
