"""Damages tables at random, adopts and uses them, under the address and undefined-behaviour sanitizers.

    python tests/support/adoption_fuzz.py --from-seed 1 --seeds 40     40 pieces of 50 damages each
    python tests/support/adoption_fuzz.py --minutes 10                 as many pieces as end in that time
    python tests/support/adoption_fuzz.py --processes 16 --json FILE   so many pieces at once, and the sum as JSON

Each damage follows 200 random calls. If the table is adopted, a thousand calls follow, a second adoption and 100
more; its integrity is checked all the time. Each piece is a process, named by its seed: a piece with a crash, or
with a table that finds itself corrupt, is printed and counted, and the next one begins. `--kept FILE` adds each piece
to FILE and continues behind the seeds that are there. The sum is printed: calls, damages, crashes, calls a second of
one process. The extension is compiled, unless KVDOCK_TEST_CORE names one: then it needs no package, and the caller has
preloaded the sanitizers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from paths import SUPPORT

PROGRAM = "import sys, sanitized_core, damage_helpers; damage_helpers.main_of_use(*map(int, sys.argv[1:]))"


class Piece(NamedTuple):
    seed: int
    calls: int
    damages: int
    adopted: int
    """How many of the damaged tables were adopted and used."""
    crashes: int
    seconds: float


def run(seed: int, damages: int, environ: dict[str, str]) -> Piece:
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed), str(damages)], cwd=SUPPORT, env=environ,
        capture_output=True, text=True,
    )  # fmt: skip
    took_s = round(time.monotonic() - begun_s, 1)
    if done.returncode:
        print(f"seed {seed} ended with {done.returncode}:\n{done.stderr[-4000:]}", flush=True)
        begun = done.stderr.count(f"trial {seed}.")
        return Piece(seed, 0, begun, 0, 1, took_s)
    found = json.loads(done.stdout)
    used = sum(count for outcome, count in found["outcomes"].items() if outcome.endswith(": used"))
    return Piece(seed, found["calls"], sum(found["outcomes"].values()), used, 0, took_s)


class Sum(NamedTuple):
    calls: int
    damages: int
    adopted: int
    crashes: int
    seconds: float
    """The sum over all processes."""
    from_seed: int
    to_seed: int
    crashed: list[int]
    """The seeds of pieces with a crash."""

    def __str__(self) -> str:
        return (
            f"{self.calls:,} calls, {self.damages:,} damages, {self.adopted:,} adopted and used, "
            f"{self.crashes} crashes, {self.calls / max(self.seconds, 0.1):,.0f} calls/s"
        )


def summed(pieces: Iterable[Piece]) -> Sum:
    seeds, calls, damages, adopted, crashes, seconds = zip(*pieces, strict=True)
    return Sum(
        sum(calls), sum(damages), sum(adopted), sum(crashes), round(sum(seconds), 1), min(seeds), max(seeds),
        [seed for seed, crashed in zip(seeds, crashes, strict=True) if crashed],
    )  # fmt: skip


def built() -> dict[str, str]:
    """The environment of a piece."""
    if "KVDOCK_TEST_CORE" in os.environ:
        return dict(os.environ)
    from kill_build import build
    from sanitize import KINDS, environment

    return environment(KINDS["address"], build("sanitize-address", KINDS["address"].flags))


def ran(args: Any, first: int) -> Iterator[Piece]:
    """Each piece as it ends."""
    environ, until_s = built(), time.monotonic() + 60 * args.minutes
    seeds, running = iter(range(first, first + args.seeds)), set[Future[Piece]]()

    def begin_next() -> None:
        if time.monotonic() < until_s and (seed := next(seeds, None)) is not None:
            running.add(pool.submit(run, seed, args.damages, environ))

    with ThreadPoolExecutor(args.processes) as pool:
        for _ in range(args.processes):
            begin_next()
        while running:
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(ended)
                begin_next()
                yield ended.result()


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    asked.add_argument("--from-seed", type=int, default=1)
    asked.add_argument("--seeds", type=int, default=1 << 30, help="How many pieces at most.")
    asked.add_argument("--minutes", type=float, default=10, help="No piece begins later.")
    asked.add_argument("--damages", type=int, default=50, help="In each piece.")
    asked.add_argument("--processes", type=int, default=1, help="How many pieces at once.")
    asked.add_argument("--kept", type=Path)
    asked.add_argument("--json", type=Path, help="The file that gets the sum.")
    args = asked.parse_args()
    lines = args.kept.read_text().splitlines() if args.kept and args.kept.exists() else []
    pieces = [Piece(*json.loads(line)) for line in lines]
    for piece in ran(args, max([args.from_seed, *(piece.seed + 1 for piece in pieces)])):
        pieces.append(piece)
        if args.kept:
            with args.kept.open("a") as kept:
                print(json.dumps(piece), file=kept)
        print(f"seed {piece.seed}: {summed(pieces)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(summed(pieces)._asdict()))
    return os.EX_OK if pieces and not any(piece.crashes for piece in pieces) else 1


if __name__ == "__main__":
    sys.exit(main())
