"""A small object beside the pool, which the next server of the pool finds: written as a whole, or not at all, and
never with less than was written before. One that is damaged is read as if there were none."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvdock.shm import objects as shm
from kvdock.shm.errors import ForeignObject
from kvdock.shm.sealed import seal_of, unsealed

log = logging.getLogger("kvdock.api")


Piece = bytes | memoryview


class KeptObject:
    def __init__(self, path: Path, what: str, randbits: Callable[[int], int] = secrets.randbits) -> None:
        """`what`: its content, for the log. `randbits(k)`: k random bits that nobody can guess, for names."""
        self._path, self._what, self._randbits = path, what, randbits
        self.failure = ""
        """Why the last write failed; "": it did not."""
        self._writing = threading.Lock()
        self._asked = self._written = 0

    def read(self) -> memoryview:
        """Returns its content; empty: there is none, or it is damaged or cannot be read."""
        try:
            return unsealed(read_own(self._path))
        except FileNotFoundError:
            return memoryview(b"")
        except (OSError, ForeignObject, ValueError) as error:
            log.warning("%s begins anew: %s: %s", self._what, self._path, error)
            return memoryview(b"")

    def write(self, *content: Piece) -> None:
        """`content`: in pieces."""
        self._asked += 1
        self._write(self._asked, content)

    async def write_aside(self, *content: Piece) -> None:
        """In a thread: to write and to free megabytes takes some ms. Raises nothing, like `write`."""
        self._asked += 1
        await asyncio.to_thread(self._write, self._asked, content)

    def _write(self, number: int, content: Sequence[Piece]) -> None:
        with self._writing:
            if number > self._written:
                self._written = number
                self._replace(content)

    def _replace(self, content: Sequence[Piece]) -> None:
        fresh = shm.fresh_path(self._path.with_name(f"{self._path.name}-{self._randbits(64):016x}"))
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.writelines((seal_of(content), *content))
            fresh.replace(self._path)
            self.failure = ""
        except OSError as error:
            self.failure = error.strerror or str(error)
            with suppress(OSError):  # its pages are missed elsewhere
                fresh.unlink(missing_ok=True)
            log.warning("%s: not kept for the next server: %s", self._what, error)


def read_own(path: Path) -> bytes:
    """All of an object of this user. Raises OSError, ForeignObject."""
    with os.fdopen(shm.open_own(path), "rb") as file:
        return file.read()
