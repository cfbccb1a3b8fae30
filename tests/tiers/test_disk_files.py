"""Disks with more segments than the process has descriptors for."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from disk_helpers import ENVIRONMENT, opened
from tier_helpers import MIB, Parts, assert_loads, load, outcomes_of, patient, store_all

from kvdock.tiers.disk import io as disk_io
from kvdock.tiers.disk.log import key_of
from kvdock.tiers.tier import Outcome

pytestmark = pytest.mark.tiers

LOG = """
import os, resource, sys
from pathlib import Path
from kvdock.tiers.disk.io import Io
from kvdock.tiers.disk.log import Log
from kvdock.tiers.tier import PAGE_BYTES
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
size, count = 4 * PAGE_BYTES, 100
folder, io = Path(sys.argv[1]), Io(direct=False, threads=4, most_files=int(sys.argv[2]) or None)
log = Log(folder, io, size, count * size, 2)
pages = {}
for number in range(count):
    segment = log.start_segment()
    pages[segment.sequence] = os.urandom(PAGE_BYTES)
    io.write_block(segment.file, pages[segment.sequence], PAGE_BYTES)
log.sync()
logs = [log]
if sys.argv[2] == "0":  # a descriptor is left for the list of the folder
    logs.append(Log(folder, io, size, count * size, 2))
for one in logs:
    found = {number: io.read_block(segment.file, PAGE_BYTES) for number, segment in one.segments.items()}
    assert found == pages and len(found) == count
for one in logs:
    one.close()
io.close()
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("most_files", [0, 1000], ids=["share", "all"])
def test_more_segments_than_descriptors_are_written_and_read(tmp_path: Path, most_files: int) -> None:
    """Whether the tier keeps to its share, or the process has no descriptor left."""
    done = subprocess.run(
        [sys.executable, "-c", LOG, str(tmp_path), str(most_files)], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8, "all are closed"


def segments_open(folder: Path) -> int:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the list
            links.append(descriptor.readlink())
    return sum(link.parent == folder and link.name.startswith("segment-") for link in links)


def test_a_tier_that_may_open_one_file_stores_and_loads_all(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads use several segments at once, and then more are open for a while."""
    monkeypatch.setattr(disk_io, "most_open", lambda: 1)
    batch = [parts.make(3 * MIB) for _ in range(16)]
    for is_new in (True, False):
        with opened(folder, 64 * MIB) as tier:
            if is_new:
                store_all(tier, batch)
            assert len(tier._log.segments) >= 3
            assert_loads(tier, batch)
            load(tier, batch[:1])
            assert 1 <= segments_open(folder) <= 4
    assert segments_open(folder) == 0


def test_parts_of_a_file_that_somebody_has_removed_are_gone(
    folder: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk goes on: it is no failure of the storage."""
    monkeypatch.setattr(disk_io, "most_open", lambda: 1)
    batch = [parts.make(3 * MIB) for _ in range(16)]
    with opened(folder, 64 * MIB) as tier:
        for part in batch:
            store_all(tier, [part])
        entries = [tier._space.entry(key_of(part.name)) for part in batch]
        assert entries[0] is not None
        lost = entries[0].segment
        assert lost.file.fd < 0, "it was closed for others"
        lost.file.path.unlink()
        found = outcomes_of(tier, batch)
        assert found == [
            Outcome.MISSING if entry is not None and entry.segment is lost else Outcome.DONE for entry in entries
        ]
        assert found[0] is Outcome.MISSING and Outcome.DONE in found
        assert not tier.exists([batch[0].name], patient())[0]
