"""Damages tables at random, adopts and uses them, under the address and undefined-behaviour sanitizers.

    python tests/support/adoption_fuzz.py --from-seed 1 --seeds 40     40 pieces of 50 damages each
    python tests/support/adoption_fuzz.py --minutes 10                 as many pieces as end in that time

Each damage follows 200 random calls. If the table is adopted, a thousand calls follow, a second adoption and 100
more; its integrity is checked all the time. Each piece is a process, named by its seed: a piece with a crash, or
with a table that finds itself corrupt, is printed and counted, and the next one begins. `--kept FILE` adds each piece
to FILE and continues behind the seeds that are there. The sum is printed: calls, damages, crashes, calls a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kill_build import build
from paths import ROOT
from sanitize import KINDS, environment

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
        [sys.executable, "-c", PROGRAM, str(seed), str(damages)], cwd=ROOT / "tests/support", env=environ,
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


def summed(pieces: Iterable[Piece]) -> str:
    _, calls, damages, adopted, crashes, seconds = map(sum, zip(*pieces, strict=True))
    return (
        f"{calls:,} calls, {damages:,} damages, {adopted:,} adopted and used, {crashes} crashes, "
        f"{calls / max(seconds, 0.1):,.0f} calls/s"
    )


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    asked.add_argument("--from-seed", type=int, default=1)
    asked.add_argument("--seeds", type=int, default=1 << 30, help="How many pieces at most.")
    asked.add_argument("--minutes", type=float, default=10, help="No piece begins later.")
    asked.add_argument("--damages", type=int, default=50, help="In each piece.")
    asked.add_argument("--kept", type=Path)
    args = asked.parse_args()
    lines = args.kept.read_text().splitlines() if args.kept and args.kept.exists() else []
    pieces = [Piece(*json.loads(line)) for line in lines]
    first = max([args.from_seed, *(piece.seed + 1 for piece in pieces)])
    environ = environment(KINDS["address"], build("sanitize-address", KINDS["address"].flags))
    until_s = time.monotonic() + 60 * args.minutes
    for seed in range(first, first + args.seeds):
        if time.monotonic() >= until_s:
            break
        piece = run(seed, args.damages, environ)
        pieces.append(piece)
        if args.kept:
            with args.kept.open("a") as kept:
                print(json.dumps(piece), file=kept)
        print(f"seed {seed}: {summed(pieces)}", flush=True)
    return os.EX_OK if not any(piece.crashes for piece in pieces) else 1


if __name__ == "__main__":
    sys.exit(main())
