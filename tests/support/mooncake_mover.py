"""A mover whose tier on Mooncake Store has the settings of RDMA, while its library goes over TCP: python
mooncake_mover.py COPIES, started by the server in the mover's place.

This machine need not have RDMA. Over TCP the library registers the same memory with the same call, and copies from and
to registered memory as well as any other. For each copy of a part, the file COPIES gets a line: "read" or "write", and
where the bytes were: in a "segment" of the pool that was registered, in a "buffer" of the tier's own, or in "unknown"
memory. When memory is unregistered, it gets the line "unregistered". While the file COPIES.refused exists, segments are
not registered.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from api_helpers import ServerProcess
from mover_steps import use

from kvdock.tiers.record import HEADER_BYTES
from kvdock.tiers.stores.mooncake.library import Library
from kvdock.tiers.stores.mooncake.tier import Buffer, MooncakeTier
from kvdock.tiers.tier import Deadline, TierError


class Watched(Library):
    """Knows which memory was registered with it."""

    log: Path

    def watch(self, log: Path) -> None:
        self.log = log
        self._memory: dict[int, int] = {}
        self._lock = threading.Lock()

    def register(self, address: int, length: int) -> None:
        if length != BUFFER_BYTES and self.log.with_suffix(".refused").exists():
            raise TierError(self.log.name, "the test refuses it")
        super().register(address, length)
        with self._lock:
            self._memory[address] = length

    def unregister(self, address: int) -> None:
        super().unregister(address)
        with self._lock:
            del self._memory[address]
        self._note("unregistered")

    def read(self, name: str, address: int, length: int, offset: int) -> int:
        self._copied("read", address, length, offset)
        return super().read(name, address, length, offset)

    def write(self, name: str, address: int, length: int, offset: int) -> int:
        self._copied("write", address, length, offset)
        return super().write(name, address, length, offset)

    def _copied(self, verb: str, address: int, length: int, offset: int) -> None:
        if offset < HEADER_BYTES:  # a header, or a note
            return
        with self._lock:
            sizes = [
                size for begin, size in self._memory.items() if begin <= address and address + length <= begin + size
            ]
        where = "unknown" if not sizes else "buffer" if BUFFER_BYTES in sizes else "segment"
        self._note(f"{verb} {where}")

    def _note(self, line: str) -> None:
        with self._lock, self.log.open("a") as log:
            log.write(f"{line}\n")


BUFFER_BYTES: Final = len(Buffer().view)


def put_library(log: Path) -> None:
    """MooncakeTier.open() makes a client over TCP from now on, whatever the settings say."""

    def open_(cls: type[MooncakeTier], settings: Any, deadline: Deadline) -> MooncakeTier:
        library = Watched.open(replace(settings, protocol="tcp"), deadline)
        library.watch(log)
        return cls(settings, library, patience_s=3.0)

    vars_of: Any = MooncakeTier
    vars_of.open = classmethod(open_)


class RdmaServer(ServerProcess):
    """A server with this mover. `copies`: the file COPIES."""

    def __init__(self, copies: Path, **settings: object) -> None:
        self.before = partial(use, (sys.executable, __file__, str(copies)), {})
        super().__init__(**settings)


if __name__ == "__main__":
    put_library(Path(sys.argv[1]))
    from kvdock.tiers.mover.__main__ import main

    sys.exit(main())
