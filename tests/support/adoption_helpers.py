"""Pools that servers leave behind: started again, looked at, damaged on purpose, and removed at the end."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from api_helpers import ServerProcess

from kvdock._core import Table
from kvdock.api.pool.adopt import Adopted, adopt_pool
from kvdock.api.pool.lock import remove_stale
from kvdock.api.settings import Settings


@contextmanager
def next_at(server: ServerProcess, **settings: object) -> Iterator[ServerProcess]:
    """The next server at the socket of one that is gone, with its settings but for those given."""
    with ServerProcess(**{**server.settings, **settings}) as second:
        yield second


@contextmanager
def adopted_here(server: ServerProcess) -> Iterator[Table]:
    """The pool that a server left, taken over by this process: its table passed all checks. Left as it is."""
    adopted: Adopted = adopt_pool(Settings.load(server.settings), server.pool_id, secrets.randbits)
    try:
        yield adopted.objects.table
    finally:
        adopted.objects.leave()


def remove_stale_of(*pool_ids: int, keep: tuple[int, ...] = ()) -> list[str]:
    """remove_stale, blind to the pools of everyone else on this machine: other tests leave some on purpose."""
    return remove_stale(spare=lambda left: left.pool_id not in pool_ids or left.pool_id in keep)
