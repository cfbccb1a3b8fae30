"""The measurement of plain copies, which an engine's process makes once beside its own work."""

from __future__ import annotations

import threading
import time

import pytest

from kvdock.datapath.ceiling import _memcpy_bytes_per_s

TRIES = 3
MOST_SHARE = 0.5


def held_share() -> float:
    """The longest time for which another thread got no turn, as a share of the measurement."""
    is_over, longest_s = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest_s
        last_s = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    watcher = threading.Thread(target=watch)
    watcher.start()
    began_s = time.perf_counter()
    rate = _memcpy_bytes_per_s.__wrapped__(2)
    took_s = time.perf_counter() - began_s
    is_over.set()
    watcher.join()
    assert rate > 0
    return longest_s / took_s


@pytest.mark.alone
def test_the_engines_thread_runs_while_plain_copies_are_measured() -> None:
    assert min(held_share() for _ in range(TRIES)) < MOST_SHARE
