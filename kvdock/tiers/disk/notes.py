"""The notes of the disk tier: one small file, which is replaced as a whole and is durable before a change returns."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvdock.shm.files import replace_durably
from kvdock.tiers.disk.folder import TIER
from kvdock.tiers.notes import HEAD_BYTES, Change, Note, NoteError
from kvdock.tiers.tier import TierError

_log: Final = logging.getLogger(__name__)
_NAMESPACE_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")


class DiskNotes:
    """Thread-safe. A file that cannot be read counts as missing: new notes are made, so parts in the log are not found
    again."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._path, self._lock = folder / "notes", threading.Lock()
        self._notes: dict[bytes, Note] = {}
        try:
            self._notes = dict(_read(self._path.read_bytes()))
        except FileNotFoundError:
            pass
        except NoteError as error:
            _log.error("%s is damaged, so the parts that the tier has are not found any more: %s", self._path, error)

    def of(self, namespace: bytes) -> Note | None:
        return self._notes.get(namespace)

    def namespaces(self) -> list[bytes]:
        return list(self._notes)

    def change(self, namespace: bytes, change: Change) -> Note:
        """The change is durable when it returns. Raises TierError; then nothing has changed."""
        with self._lock:
            before = self._notes.get(namespace)
            if (after := change(before)) == before:
                return after
            notes = {**self._notes, namespace: after}
            try:
                replace_durably(self._path, b"".join(
                    namespace + _LENGTH.pack(len(packed := note.packed())) + packed for namespace, note in notes.items()
                ))
            except OSError as error:
                raise TierError(TIER, f"{self._path} cannot be written: {error}") from error
            self._notes = notes
            return after


def _read(data: bytes) -> Iterator[tuple[bytes, Note]]:
    """Raises NoteError."""
    at = 0
    while at < len(data):
        begin = at + _NAMESPACE_BYTES + _LENGTH.size
        if len(data) < begin + HEAD_BYTES:
            raise NoteError(f"it ends within a note, at byte {len(data)}")
        (length,) = _LENGTH.unpack_from(data, begin - _LENGTH.size)
        yield data[at : at + _NAMESPACE_BYTES], Note.read(data[begin : begin + length])
        at = begin + length
