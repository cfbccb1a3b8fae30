"""What programs around a whole engine on a GPU wait for, of which neither the engine nor the server gives notice."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvdock.client.client import Client

PATIENCE_S = 30.0


def wait_until_stored(address: str) -> None:
    """Until something is stored, and nothing more in a pause."""
    end_s, before, now = time.monotonic() + PATIENCE_S, 0, 0
    with Client(address) as client:
        while before == 0 or before != now:
            assert time.monotonic() < end_s, "what was computed is not stored"
            time.sleep(0.3)  # the server does not say when a store ends: it is asked again
            status = client.status()
            before, now = now, 0 if status.reservations else status.counters["stored_chunks"]


def wait_until_flushed(flush: Callable[[], bool]) -> None:
    """`flush`: empties the engine's own cache, if nothing keeps the engine from it at that moment."""
    end_s = time.monotonic() + PATIENCE_S
    while not flush():
        assert time.monotonic() < end_s, "the engine does not empty its own cache"
        time.sleep(0.02)  # until a store or a turn of its loop has ended
