"""What a disk has from before is told in slices, since lookups wait while the server takes one in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from disk_helpers import opened, store_in_turn
from tier_helpers import MIB, Parts

from kvdock.protocol.mover_schemas import FRAME_HEAD, KNOWN_BYTES, MoverConfig, MoverReport, frame

pytestmark = pytest.mark.tiers

MOST = 256
LIMIT = 64 * MIB


def test_no_report_names_more_than_a_slice_and_all_are_named(folder: Path, parts: Parts) -> None:
    batch = parts.many(2 * MOST + 40, 3000)
    with opened(folder, LIMIT) as tier:
        store_in_turn(tier, batch)
    config = MoverConfig(address="unix:/nowhere", instance_prefix="m", disk_path=str(folder), disk_bytes=LIMIT)
    mover = subprocess.Popen(
        [sys.executable, "-m", "kvdock.tiers.mover"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    told, longest = set[bytes](), 0
    try:
        assert mover.stdin is not None and mover.stdout is not None
        mover.stdin.write(frame(config))
        mover.stdin.flush()
        while len(told) < len(batch):
            (length,) = FRAME_HEAD.unpack(mover.stdout.read(FRAME_HEAD.size))
            report = msgspec.msgpack.decode(mover.stdout.read(length), type=MoverReport)
            named = b"".join(one.keys for one in report.known)
            longest = max(longest, len(named) // KNOWN_BYTES)
            told |= {named[at : at + KNOWN_BYTES] for at in range(0, len(named), KNOWN_BYTES)}
    finally:
        mover.stdin.close()  # type: ignore[union-attr]  # it ends with its server
        mover.wait(30)
        mover.stdout.close()  # type: ignore[union-attr]  # as above
    assert told == {part.name.key[:KNOWN_BYTES] for part in batch}
    assert 1 < longest <= MOST
