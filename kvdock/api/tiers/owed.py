"""What lower tiers have not been told yet of clears and deletions, kept in a file beside the server's socket.

So a tier that was off while something was cleared is told by the next server, too, also when the pool was removed. The
file is there while something is owed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvdock.protocol.mover_schemas import Order

log = logging.getLogger("kvdock.api")

VERSION = 1


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    orders: list[Order]


class OwedFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, tiers: Sequence[str]) -> list[Order]:
        """What a server before has left. A file that cannot be read may have named anything: then all that `tiers` have
        is to be cleared."""
        try:
            kept = msgspec.msgpack.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s cannot be read, so all that lower tiers have is cleared: %s", self._path, error)
            return [Order(number=0, namespace="", tiers=list(tiers), least=0)] if tiers else []
        if kept.version != VERSION:
            log.error("%s is of version %d, wanted %d: all that lower tiers have is cleared", self._path,
                      kept.version, VERSION)
            return [Order(number=0, namespace="", tiers=list(tiers), least=0)] if tiers else []
        return kept.orders

    def write(self, orders: Sequence[Order]) -> None:
        """Durable when it returns. Raises OSError."""
        if not orders:
            self._path.unlink(missing_ok=True)
            return
        new = self._path.with_name(self._path.name + ".new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(msgspec.msgpack.encode(_Kept(VERSION, list(orders))))
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
