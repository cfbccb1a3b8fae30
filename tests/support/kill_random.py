"""Thousands of kills at random moments, under load: does anybody ever read wrong bytes, and does anything leak?

    PYTHONPATH=. python tests/support/kill_random.py --kills 2000

Engines store and load conversations out of a small set in a pool that is always full. At a random moment the server
or an engine is killed (the extension is the one that is shipped) and replaced. Prints one JSON object; ends with 1
when a byte was wrong, a pool was lost, the table's check found something, or anything was left at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from kill_cases import CHUNKS, Case, Run
from kill_helpers import Child, Nursery, until

from kvdock import _core
from kvdock.client.client import Client
from kvdock.shm import objects as shm

ENGINES, CONVERSATIONS, PAUSE_S, SERVER_SHARE = 3, 12, 0.06, 0.25


class Storm:
    """Engines at work, and what was seen."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run, self._random = run, random.Random(seed)
        self._pool = run.ready(run.serve())
        self.engines = [self._engine() for _ in range(ENGINES)]
        self.seen = dict.fromkeys(
            ("server_kills", "engine_kills", "pools_lost", "loads", "loaded_chunks", "stores", "wrong_blocks"), 0
        )

    def _engine(self) -> Child:
        child = self._run.engine(self._random.getrandbits(40))
        child.answer()
        self._begin(child)
        return child

    def _begin(self, child: Child) -> None:
        verb = self._random.choice(("store", "load"))
        child.begin(verb, self._random.randrange(CONVERSATIONS), self._random.randint(1, CHUNKS))

    def work(self, length_s: float) -> None:
        """Takes answers and gives new work until the time is over."""
        end = time.monotonic() + length_s
        while time.monotonic() < end:
            for child in self.engines:
                if child.link.poll(0.001):
                    self.count(child.answer())
                    self._begin(child)

    def count(self, answer: tuple[int, int] | None) -> None:
        if answer is None:
            self.seen["stores"] += 1
            return
        self.seen["loads"] += 1
        self.seen["loaded_chunks"] += answer[0]
        self.seen["wrong_blocks"] += answer[1]

    def kill(self) -> None:
        if self._random.random() < SERVER_SHARE:
            assert self._run.server is not None
            self._drop(self._run.server)
            self.seen["pools_lost"] += self._run.ready(self._run.serve()) != self._pool
            self.seen["server_kills"] += 1
            return
        at = self._random.randrange(ENGINES)
        self._drop(self.engines[at])
        self.engines[at] = self._engine()
        self.seen["engine_kills"] += 1

    def _drop(self, child: Child) -> None:
        child.close()
        self._run.children.remove(child)


def storm(nursery: Nursery, folder: Path, kills: int, seed: int) -> dict[str, object]:
    run = Run(nursery, folder, Case("random", "", ""))
    began = time.monotonic()
    try:
        one = Storm(run, seed)
        source = random.Random(seed + 1)
        for _ in range(kills):
            one.work(source.uniform(0, 2 * PAUSE_S))
            one.kill()
        for child in one.engines:
            one.count(child.answer())
            child.do("leave")
        assert run.server is not None
        with Client(run.unix) as client:
            until(lambda: client.status().sessions == 0, "all sessions end")
            status = client.status()
        found: dict[str, object] = {
            "kills": kills, **one.seen, "check": run.server.do("check"), "leases_left": status.leases,
            "reservations_left": status.reservations, "held_bytes_left": status.pool.held_bytes,
        }
        run.server.end(15)
        left = [name for pool in run.pools for name in shm.pool_objects().get(pool, [])]
        return {**found, "objects_left": len(left), "seconds": round(time.monotonic() - began), "seed": seed}
    finally:
        run.close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/support/kill_random.py", description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    chosen = parser.parse_args(arguments)
    nursery = Nursery(Path(_core.__file__))
    try:
        with tempfile.TemporaryDirectory(prefix="kvdock-kills-") as folder:
            found = storm(nursery, Path(folder), chosen.kills, chosen.seed)
    finally:
        nursery.close()
    print(json.dumps(found))
    bad = ("wrong_blocks", "pools_lost", "check", "leases_left", "reservations_left", "held_bytes_left", "objects_left")
    return int(any(found[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
