"""How much clients that misbehave delay an engine, and how long they hold the server's event loop.

    python -m bench.floods --json

An engine looks up 16 keys over the Unix socket every 4 ms: beside a process that only computes, which is the baseline,
and beside each kind of flood (bench/floods/kinds.py), which comes from another process. They take turns, because the
load of a shared machine changes. The server has 2,500 sessions, 900 namespaces, 90,000 chunks and a full ring of events
(bench/floods/full.py).

A p99 of some hundred lookups, and the longest of some thousand turns, differ from run to run: a kind that exceeds a
limit is measured `--again` times more, each as long as the first time, and its figures are the medians of all.

`kinds`: how many there were. `again`: those that were measured again, with every ratio and longest turn.
`worst_p99_ratio`: the engine's p99 beside a flood, divided by that of the baseline. `worst_p99_ratio_unstopped`: the
same without the time in which the engine's thread or the server's loop waited for a processor: it is
what the server does, whatever else the machine does.
`longest_turn_ms`: the longest turn of the server's event loop in processor time (bench/floods/turns.py), and
`longest_turn_wall_ms` on the clock, with what a busy machine took from it, and `longest_turn_unstopped_ms` in
processor time, of the turns that the system did not stop for another process; the first two with `_SCOPE`: beside
floods with a token of the scope, `_none` without a token, `_quiet` beside the baseline. A kind is measured again by its
ratio and by processor time. `--explain` says what turns above 2 ms were made of (bench/floods/long_turns.py).
`rss_growth_mib`: by how much the server's memory grew at most. `of`: p99, ratio, longest lookup
and turns of each kind, and how many lookups failed. `found_afterwards`: how many of the 16 keys are still found.

tests/api/test_floods.py lets engines go on beside each flood.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

from bench.floods.full import Full, Size, full_server
from bench.floods.honest import Latencies, descriptors, flooding, forget_most_memory, honest, most_memory_mib
from bench.floods.kinds import KINDS, QUIET, Flood, prepared
from bench.floods.turns import Longest

MARGIN_S = 30.0
"""After which a flood ends that nobody has ended."""
MOST_RATIO = 3.0
MOST_TURN_MS = 5.0
PAUSE_S = 0.2
"""In which the server closes a flood's connections, before the next round."""


class Seen(NamedTuple):
    """`turn`: the server's longest."""

    lookups: Latencies
    turn: Longest

    def __add__(self, other: Seen) -> Seen:  # type: ignore[override]  # no concatenation
        return Seen(self.lookups + other.lookups, self.turn.or_longer(other.turn))


NOTHING = Seen(Latencies([], [], 0), Longest())


def beside(flood: Flood, full: Full, seconds: float) -> Seen:
    with flooding(flood, seconds + MARGIN_S):
        full.longest_turn.forget()
        lookups = honest(full.engine, full.keys, seconds, full.server.pid)
        turn = full.longest_turn.read()
    time.sleep(PAUSE_S)
    return Seen(lookups, turn)


class Figures(NamedTuple):
    p99_ms: float
    p99_unstopped_ms: float
    max_ms: float
    errors: float
    ratio: float
    ratio_unstopped: float
    turn_ms: float
    turn_wall_ms: float
    turn_unstopped_ms: float
    quiet_turn_ms: float
    """The longest turn beside the baseline."""
    quiet_turn_wall_ms: float
    quiet_turn_unstopped_ms: float

    @property
    def turn(self) -> Longest:
        return Longest(self.turn_ms, self.turn_wall_ms, self.turn_unstopped_ms)

    @property
    def quiet_turn(self) -> Longest:
        return Longest(self.quiet_turn_ms, self.quiet_turn_wall_ms, self.quiet_turn_unstopped_ms)

    @property
    def is_within_limits(self) -> bool:
        return self.ratio <= MOST_RATIO and max(self.turn_ms, self.quiet_turn_ms) <= MOST_TURN_MS


