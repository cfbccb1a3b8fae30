"""The cost and the error of the curve, and the cost of the other observers.

    python -m bench.observe --json --trace FILE
    python -m bench.observe --json --only lookups --pairs 10

`mrc_error_points`: the largest difference, in percentage points, between the hit shares that the live curve predicts
(csrc/curve/) and those of exact replays through the real chunk table with the same policy, for each size of pool and
the unlimited one. The pool fits 5 % of the trace's distinct chunks; `mrc_error_points_2` and
`mrc_error_points_10` are those of pools of 2 and 10 %. Each is the largest of several salts, which choose the samples.

`mrc_us_per_lookup`: the mean time that a lookup of the trace takes there, over all of the trace, in the quickest
round; it excludes the table's own. `mrc_us_per_lookup_512`: the same for lookups of 512 keys, half of them new, and
`mrc_us_per_lookup_512_found` for those of which all were seen before, after the samples have become few enough.

`lookup_512_off_p50_ms`, `lookup_512_on_p50_ms`: lookups of 512 resident keys at a server without observers, and at one
with all of them (bench/observe_lookups.py); `lookup_512_on_ratios`: the second to the first, for each pair of servers,
and `lookup_512_on_ratio` their median.

Each key with `_limit` says what the one before it is wanted to be at most.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.observe_lookups import lookup_figures
from bench.replay import Pool, key_of
from bench.trace import BLOCK_TOKENS, Request, read
from kvdock._core import POOL_FACTORS, Curve
from kvdock.api.record.curve import MOST_ENTRIES, MOST_SHARE, MOST_WORK

SLOT_BYTES = 4096
PERCENT = (5, 2, 10)
SALTS = tuple(0x9E3779B97F4A7C15 * number % 2**64 for number in range(1, 6))
ERROR_LIMIT_POINTS, TIME_LIMIT_US = 2.0, 5.0
LONG_KEYS, LONG_PROMPTS, LONG_LOOKUPS = 512, 200, 3000


def new_curve(room: int, salt: int) -> Curve:
    curve = Curve(
        "adaptive", room * SLOT_BYTES, salt=salt, most_share=MOST_SHARE, most_entries=MOST_ENTRIES, most_work=MOST_WORK
    )
    curve.set_space(0, BLOCK_TOKENS, SLOT_BYTES)
    return curve


def timed_us(curve: Curve, keys: Sequence[bytes], hits: Sequence[int]) -> float:
    """The mean time of these lookups. Keys are copied first, because in a server the table's lookup has just read
    them."""
    took_ns = 0
    for some, found in zip(keys, hits, strict=True):
        copied = bytes(memoryview(some))
        begun_ns = time.perf_counter_ns()
        curve.looked_up(0, copied, found)
        took_ns += time.perf_counter_ns() - begun_ns
    return took_ns / len(keys) / 1000


class Trace:
    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.keys = [b"".join(map(key_of, one.whole_blocks)) for one in requests]
        self.chunks = sum(len(one.whole_blocks) for one in requests)
        self.different = len({block for one in requests for block in one.whole_blocks})

    def hits(self, room: int) -> list[int]:
        """Chunks that each request finds in a real pool with room for `room` chunks; with room for all, the most
        possible."""
        pool = Pool(min(room, self.different + 100), "default")
        return [pool.serve(number, one.whole_blocks, one.at_ms + 2) for number, one in enumerate(self.requests)]

    def compared(self, percent: int) -> tuple[float, float]:
        """(largest error in points, quickest mean lookup in µs)."""
        room = self.different * percent // 100
        exact = [sum(self.hits(int(room * factor))) / self.chunks for factor in POOL_FACTORS]
        exact.append(1 - self.different / self.chunks)
        real = self.hits(room)
        errors, took_us = [], []
        for salt in SALTS:
            curve = new_curve(room, salt)
            took_us.append(timed_us(curve, self.keys, real))
            found = [*curve.all.found_at, curve.all.found_ever or 0.0]
            errors.append(max(abs(a - b) for a, b in zip(found, exact, strict=True)))
        return 100 * max(errors), min(took_us)


def long_lookups_us(known_share: float) -> float:
    """The time of lookups of 512 keys. The first `known_share` of the keys were seen before. Returns the time of the
    quickest of the last five parts: at first the curve learns how many samples such lookups can have."""
    choose = random.Random(1)
    known = round(known_share * LONG_KEYS)
    prompts = [choose.randbytes(32 * LONG_KEYS) for _ in range(LONG_PROMPTS)]
    curve = new_curve(LONG_KEYS * LONG_PROMPTS, SALTS[0])
    parts = []
    for _ in range(10):
        keys = [
            choose.choice(prompts)[: 32 * known] + choose.randbytes(32 * (LONG_KEYS - known))
            for _ in range(LONG_LOOKUPS // 10)
        ]
        parts.append(timed_us(curve, keys, [known] * len(keys)))
    return min(parts[5:])


Figures = dict[str, float | list[float]]


def curve_figures(path: Path) -> Figures:
    trace = Trace(read(path))
    figures: Figures = {}
    for percent in PERCENT:
        error, took_us = trace.compared(percent)
        ending = "" if percent == PERCENT[0] else f"_{percent}"
        figures[f"mrc_error_points{ending}"] = round(error, 2)
        if not ending:
            figures["mrc_error_points_limit"] = ERROR_LIMIT_POINTS
            figures["mrc_us_per_lookup"] = round(took_us, 2)
            figures["mrc_us_per_lookup_limit"] = TIME_LIMIT_US
    figures["mrc_us_per_lookup_512"] = round(long_lookups_us(0.5), 2)
    figures["mrc_us_per_lookup_512_found"] = round(long_lookups_us(1.0), 2)
    return figures


PARTS = ("curve", "lookups")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.observe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trace", type=Path, help="for the curve: JSON lines, as bench/trace.py reads them")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=1, help="of servers, for the lookups")
    chosen = parser.parse_args(arguments)
    figures: Figures = {}
    if "curve" in chosen.only:
        if chosen.trace is None:
            parser.error("the curve needs --trace")
        figures |= curve_figures(chosen.trace)
    if "lookups" in chosen.only:
        figures |= lookup_figures(chosen.pairs)
    print(json.dumps(figures) if chosen.json else "\n".join(f"{name} {value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
