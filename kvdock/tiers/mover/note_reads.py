"""Reads of notes that several threads share. Many batches of a load end at about the same time, and each asks a store
that other servers use for the namespace's note.

A read tells how the note is after the call has begun: callers share a read that has not begun yet, and never one that
has.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kvdock.tiers.mover.tier_handle import LATE_S, TierHandle
from kvdock.tiers.notes import Note
from kvdock.tiers.tier import Deadline, TierError


class NoteReads:
    """Those of one tier. Thread-safe."""

    def __init__(self, handle: TierHandle) -> None:
        self._handle, self._lock = handle, threading.Lock()
        self._coming: dict[bytes, Future[Note | None]] = {}
        """By namespace, the read that has not begun yet."""

    def read(self, namespace: bytes, deadline: Deadline) -> Note | None:
        """Raises TierError."""
        with self._lock:
            coming = self._coming.get(namespace)
            if coming is None:
                own = self._coming[namespace] = Future()
        if coming is None:
            return self._read(namespace, own, deadline)
        try:
            return coming.result(deadline.left_s + LATE_S)
        except (TimeoutError, TierError):  # the other caller may have had less time
            (note,) = self._handle.notes([namespace], deadline)
            return note

    def _read(self, namespace: bytes, own: Future[Note | None], deadline: Deadline) -> Note | None:
        def begins() -> None:
            with self._lock:
                if self._coming.get(namespace) is own:
                    del self._coming[namespace]

        try:
            (note,) = self._handle.notes([namespace], deadline, begins)
        except BaseException as error:
            own.set_exception(error if isinstance(error, TierError) else TierError(self._handle.name, str(error)))
            raise
        finally:
            begins()
        own.set_result(note)
        return note
