"""What a disk has from before is told in slices, since lookups wait while the server takes one in."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from disk_helpers import opened, store_in_turn
from tier_helpers import MIB, Part, Parts

from kvdock.protocol.mover_schemas import FRAME_HEAD, KNOWN_BYTES, MoverConfig, MoverReport, ServerUpdate, frame

pytestmark = pytest.mark.tiers

MOST = 256
LIMIT = 64 * MIB
PATIENT = "import kvdock.tiers.mover.run as run; run.TURN_S, run.LISTED_AT_ONCE = 3600, 2; "
"""A mover that waits as long as it may, and takes two segments in a turn."""


@pytest.fixture
def batch(folder: Path, parts: Parts) -> list[Part]:
    """Parts on a disk, in three segments."""
    made = parts.many(2 * MOST + 40, 3000)
    with opened(folder, LIMIT) as tier:
        store_in_turn(tier, made)
    return made


@contextmanager
def mover_of(folder: Path, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    program = f"{before}from kvdock.tiers.mover.__main__ import main; main()"
    config = MoverConfig(address="unix:/nowhere", instance_prefix="m", disk_path=str(folder), disk_bytes=LIMIT)
    mover = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert mover.stdin is not None
    limit = threading.Timer(30, mover.kill)
    limit.start()
    try:
        with mover, mover.stdin:  # it ends with its server
            mover.stdin.write(frame(config))
            mover.stdin.flush()
            yield mover
    finally:
        limit.cancel()


def reports_of(mover: subprocess.Popen[bytes]) -> Iterator[list[bytes]]:
    """The keys that each report names."""
    assert mover.stdout is not None
    while head := mover.stdout.read(FRAME_HEAD.size):
        report = msgspec.msgpack.decode(mover.stdout.read(FRAME_HEAD.unpack(head)[0]), type=MoverReport)
        named = b"".join(one.keys for one in report.known)
        yield [named[at : at + KNOWN_BYTES] for at in range(0, len(named), KNOWN_BYTES)]


def test_no_report_names_more_than_a_slice_and_all_are_named(folder: Path, batch: list[Part]) -> None:
    told, longest = set[bytes](), 0
    with mover_of(folder) as mover:
        for named in reports_of(mover):
            longest = max(longest, len(named))
            told.update(named)
            if len(told) == len(batch):
                break
    assert told == {part.name.key[:KNOWN_BYTES] for part in batch}
    assert 1 < longest <= MOST


def test_no_slice_waits_once_the_ones_before_it_are_told(folder: Path, batch: list[Part]) -> None:
    """The mover paused after each few slices, so a disk of 1 TiB would have taken some 50 s."""
    told, has_begun = 0, threading.Event()
    with mover_of(folder, PATIENT) as mover:

        def wake() -> None:
            """Until the disk is open."""
            while not has_begun.wait(0.1) and mover.stdin is not None:
                mover.stdin.write(frame(ServerUpdate()))
                mover.stdin.flush()

        waking = threading.Thread(target=wake)
        waking.start()
        for named in reports_of(mover):
            told += len(named)
            if named:
                has_begun.set()
                waking.join()
            if told == len(batch):
                break
        has_begun.set()
    assert told == len(batch)
