"""Processes with a disk tier of their own, for tests/tiers/test_disk.py.

    python disk_processes.py write FOLDER LIMIT SEED LENGTH      stores until it is killed; prints what was DONE
    unshare --mount python disk_processes.py small FOLDER        on a file system of 12 MiB; prints what was seen
    unshare --mount python disk_processes.py ramfs FOLDER        on a file system that takes no direct input and output
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tier_helpers import ARENA, KIB, MIB, Part, Parts, assert_loads, outcomes_of, patient, store, store_all

from kvdock.tiers.disk.tier import DiskTier
from kvdock.tiers.tier import Outcome


def write(folder: Path, limit_bytes: int, seed: str, length: int) -> None:
    """Batches of one to five parts; each is named by its number, and every seventh goes again. Loads some, so that
    there is something to copy when room is made."""
    parts = Parts(seed)
    tier = DiskTier.open(folder, limit_bytes)
    done: list[tuple[int, Part]] = []
    numbers = itertools.count()
    for size in itertools.cycle((1, 2, 5)):
        ARENA.reset()
        batch = [(next(numbers), parts.make(length)) for _ in range(size)]
        done += batch
        outcomes = store(tier, [part for _, part in batch])
        say("stored", [number for (number, _), one in zip(batch, outcomes, strict=True) if one is Outcome.DONE])
        deleted = [(number, part) for number, part in batch if number % 7 == 6]
        say("deleting", [number for number, _ in deleted])
        tier.delete([part.name for _, part in deleted], patient())
        say("deleted", [number for number, _ in deleted])
        outcomes_of(tier, [part for number, part in done[-12:] if number % 3 == 0])
        del done[:-12]


def say(what: str, numbers: list[int]) -> None:
    sys.stdout.write(f"{what} {' '.join(map(str, numbers))}\n")
    sys.stdout.flush()


def small(folder: Path) -> dict[str, object]:
    """The tier may use 32 MiB, and the file system has 12 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    filler, parts = folder / "somebody-elses", Parts("small")
    filler.write_bytes(bytes(10 * MIB))
    tier = DiskTier.open(folder / "tier", 32 * MIB)
    seen: dict[str, object] = {"when_full": [one.value for one in store(tier, parts.many(3, MIB))]}
    filler.unlink()
    kept = parts.many(3, MIB)
    store_all(tier, kept)
    assert_loads(tier, kept)
    take_all(filler)
    assert_loads(tier, kept)
    seen["to_the_last_byte"] = [one.value for one in store(tier, parts.many(3, MIB))]
    assert_loads(tier, kept[-1:])
    os.truncate(filler, filler.stat().st_size - MIB)  # no room for a segment, but for the index
    more = parts.many(40, MIB)
    outcomes = []
    for part in more:
        ARENA.reset()
        outcomes += store(tier, [part])
    seen["beside_others"] = sorted({one.value for one in outcomes})
    ARENA.reset()
    assert_loads(tier, [part for part, one in zip(more, outcomes, strict=True) if one is Outcome.DONE][-1:])
    take_all(filler)
    tier.close(patient())
    DiskTier.open(folder / "tier", 32 * MIB).close(patient())
    return seen


def take_all(filler: Path) -> None:
    """What the file system has left."""
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4 * KIB))


def ramfs(folder: Path) -> dict[str, object]:
    subprocess.run(["mount", "-t", "ramfs", "none", str(folder)], check=True)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    parts = Parts("ramfs")
    batch = [parts.make(length) for length in (1, 5000, MIB, 5 * MIB + 3)]
    tier = DiskTier.open(folder, 64 * MIB)
    store_all(tier, batch)
    assert_loads(tier, batch)
    tier.close(patient())
    tier = DiskTier.open(folder, 64 * MIB)
    assert_loads(tier, batch)
    tier.close(patient())
    return {"loaded": len(batch)}


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "write":
        write(Path(where), int(rest[0]), rest[1], int(rest[2]))
    else:
        sys.stdout.write(json.dumps({"small": small, "ramfs": ramfs}[what](Path(where))))
