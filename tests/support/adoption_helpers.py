"""Pools that servers leave behind: started again, looked at, damaged on purpose, and removed at the end."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from api_helpers import ServerProcess

from kvdock._core import Table
from kvdock.api.pool.adopt import Adopted, Means, adopt_pool
from kvdock.api.pool.lock import remove_stale
from kvdock.api.settings import Settings
from kvdock.shm import objects as shm


@contextmanager
def next_at(server: ServerProcess, **settings: object) -> Iterator[ServerProcess]:
    """The next server at the socket of one that is gone, with its settings but for those given."""
    with ServerProcess(**{**server.settings, **settings}) as second:
        yield second


@contextmanager
def of_another_release(server: ServerProcess) -> Iterator[None]:
    """Within the block the table's header has the version 999, and another layout."""
    (region,) = shm.SHM_DIR.glob(f"kvdock-{server.pool_id:016x}-table*")
    with region.open("r+b", buffering=0) as table:
        head = table.read(24)  # the magic, the version, a CRC, the hash of the layout
        table.seek(0)
        table.write(struct.pack("<8sI4sQ", head[:8], 999, head[12:16], 1))
        yield
        table.seek(0)
        table.write(head)


@contextmanager
def adopted_here(server: ServerProcess) -> Iterator[Table]:
    """The pool that a server left, taken over by this process: its table passed all checks. Left as it is."""
    adopted: Adopted = adopt_pool(Settings.load(server.settings), server.pool_id, Means(secrets.randbits))
    try:
        yield adopted.objects.table
    finally:
        adopted.objects.leave()


def remove_stale_of(*pool_ids: int, keep: tuple[int, ...] = ()) -> list[str]:
    """remove_stale, blind to the pools of everyone else on this machine: other tests leave some on purpose."""
    return remove_stale(spare=lambda left: left.pool_id not in pool_ids or left.pool_id in keep)