def measure_kind(full: Full, name: str, seconds: float, rounds: int) -> Figures:
    quiet, seen = NOTHING, NOTHING
    baseline, flood = prepared(QUIET, full.target), prepared(name, full.target)
    for _ in range(rounds):
        quiet += beside(baseline, full, seconds / rounds)
        seen += beside(flood, full, seconds / rounds)
    of = seen.lookups
    return Figures(
        of.p99_ms, of.p99_unstopped_ms, of.max_ms, of.errors, of.p99_ms / quiet.lookups.p99_ms,
        of.p99_unstopped_ms / quiet.lookups.p99_unstopped_ms, *seen.turn, *quiet.turn,
    )


def explained(full: Full, seen_bytes: int) -> bytes:
    """Lines about long turns, from that byte on."""
    return full.explained.read_bytes()[seen_bytes:] if full.explained.exists() else b""


def measure(full: Full, names: list[str], chosen: argparse.Namespace) -> dict[str, Any]:
    by_kind, again = dict[str, dict[str, float]](), dict[str, dict[str, list[float]]]()
    turns = defaultdict[str, Longest](Longest)
    pid = full.server.pid
    honest(full.engine, full.keys, 0.5, pid)
    forget_most_memory(pid)
    began_mib = most_memory_mib(pid)
    seen_bytes = len(explained(full, 0))
    for name in names:
        all_of = [measure_kind(full, name, chosen.seconds, chosen.rounds)]
        if not all_of[0].is_within_limits:
            all_of += [measure_kind(full, name, chosen.seconds, chosen.rounds) for _ in range(chosen.again)]
            again[name] = {
                key: [getattr(one, key) for one in all_of] for key in ("ratio", "ratio_unstopped", "turn_ms")
            }
        figures = Figures(*map(statistics.median, zip(*all_of, strict=True)))
        by_kind[name] = {key: value for key, value in figures._asdict().items() if "quiet" not in key}
        print(name, {key: round(value, 2) for key, value in by_kind[name].items()}, file=sys.stderr, flush=True)
        lines = explained(full, seen_bytes)
        seen_bytes += len(lines)
        print(lines.decode(), end="", file=sys.stderr, flush=True)
        whose = KINDS[name].who
        turns[whose] = turns[whose].or_longer(figures.turn)
        turns[QUIET] = turns[QUIET].or_longer(figures.quiet_turn)
    return {
        "kinds": len(by_kind), "worst_p99_ratio": max(one["ratio"] for one in by_kind.values()),
        "worst_p99_ratio_unstopped": max(one["ratio_unstopped"] for one in by_kind.values()),
        "longest_turn_ms": max(turn.cpu_ms for turn in turns.values()),
        "longest_turn_wall_ms": max(turn.wall_ms for turn in turns.values()),
        "longest_turn_unstopped_ms": max(turn.unstopped_ms for turn in turns.values()),
        **{f"longest_turn_ms_{whose}": turn.cpu_ms for whose, turn in turns.items()},
        **{f"longest_turn_wall_ms_{whose}": turn.wall_ms for whose, turn in turns.items()},
        "rss_growth_mib": most_memory_mib(pid) - began_mib, "descriptors": descriptors(pid),
        "found_afterwards": full.engine.look_up(full.keys), "again": again, "of": by_kind,
    }


def rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return [rounded(one) for one in figures] if isinstance(figures, list) else round(figures, 2)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.floods", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each flood")
    parser.add_argument("--rounds", type=int, default=4, help="in which each flood takes turns with the baseline")
    parser.add_argument("--again", type=int, default=4, help="how often a kind is measured again that exceeds a limit")
    parser.add_argument("--kinds", default="", help="a regular expression: only floods whose names it matches in part")
    parser.add_argument("--scale", type=float, default=1.0, help="how much the server has, as a share of its usual")
    parser.add_argument("--explain", action="store_true", help="what turns above 2 ms were made of, on stderr")
    chosen = parser.parse_args(arguments)
    names = [name for name in KINDS if name != QUIET and re.search(chosen.kinds, name)]
    with full_server(Size().scaled(chosen.scale), explains=chosen.explain) as full:
        figures = rounded(measure(full, names, chosen))
    of = figures.pop("of")
    if chosen.json:
        print(json.dumps({**figures, "of": of}))
    else:
        print("\n".join(f"{key:32} {value}" for key, value in (*figures.items(), *of.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
